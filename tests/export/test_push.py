"""Packages are uploaded to the Hugging Face Hub, replaced by a local server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import are_progress_bars_disabled, close_session

from shortlist.errors import ConfigError
from shortlist.export import HubError, export
from tests.export.encoders import encoder
from tests.export.fake_hub import TOKEN, FakeHub, fake_hub
from tests.processes import Commands

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of httpx about the Hub's library
NAME = "someone/a-model"
FILES = {"README.md", "config.json", "load.py", "model.safetensors"}
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder().save(tmp_path_factory.mktemp("pushed") / "model")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub, with the settings of a user who is logged in; large files are uploaded by HTTP instead of Xet."""
    with fake_hub() as opened:
        monkeypatch.setattr(constants, "ENDPOINT", opened.address)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield opened
        close_session()


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name in FILES}


def test_a_package_is_uploaded(model: Path, hub: FakeHub, tmp_path: Path) -> None:
    (done,) = export(model, package=tmp_path / "package", license="apache-2.0", push_to_hub=NAME)
    assert done.url == f"{hub.address}/{NAME}"
    repository = hub.repositories[NAME]
    assert repository.files == content(tmp_path / "package")
    assert repository.files.keys() == FILES
    assert repository.files["README.md"].startswith(b"---\nlicense: apache-2.0\n")
    assert hub.large  # the weights
    assert (repository.private, repository.commits) == (False, 1)
    assert not are_progress_bars_disabled()  # afterwards

    (tmp_path / "package" / "notes.txt").write_text("not for others")
    export(model, package=tmp_path / "package", license="mit", push_to_hub=NAME)  # again, to the same place
    assert repository.files == content(tmp_path / "package")
    assert b"license: mit" in repository.files["README.md"]
    assert repository.commits == 2


def test_private(model: Path, hub: FakeHub, tmp_path: Path) -> None:
    for _ in range(2):
        export(model, package=tmp_path / "package", push_to_hub=NAME, private=True)
    assert hub.repositories[NAME].private
    assert hub.repositories[NAME].commits == 2


def test_a_private_upload_to_a_public_repository_is_refused(model: Path, hub: FakeHub, tmp_path: Path) -> None:
    hub.create({"organization": "someone", "name": "a-model"})
    with pytest.raises(HubError, match="someone/a-model exists and is public, so nothing was uploaded"):
        export(model, package=tmp_path / "package", push_to_hub=NAME, private=True)
    assert hub.repositories[NAME].files == {}
    assert content(tmp_path / "package").keys() == FILES


@pytest.mark.parametrize("name", ["a-model", "one/two/three", "someone/a model", "someone/", ""])
def test_invalid_names_of_repositories(name: str, model: Path, hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`push_to_hub` should be OWNER/NAME"):
        export(model, package=tmp_path / "package", push_to_hub=name)
    assert not (tmp_path / "package").exists()


def test_without_a_token(model: Path, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match=r"needs an access token .*: run hf auth login, or set .* HF_TOKEN"):
        export(model, package=tmp_path / "package", push_to_hub=NAME)
    assert not (tmp_path / "package").exists()
    assert hub.repositories == {}


def test_a_token_without_permission(model: Path, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    with pytest.raises(HubError, match=r"The access token may not write to someone/a-model \(.*401"):
        export(model, package=tmp_path / "package", push_to_hub=NAME)


@pytest.mark.parametrize(
    ("status", "message"),
    [(403, "The access token may not write to"), (413, r"http://\S+ refused the upload to someone/a-model \(.*413")],
)
def test_an_upload_that_the_hub_refuses(status: int, message: str, model: Path, hub: FakeHub, tmp_path: Path) -> None:
    hub.refuse = status
    with pytest.raises(HubError, match=message) as refused:
        export(model, package=tmp_path / "package", push_to_hub=NAME)
    folder = tmp_path / "package"
    assert str(refused.value).endswith(f"The package is in {folder}; to upload it later: hf upload {NAME} {folder}")
    assert content(folder).keys() == FILES
    assert hub.repositories[NAME].files == {}


def test_without_a_network(model: Path, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # no server listens there
    with pytest.raises(HubError, match=r"http://127\.0\.0\.1:9 cannot be reached \(.*\)\. The package is in"):
        export(model, package=tmp_path / "package", push_to_hub=NAME)
    assert content(tmp_path / "package").keys() == FILES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"push_to_hub": NAME, "onnx": "model.onnx"}, "`push_to_hub` uploads the folder of a package"),
        ({"private": True, "package": "package"}, "`private` is a property of an uploaded package"),
    ],
)
def test_options_that_need_others(options: dict[str, str], message: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        export(model, **options)


FRESH = """
import os, sys
os.environ.update({settings!r})
for name in [name for name in sys.modules if name.startswith(("huggingface_hub", "shortlist.export"))]:
    del sys.modules[name]  # they are imported again, and read the environment
"""


@pytest.fixture
def command(commands: Commands, hub: FakeHub, tmp_path: Path) -> Command:
    """Run `shortlist export` in a process whose environment contains the address of the Hub and the token."""
    environment = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN}

    def run(*args: str | Path, before: str = "", **settings: str) -> tuple[int, str, str]:
        fresh = FRESH.format(settings={**environment, **settings})
        return commands.run("export", *args, cwd=tmp_path, before=f"{fresh}\n{before}")

    return run


def test_the_command(model: Path, hub: FakeHub, command: Command, tmp_path: Path) -> None:
    given = (model, "--package", tmp_path / "package", "--push-to-hub", NAME, "--private")
    code, out, error = command(*given)
    assert code == 0, error
    assert out.splitlines()[-1] == f"uploaded: {hub.address}/{NAME}"
    assert hub.repositories[NAME].files == content(tmp_path / "package")
    assert hub.repositories[NAME].private
    code, out, error = command(*given, "--json")
    assert code == 0, error
    assert json.loads(out)[0]["url"] == f"{hub.address}/{NAME}"
    lines = [json.loads(line) for line in error.splitlines()]  # and no bars of the Hub's library
    assert {"progress": f"uploading {tmp_path / 'package'} to {NAME}", "state": "started"} in lines


@pytest.mark.parametrize(
    ("settings", "before", "message"),
    [
        ({"HF_TOKEN": ""}, "", "--push-to-hub needs an access token of the Hugging Face Hub"),
        ({"HF_HUB_OFFLINE": "1"}, "", "cannot be reached (Cannot reach "),
        (
            {},
            "sys.modules['huggingface_hub'] = None",
            "needs the package huggingface_hub, which is not installed: pip install 'shortlist[export]'",
        ),
    ],
    ids=["no token", "offline", "not installed"],
)
def test_errors_of_the_command(
    settings: dict[str, str], before: str, message: str, model: Path, command: Command, tmp_path: Path
) -> None:
    given = (model, "--package", tmp_path / "package", "--push-to-hub", NAME)
    code, _, error = command(*given, before=before, **settings)
    assert code == 1
    assert error.splitlines()[-1].startswith("Error: ")
    assert message in error.splitlines()[-1]
    assert "Traceback" not in error

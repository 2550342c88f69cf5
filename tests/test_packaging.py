"""The wheel and the sdist are complete, and each extra installs all that its features need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from functools import cache
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import extras_features

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel that is built from it: of a copy, since building leaves files behind."""
    folder = tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns(".git", ".venv*", ".*cache", "__pycache__", "*.egg-info", "build", "dist", "runs")
    source = shutil.copytree(ROOT, folder / "source", ignore=ignored)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


class Installed:
    """The wheel in a new environment, without its dependencies; `links` has links to those, in a folder per extra."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python, self.links = folder / "bin" / "python", folder / "links"
        pip = (sys.executable, "-m", "pip", "--python", self.python)
        run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
        (facts,) = folder.glob("lib/python*/site-packages/shortlist-*.dist-info")
        self.requires = {"shortlist": _parsed(PathDistribution(facts))}  # by distribution
        for extra in extras_features.FEATURES:
            self._link(self.links / extra, extra)

    def _link(self, folder: Path, extra: str) -> None:
        """Fill a folder with links to the packages that pip would install with an extra."""
        folder.mkdir(parents=True)
        for top, place in (each for name in self.required(extra) for each in _top_level(name)):
            if not (folder / top).exists():  # distributions may share a folder, such as nvidia
                (folder / top).symlink_to(place)

    def required(self, extra: str) -> set[str]:
        """Return the names of the distributions that the wheel requires, directly and through others."""
        todo, done = {("shortlist", extra)}, set[tuple[str, str]]()
        while todo:
            name, extra = wanted = todo.pop()
            done.add(wanted)
            if name not in self.requires:
                self.requires[name] = _parsed(distribution(name))
            for each in self.requires[name]:
                if each.marker is None or each.marker.evaluate({"extra": extra}):
                    todo |= {(canonicalize_name(each.name), extra) for extra in ("", *each.extras)} - done
        return {name for name, _ in done} - {"shortlist"}


@cache
def _top_level(name: str) -> list[tuple[str, Path]]:
    """The files and folders of a distribution at the top of where it is installed: names, and paths."""
    installed = distribution(name)
    names = {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}
    return [(each, Path(str(installed.locate_file(each)))) for each in names]


def _parsed(installed: Distribution) -> list[Requirement]:
    return [Requirement(line) for line in installed.requires or ()]


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(built["wheel"], tmp_path_factory.mktemp("installed") / "environment")


class TestFiles:
    def test_twine_accepts_both(self, built: dict[str, Path]) -> None:
        run(sys.executable, "-m", "twine", "check", "--strict", *built.values())

    def test_the_wheel_has_every_file_of_the_package_and_nothing_else(self, built: dict[str, Path]) -> None:
        package = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src" / "shortlist").rglob("*.*")}
        with zipfile.ZipFile(built["wheel"]) as wheel:
            files = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert files == {name for name in package if "__pycache__" not in name}
        assert {"shortlist/py.typed", "shortlist/recipes/folder.yaml", "shortlist/serve/page/index.html"} < files

    def test_the_sdist_can_be_tested(self, built: dict[str, Path]) -> None:
        with tarfile.open(built["sdist"]) as sdist:
            files = {name.partition("/")[2] for name in sdist.getnames()}
        assert {"Makefile", "constraints.txt", "tests/conftest.py", "docs/loss.md", "src/shortlist/py.typed"} < files

    def test_the_readme_is_the_description(self, built: dict[str, Path]) -> None:
        with zipfile.ZipFile(built["wheel"]) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = wheel.read(name).decode()
        assert "Description-Content-Type: text/markdown" in metadata
        assert metadata.endswith((ROOT / "README.md").read_text(encoding="utf-8"))

    def test_the_supported_versions_of_python_agree(self) -> None:
        versions = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
        assert PROJECT["requires-python"] == f">={versions[0]}"
        assert f"Python {', '.join(versions[:-1])} or {versions[-1]}" in (ROOT / "README.md").read_text()
        assert (
            f"python: [{', '.join(map(repr, versions))}]".replace("'", '"')
            in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
        )

    def test_the_workflow_installs_the_wheel_with_and_without_extras(self) -> None:
        workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
        commands = "\n".join(step.get("run", "") for step in workflow["jobs"]["build"]["steps"])
        step = r'pip install .* (dist/\S+|"\S+")\n(?:done\n)?.* tests/extras_features\.py (\w+)'
        installed = re.findall(step, commands)
        assert installed == [("dist/*.whl", "plain"), ('"${wheel}[all]"', "all")]


class TestInstallation:
    def test_every_extra_has_features(self) -> None:
        assert extras_features.FEATURES.keys() == {"plain", *PROJECT["optional-dependencies"]} - {"dev"}

    def test_every_extra_suffices(self, installed: Installed, tmp_path: Path) -> None:
        done = run(installed.python, "-I", extras_features.__file__, installed.links, tmp_path)
        assert set(done.stdout.splitlines()[-1].split()) == extras_features.FEATURES.keys()

    def test_all_requires_what_the_other_extras_require(self, installed: Installed) -> None:
        each = [installed.required(extra) for extra in extras_features.FEATURES if extra != "all"]
        assert installed.required("all") == set.union(*each)

    @pytest.mark.parametrize("extra", extras_features.BEYOND)
    def test_other_extras_include_training(self, extra: str, installed: Installed) -> None:
        assert installed.required("training") < installed.required(extra)

    def test_a_plain_installation_requires_torch_and_numpy(self, installed: Installed) -> None:
        plain = {each.name for each in installed.requires["shortlist"] if each.marker is None}
        assert plain == {"numpy", "torch"}

    @pytest.mark.parametrize("command", [["shortlist"], ["python", "-m", "shortlist"]], ids=" ".join)
    def test_the_command_needs_an_extra(self, command: list[str], installed: Installed) -> None:
        typed = [installed.python.parent / command[0], *command[1:], "train"]
        plain = {"PYTHONPATH": str(installed.links / "plain")}
        done = subprocess.run(typed, capture_output=True, text=True, env=plain)
        sentence = "The shortlist command needs the package typer, which is not installed: pip install 'shortlist[all]'"
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"Error: {sentence}\n")

    def test_help_imports_only_what_it_needs(self, installed: Installed) -> None:
        command = (installed.python, "-X", "importtime", installed.python.parent / "shortlist", "--help")
        done = run(*command, path=installed.links / "training")
        assert "train" in done.stdout
        imported = set(re.findall(r"\| +(\w+)$", done.stderr, re.MULTILINE))
        assert {"shortlist", "typer"} <= imported
        assert not imported & {"filelock", "fsspec", "numpy", "platformdirs", "pydantic", "torch", "yaml"}


def run(*command: str | Path, path: Path | str = "") -> subprocess.CompletedProcess[str]:
    """Run a command, which must succeed, without the sources of the tests in its path."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def test_the_licence_of_every_direct_dependency_is_listed() -> None:
    listed = dict(re.findall(r"^\| (\S+) \| .* \| (.+) \|$", (ROOT / "docs" / "licences.md").read_text(), re.MULTILINE))
    optional = (each for extra, names in PROJECT["optional-dependencies"].items() if extra != "dev" for each in names)
    names = {canonicalize_name(Requirement(each).name) for each in (*PROJECT["dependencies"], *optional)}
    assert names - {"shortlist"} <= listed.keys(), "run python docs/licences.py > docs/licences.md"

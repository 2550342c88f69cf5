"""The command `shortlist export`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shortlist.cli import main
from tests.export.encoders import encoder


def call(*args: str | Path) -> int:
    sys.argv = ["shortlist", "export", *map(str, args)]
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.fixture(autouse=True)
def restore_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warnings.showwarning", lambda *_: None)  # main() replaces it
    monkeypatch.setattr(sys, "argv", sys.argv)


def test_written_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = encoder().save(tmp_path / "model"), tmp_path / "model.pt"
    assert call(model, "--torchscript", file) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"TorchScript: {file}, verified on 8 synthetic images: largest difference ")
    assert out.endswith("tolerance 1e-05\n")
    assert call(model, "--package", tmp_path / "package", "--json") == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["kind"], entry["path"]) == ("package", str(tmp_path / "package"))
    assert entry["largest_difference"] <= entry["tolerance"]


def test_every_option_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: dict[str, object] = {}
    monkeypatch.setattr("shortlist.export.export", lambda run, **options: passed.update(run=run, **options) or [])
    paths = {"onnx": Path("a.onnx"), "torchscript": Path("b.pt"), "torch_export": Path("c.pt2"), "package": Path("d")}
    options = [word for name, path in paths.items() for word in (f"--{name.replace('_', '-')}", path)]
    assert call("run", *options, "--license", "mit", "--push-to-hub", "someone/model", "--private") == 0
    del passed["display"]
    expected = {"run": "run", **paths, "license": "mit", "push_to_hub": "someone/model", "private": True}
    assert passed == expected


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    out = capsys.readouterr().out
    assert all(option in out for option in ("--onnx", "--torchscript", "--torch-export", "--package", "--license"))


@pytest.mark.parametrize(("args", "message"), [((), "Nothing to write"), (("--onnx", "x.onnx"), "No run found in")])
def test_mistakes(args: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tmp_path, *args) == 1
    err = capsys.readouterr().err
    assert err.startswith("Error: ")
    assert message in err
    assert err.count("\n") == 1

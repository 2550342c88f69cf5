"""Packages give the vectors of the run without shortlist, and their model cards describe the run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from safetensors import SafetensorError

from shortlist.errors import ModelError, RunError
from shortlist.export import Exported, export
from shortlist.export import package as package_module
from shortlist.export.package import write_package
from shortlist.export.source import ExportSource
from shortlist.training import Display, RunFolder, open_encoder
from shortlist.training import train_run as train
from tests.data.pictures import EPS
from tests.export.encoders import SCALES, WHOLE, encoder, pictures
from tests.processes import Commands
from tests.state import another_state, changes
from tests.training.runs import class_folders, config, write_config

KINDS = {
    "gem": {},
    "average": {"pooling": "average", "layer_norm": False},
    "max, no linear layer": {"pooling": "max", "dim": None},
    "class token": {"backbone": "test_vit", "pooling": "token"},
    "gem of tokens": {"backbone": "test_vit", "layer_norm": False, "l2_pooled": True},
    "registers": {"backbone": "test_vit3"},
    "maps last": {
        "backbone": "swin_tiny_patch4_window7_224",
        "backbone_args": {"depths": [1, 1, 1, 1], "embed_dim": 24},
    },
    "several scales": {"transform": WHOLE, "scales": SCALES},
    "several scales of gem": {"transform": WHOLE, "scales": SCALES, "dim": None, "layer_norm": False},
}
NAME = "im`a|ges <script>"  # of the folder of images
WITHOUT_SHORTLIST = """
import sys
for name in [name for name in sys.modules if name.startswith("shortlist")]:
    sys.modules[name] = None  # importing it fails
"""
ALONE = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
import numpy
from load import config, embed, formats, preprocess
from PIL import EpsImagePlugin, Image, UnidentifiedImageError
*files, eps = sys.argv[3:]
found = [embed(preprocess(Image.open(file, formats=formats), config["preprocessing"])[None]) for file in files]
numpy.save(sys.argv[2], numpy.concatenate(found))
sys.argv[1:] = [files[0], files[0]]
runpy.run_module("load", run_name="__main__")
EpsImagePlugin.Ghostscript = lambda *_: sys.exit("Ghostscript was started")
sys.argv[1:] = [eps]
try:
    runpy.run_module("load", run_name="__main__")
except UnidentifiedImageError:
    print("refused")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("runs")
    settings = ("training.epochs=1", "evaluation.before=true")
    return train(config(class_folders(root / NAME), *settings), root / "run")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    described: dict[str, Any] = KINDS[kind]
    made = encoder(**described)
    (done,) = export(made.save(tmp_path / "model"), package=tmp_path / "package")
    assert done.check["largest_difference"] <= 1e-5
    code = (tmp_path / "package" / "load.py").read_text()
    assert "shortlist" not in code
    assert len([line for line in code.splitlines() if line.startswith("    x = ")]) <= 10


def test_a_backbone_whose_forward_pools(tmp_path: Path) -> None:
    made = encoder()  # asked for its features as a VGG has to be, which is too large for a test
    made.embedder.layout = replace(made.embedder.layout, from_forward=False)
    source = ExportSource(tmp_path, Display())
    write_package(tmp_path / "package", made, source.samples(made), source, None)
    assert "x = backbone.forward_features(x)\n" in (tmp_path / "package" / "load.py").read_text()


def test_a_package_gives_the_vectors_of_the_run_without_shortlist(
    run: RunFolder, tmp_path: Path, commands: Commands
) -> None:
    written: list[Exported] = []
    with another_state():  # which the call leaves as it was
        assert changes(lambda: written.extend(export(run.path, package=tmp_path / "package"))) == []
    (done,) = written
    assert done.check["images"] == f"8 images of {NAME}"
    assert sorted(each.name for each in done.path.iterdir()) == [
        "README.md",
        "config.json",
        "load.py",
        "model.safetensors",
    ]
    files = []
    for number, image in enumerate(pictures()):
        files.append(tmp_path / f"{number}.png")
        image.save(files[-1])
    (tmp_path / "alone.py").write_text(ALONE)
    (tmp_path / "cat.jpg").write_bytes(EPS)
    given = (done.path, tmp_path / "found.npy", *files, tmp_path / "cat.jpg")
    code, printed, error = commands.run(*given, cwd=tmp_path, before=WITHOUT_SHORTLIST, script=tmp_path / "alone.py")
    assert code == 0, error
    found = torch.from_numpy(np.load(tmp_path / "found.npy"))
    torch.testing.assert_close(found, open_encoder(run.path).encode(files), atol=1e-5, rtol=0)
    # By its command line: similarities of an image to itself, and an error for a format that others would decode.
    assert printed.split() == ["[[1.", "1.]", "[1.", "1.]]", "refused"]


@pytest.fixture(scope="module")
def card(run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("packages") / "package"
    export(run.path, package=folder, license="cc-by-4.0")
    return (folder / "README.md").read_text(encoding="utf-8")


class TestCard:
    def test_head(self, card: str, run: RunFolder) -> None:
        _, head, _ = card.split("---\n", 2)
        found = yaml.safe_load(head)
        (measured,) = json.loads(run.evaluation_file.read_text())
        assert found["license"] == "cc-by-4.0"
        (result,) = found["model-index"][0]["results"]
        assert result["dataset"]["name"] == NAME
        first = result["metrics"][0]
        assert (first["type"], first["value"]) == ("r@1", round(100 * measured["metrics"]["r@1"]["value"], 2))

    def test_facts(self, card: str, run: RunFolder) -> None:
        assert "| test | 36 | 6 |" in card
        assert "| train | 18 | 3 |" in card
        assert "| validation | 18 | 3 |" in card
        (measured,) = json.loads(run.evaluation_file.read_text())
        (before,) = json.loads(run.before_file.read_text())
        cells = [
            f"{100 * each['value']:.1f} [{100 * each['low']:.1f}, {100 * each['high']:.1f}]"
            for each in (measured["metrics"]["mAP"], before["metrics"]["mAP"])
        ]
        assert f"| mAP | {cells[0]} | {cells[1]} |" in card
        assert "Tested only on `im a ges script`. None of the test classes were used for training." in card
        assert "`cc-by-4.0`" in card

    def test_names_are_escaped_and_paths_are_not_published(self, card: str, run: RunFolder) -> None:
        assert "Source: `im a ges script`." in card
        body = card.split("---\n", 2)[2]
        assert "<script" not in body
        assert str(run.path.parent) not in card

    def test_images_that_are_gone(self, run: RunFolder, tmp_path: Path) -> None:
        shutil.copytree(run.path, tmp_path / "run")
        text = run.config_file.read_text().replace(str(run.path.parent / NAME), str(tmp_path / "gone"))
        write_config(RunFolder(tmp_path / "run"), text)
        (done,) = export(tmp_path / "run", package=tmp_path / "package")
        assert done.check["images"] == "8 synthetic images"
        card = (tmp_path / "package" / "README.md").read_text(encoding="utf-8")
        assert "no counts" in card
        assert "license: unknown" in card
        assert "Unknown: none was given at export." in card

    def test_images_that_have_changed(self, run: RunFolder, tmp_path: Path) -> None:
        copy = shutil.copytree(run.path.parent, tmp_path / "copy")
        text = run.config_file.read_text().replace(str(run.path.parent), str(copy))
        assert str(copy / NAME) in text
        write_config(RunFolder(copy / "run"), text)
        shutil.rmtree(copy / NAME / "class 00")
        export(copy / "run", package=tmp_path / "package")
        assert "no counts" in (tmp_path / "package" / "README.md").read_text(encoding="utf-8")

    def test_without_a_run(self, tmp_path: Path) -> None:
        export(encoder().save(tmp_path / "model"), package=tmp_path / "package")
        card = (tmp_path / "package" / "README.md").read_text(encoding="utf-8")
        assert "Unknown: the package was exported from a saved model" in card
        assert "the model was not evaluated" in card


class TestFolder:
    def test_a_folder_with_other_files_is_refused(self, tmp_path: Path) -> None:
        model, folder = encoder().save(tmp_path / "model"), tmp_path / "mine"
        folder.mkdir()
        (folder / "config.json").write_text('{"my": "own"}')
        with pytest.raises(RunError, match="Choose a new or empty folder"):
            export(model, package=folder)
        assert [each.name for each in folder.iterdir()] == ["config.json"]

    def test_a_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(RunError, match="Choose a new or empty folder"):
            export(encoder().save(tmp_path / "model"), package=tmp_path / "file")

    def test_a_package_is_replaced_and_other_files_stay(self, tmp_path: Path) -> None:
        folder = tmp_path / "package"
        export(encoder().save(tmp_path / "model"), package=folder)
        (folder / ".git").mkdir()
        other = encoder(pooling="max")
        export(other.save(tmp_path / "other"), package=folder)
        assert json.loads((folder / "config.json").read_text())["fingerprint"] == other.fingerprint
        assert len(list(folder.iterdir())) == 5

    def test_other_vectors_leave_the_old_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "package"
        model = encoder().save(tmp_path / "model")
        export(model, package=folder)
        before = {each.name: each.read_bytes() for each in folder.iterdir()}
        code = package_module.load_code
        monkeypatch.setattr(package_module, "load_code", lambda made: code(made).replace("/ 255", "/ 256"))
        with pytest.raises(ModelError, match="differ from those of PyTorch"):
            export(model, package=folder)
        assert {each.name: each.read_bytes() for each in folder.iterdir()} == before

    def test_a_full_disk_leaves_the_old_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "package"
        export(encoder().save(tmp_path / "one"), package=folder)
        before = {file.name: file.read_bytes() for file in folder.iterdir()}

        def full(*_: object, **__: object) -> None:
            raise SafetensorError("I/O error: No space left on device")

        other = encoder(dim=4).save(tmp_path / "other")
        monkeypatch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(OSError, match="No space left"):
            export(other, package=folder)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
        assert not list(tmp_path.glob(".package*"))

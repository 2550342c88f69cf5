"""Every recipe at a tiny size: model, loss, data in its own format, one step, and its tests."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shortlist.config import RunConfig
from shortlist.data import BENCHMARKS
from shortlist.recipes import open_recipe, recipe_names
from shortlist.training import train_run as train
from shortlist.training.components import build_embedder
from shortlist.training.loop import Trainer
from tests.miniatures import miniature
from tests.training.runs import class_folders

# The same architecture with few and narrow layers, and a size that its patches divide.
SMALL = {
    "resnet50": ("{layers: [1, 1, 1, 1], channels: [4, 4, 8, 8]}", 32),
    "resnet101": ("{layers: [1, 1, 1, 1], channels: [4, 4, 8, 8]}", 32),
    "vit_base_patch32_224": ("{embed_dim: 32, depth: 1, num_heads: 2}", 64),
    "vit_base_patch16_224": ("{embed_dim: 32, depth: 1, num_heads: 2}", 32),
    "vit_base_patch16_clip_quickgelu_224": ("{embed_dim: 32, depth: 1, num_heads: 2}", 32),
    "vit_base_patch14_dinov2": ("{embed_dim: 32, depth: 1, num_heads: 2}", 28),
    "regnety_160": ("{depth: 13, w0: 24, wa: 36.44, wm: 2.49, group_size: 8}", 32),
    "tf_efficientnet_lite0": ("{}", 32),
    "resnet10t": ("{channels: [8, 8, 16, 16], stem_width: 8, norm_layer: groupnorm1}", 24),
}
CLASSES, IMAGES = 8, 6
Roots = Callable[[str], Path]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Roots:
    """Where the miniature of a benchmark lies; written when it is first asked for."""
    made: dict[str, Path] = {}

    def of(source: str) -> Path:
        name = source.partition("-")[0]  # the lists of VehicleID lie in one folder
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            known = source in BENCHMARKS
            made[name] = miniature(source, folder, CLASSES, IMAGES) if known else class_folders(folder, CLASSES, IMAGES)
        return made[name]

    return of


def tiny(recipe: str, root: Roots) -> RunConfig:
    """A recipe in which only sizes and places are others."""
    whole = open_recipe(recipe)
    small, size = SMALL[whole.model.backbone.partition(".")[0]]
    data, tests = whole.data, whole.evaluation.tests
    settings = {
        "model.backbone_args": small,
        "model.weights": "none",
        "model.dim": 8,
        "batch.size": 2 * whole.batch.per_class,
        "batch.chunk_size": 2 * whole.batch.per_class - 1,  # two chunks
        "training.epochs": "null",
        "training.steps": 1,
        "training.threads": 1,
        "data.workers": 0,
        "evaluation.bootstrap": 0,
        "evaluation.before": "false",
        "evaluation.tests": json.dumps([_placed(test.model_dump(mode="json"), root) for test in tests]),
    }
    if whole.images.max_side is None:
        settings |= {"images.size": size, "images.resize": size}
    else:
        settings |= {"images.max_side": 64, "model.whitening_size": 48}
    if data.source in BENCHMARKS:
        settings["data.root"] = json.dumps(None if data.source == "glyphs" else str(root(data.source)))
    else:
        settings["data.source"] = json.dumps(str(root(data.source)))
    if data.validation_source is not None:
        settings["data.validation_source"] = json.dumps(_placed(data.validation_source.model_dump(mode="json"), root))
    return open_recipe(recipe, [f"{key}={value}" for key, value in settings.items()])


def _placed(test: dict[str, object], root: Roots) -> dict[str, object]:
    distractors = {"distractors": str(root("r1m"))} if test["distractors"] else {}
    return {**test, "root": str(root(str(test["source"]))), **distractors}


def _tested_alike(config: RunConfig) -> str:
    """What recipes have in common that are tested in the same way: all but how they learn."""
    same = config.model_dump(mode="json", include={"data", "images", "model", "evaluation"})
    return json.dumps(same, sort_keys=True)


ALIKE: dict[str, list[str]] = {}
for each in recipe_names():
    ALIKE.setdefault(_tested_alike(open_recipe(each)), []).append(each)


@pytest.mark.parametrize("names", ALIKE.values(), ids=lambda names: names[0])
def test_a_step_of_every_recipe(names: list[str], root: Roots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of each, and the tests of one of those that are tested alike."""
    measured: dict[str, set[str]] = {}
    for name in names:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="pytorch_metric_learning")
            folder = train(tiny(name, root), tmp_path / name)
        (step,) = (record for record in folder.metrics() if record["kind"] == "step")
        assert step["gradient_norm"] > 0
        if not measured:
            tested = json.loads(folder.evaluation_file.read_text(encoding="utf-8"))
            measured = {each["data"]: set(each["metrics"]) for each in tested}
            assert measured
            monkeypatch.setattr(Trainer, "_finish", lambda trainer: None)
        for data, figures in open_recipe(name).paper.items():  # what the paper reports is what is measured
            assert set(figures) <= measured[data]


MODELS = {
    (config.model.backbone, config.model.pooling, config.model.dim, config.model.layer_norm): config.name
    for config in map(open_recipe, recipe_names())
}


MILLIONS = {  # of parameters; 24.5 is the paper's number
    "resnet50": 24.5,
    "resnet101": 46.7,
    "vit_base": 86.8,
    "regnety_160": 82,
    "tf_efficientnet_lite0": 4.0,
}


@pytest.mark.parametrize("name", MODELS.values())
def test_the_models_in_full(name: str) -> None:
    """Of their full size; nothing is downloaded."""
    config = open_recipe(name)
    with torch.device("meta"):  # its size needs no weights
        embedder = build_embedder(config, weights=False)
    millions = sum(parameter.numel() for parameter in embedder.parameters()) / 1e6
    known = [number for start, number in MILLIONS.items() if config.model.backbone.startswith(start)]
    if not config.model.backbone_args:  # by which networks of recipes of ours are made small
        assert [millions] == pytest.approx(known, rel=0.04)
    assert embedder.dim == config.model.dim

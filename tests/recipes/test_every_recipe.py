"""Every recipe at a tiny size: its model, loss, data in the original format, one step, and its tests."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shortlist.config import RunConfig
from shortlist.data import BENCHMARKS
from shortlist.data.benchmarks import glyphs
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
CLASSES, IMAGES = 4, 6  # per split
Roots = Callable[[str], Path]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Roots:
    """Folder of the miniature of a benchmark, which is written when it is first needed."""
    made: dict[str, Path] = {}

    def of(source: str) -> Path:
        name = source.partition("-")[0]  # the lists of VehicleID lie in one folder
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            known = source in BENCHMARKS
            made[name] = (
                miniature(source, folder, CLASSES, IMAGES) if known else class_folders(folder, 2 * CLASSES, IMAGES)
            )
        return made[name]

    return of


def tiny(recipe: str, root: Roots) -> RunConfig:
    """A recipe in which only sizes and folders are changed."""
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
        "tracking": "[]",
        "evaluation.tests": json.dumps([_placed(test.model_dump(mode="json"), root) for test in tests]),
    }
    if whole.images.max_side is None:
        settings |= {"images.size": size, "images.resize": size}
        if whole.images.test_size is not None:  # test images are larger
            settings |= {"images.test_size": size + 8, "images.resize": size + 8}
    else:
        settings |= {"images.max_side": 64, "model.whitening_size": 48}
    if data.source in BENCHMARKS:
        settings["data.root"] = json.dumps(str(root(data.source)))
    else:
        settings["data.source"] = json.dumps(str(root(data.source)))
    if data.validation_source is not None:
        settings["data.validation_source"] = json.dumps(_placed(data.validation_source.model_dump(mode="json"), root))
    return open_recipe(recipe, [f"{key}={value}" for key, value in settings.items()])


def _placed(test: dict[str, object], root: Roots) -> dict[str, object]:
    distractors = {"distractors": str(root("r1m"))} if test["distractors"] else {}
    return {**test, "root": str(root(str(test["source"]))), **distractors}


def _without_numbers(value: Any) -> Any:
    """Replace every number of a structure by the same word."""
    if isinstance(value, dict):
        return {key: _without_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_numbers(each) for each in value]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else value


def _sections(config: RunConfig) -> dict[str, str]:
    """The settings that determine which code a recipe runs: data, tests, and all other sections without numbers."""
    values = config.model_dump(mode="json")
    parts = {"data": [values["data"], values["evaluation"]], "model": [values["model"], values["images"]]}
    parts |= {name: values[name] for name in ("loss", "optimizer", "schedule", "batch", "training")}
    kept = {name: part if name == "data" else _without_numbers(part) for name, part in parts.items()}
    return {name: json.dumps(part, sort_keys=True) for name, part in kept.items()}


def _covering(sections: dict[str, dict[str, str]]) -> list[str]:
    """Recipes that together have every section of every recipe, chosen greedily."""
    chosen: list[str] = []
    missing = {section for each in sections.values() for section in each.items()}
    while missing:
        chosen.append(max(sections, key=lambda name: len(missing & sections[name].items())))
        missing -= sections[chosen[-1]].items()
    return chosen


RECIPES = {name: open_recipe(name) for name in recipe_names()}
SECTIONS = {name: _sections(config) for name, config in RECIPES.items()}
CHOSEN = _covering(SECTIONS)


@pytest.mark.parametrize("name", CHOSEN)
def test_recipes_train_a_step_and_measure_what_the_paper_reports(
    name: str, root: Roots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step, and all tests, of recipes that together contain all sections of all recipes."""
    data = SECTIONS[name]["data"]
    is_tested = name == next(each for each in CHOSEN if SECTIONS[each]["data"] == data)  # once per data and tests
    if not is_tested:
        monkeypatch.setattr(Trainer, "_finish", lambda trainer: None)
    monkeypatch.setattr(glyphs, "glyphs", partial(glyphs.glyphs, classes=2 * CLASSES, per_class=IMAGES))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="pytorch_metric_learning")
        folder = train(tiny(name, root), tmp_path / name)
    (step,) = (record for record in folder.metrics() if record["kind"] == "step")
    assert step["gradient_norm"] > 0
    if is_tested:
        tested = json.loads(folder.evaluation_file.read_text(encoding="utf-8"))
        measured = {each["data"]: set(each["metrics"]) for each in tested}
        assert measured
        for other in (each for each in RECIPES if SECTIONS[each]["data"] == data):
            for where, figures in RECIPES[other].paper.items():
                assert set(figures) <= measured[where], other


MODELS = {config.model.backbone: name for name, config in RECIPES.items()}
MILLIONS = {  # of parameters; 24.5 is the paper's number
    "resnet50": 24.5,
    "resnet101": 46.7,
    "vit_base": 86.8,
    "regnety_160": 82,
    "tf_efficientnet_lite0": 4.0,
}


@pytest.mark.parametrize("name", MODELS.values())
def test_models_of_recipes_have_their_known_number_of_parameters(name: str) -> None:
    """A model of every backbone; nothing is downloaded."""
    config = RECIPES[name]
    with torch.device("meta"):  # its size needs no weights
        embedder = build_embedder(config, weights=False)
    millions = sum(parameter.numel() for parameter in embedder.parameters()) / 1e6
    known = [number for start, number in MILLIONS.items() if config.model.backbone.startswith(start)]
    if not config.model.backbone_args:  # by which networks of recipes of ours are made small
        assert [millions] == pytest.approx(known, rel=0.04)
    assert embedder.dim == config.model.dim

"""Whitening as the initial linear layer: which images it is learned from, and that a resumed run does not repeat it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shortlist.config import RunConfig
from shortlist.data import Catalog, FitTransform, TestTransform, load_image
from shortlist.data.transforms import transform_image
from shortlist.errors import ModelError
from shortlist.model import Embedder, pair_whitening, pca_whitening
from shortlist.training import Display, Given, RunFolder, loop, make_plan
from shortlist.training import resume_run as resume
from shortlist.training import train_run as train
from shortlist.training.components import build_embedder, build_transforms
from shortlist.training.initial_whitening import _resized, learn_whitening, sample_images
from shortlist.training.loop import Trainer
from tests.training.runs import class_folders, config, fast_config, records, same_weights, weights

WHITENING = ("model.whitening=pairs", "model.layer_norm=false", "training.epochs=1", "evaluation.before=true")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("data") / "images")


# Which images


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), number=st.integers(1, 60), seed=st.integers(0, 99))
def test_classes_are_sampled_in_pairs_in_turn(sizes: list[int], number: int, seed: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    chosen = sample_images(labels, number, seed)
    assert len(set(chosen.tolist())) == len(chosen) == min(number, len(labels))
    counts = np.bincount(labels[chosen], minlength=len(sizes))
    most = counts.max()
    full = counts[counts < np.array(sizes)]  # classes with images that were not chosen
    assert (full >= most - 2).all()
    assert sum(count % 2 for count in full) <= 1  # only the last pair may have been cut


def test_the_choice_depends_on_the_seed() -> None:
    labels = np.repeat(np.arange(50), 4)
    first, again, other = sample_images(labels, 20, 0), sample_images(labels, 20, 0), sample_images(labels, 20, 1)
    assert (first == again).all()
    assert set(first.tolist()) != set(other.tolist())


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (TestTransform(32, 36, "bicubic"), TestTransform(64, 72, "bicubic")),
        (FitTransform(1024, interpolation="bicubic"), FitTransform(64, interpolation="bicubic")),
    ],
)
def test_another_size(transform: TestTransform | FitTransform, expected: object) -> None:
    assert _resized(transform, 64) == expected


# What is learned


def whitening_of(chosen: RunConfig, embedder: Embedder, catalog: Catalog) -> tuple[Tensor, Tensor]:
    """The whitening of all images, embedded one by one."""
    _, transform = build_transforms(chosen, embedder)
    pictures = [transform_image(load_image(catalog.file(index)), transform, Random(0)) for index in range(len(catalog))]
    with torch.no_grad():
        pooled = torch.cat([embedder.eval().pooled_features(picture[None]) for picture in pictures])
        features = embedder.head().linear_input(pooled)
    if chosen.model.whitening == "pca":
        return pca_whitening(features, 8, 0.1)
    return pair_whitening(features, torch.from_numpy(catalog.labels.copy()), 8, 0.1)


def same_up_to_signs(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    rows = [torch.cat((weight, bias[:, None]), dim=1) for weight, bias in (found, expected)]
    signs = (rows[0] * rows[1]).sum(1).sign()[:, None]
    return torch.allclose(rows[0], signs * rows[1], rtol=1e-3, atol=1e-3 * rows[1].abs().max().item())


@pytest.mark.parametrize(
    ("kind", "pixels"), [("pca", ("images.size=32",)), ("pairs", ("images.size=null", "images.max_side=30"))]
)
def test_it_is_learned_from_pooled_features_of_images_without_augmentation(
    images: Path, kind: str, pixels: tuple[str, ...]
) -> None:
    chosen = config(images, f"model.whitening={kind}", "model.layer_norm=false", "model.l2_pooled=true", *pixels)
    embedder, catalog = build_embedder(chosen).eval(), make_plan(chosen, Display()).train
    found = learn_whitening(chosen, embedder, catalog)
    assert same_up_to_signs(found, whitening_of(chosen, embedder, catalog))
    for setting in ({"whitening_size": 16}, {"whitening_images": 12}, {"whitening_shrinkage": 0.5}):
        changed = chosen.model_copy(update={"model": chosen.model.model_copy(update=setting)})
        assert not same_up_to_signs(learn_whitening(changed, embedder, catalog), found)


def test_a_run_starts_with_it(images: Path, tmp_path: Path) -> None:
    """This applies to both the trained embedder and its moving average."""
    chosen, run = config(images, *WHITENING, "training.ema=0.9"), RunFolder(tmp_path)
    run.begin(chosen)
    trainer = Trainer(chosen, run, Display(), Given())
    before = build_embedder(chosen)
    assert trainer.learner.embedder.linear.weight.equal(before.linear.weight)
    trainer._restore()
    trainer._whiten()
    for embedder in (trainer.learner.embedder, trainer.learner.result):
        linear = embedder.linear
        assert same_up_to_signs((linear.weight, linear.bias), whitening_of(chosen, before, trainer.plan.train))
    trainer.accelerator.end_training()


# Runs


def test_it_is_learned_once(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped before and after its first step ends like an uninterrupted one."""
    whole = train(fast_config(images, *WHITENING), tmp_path / "whole")
    learned: list[int] = []
    monkeypatch.setattr(loop, "learn_whitening", lambda *args: learned.append(1) or learn_whitening(*args))
    stop_in(monkeypatch, "_train", first=1)
    with pytest.raises(RuntimeError, match="stopped"):
        train(fast_config(images, *WHITENING), tmp_path / "stopped")
    assert [file.name for file in (tmp_path / "stopped" / "checkpoints").iterdir()] == ["step-00000000.safetensors"]
    stop_in(monkeypatch, "_after_step", first=1)
    with pytest.raises(RuntimeError, match="stopped"):
        resume(tmp_path / "stopped")
    resume(tmp_path / "stopped")
    assert len(learned) == 1
    assert same_weights(weights(tmp_path / "stopped"), weights(whole))
    for kind in ("step", "before training", "test"):
        assert records(tmp_path / "stopped", kind) == records(whole, kind)
    assert not same_weights(weights(whole), weights(train(fast_config(images, *WHITENING[1:]), tmp_path / "without")))


def stop_in(monkeypatch: pytest.MonkeyPatch, method: str, first: int) -> None:
    """Let the first calls of a method raise an error."""
    calls = iter(range(first))
    original = getattr(Trainer, method)

    def stop(self: Trainer, *args: object) -> None:
        if next(calls, None) is not None:
            raise RuntimeError("stopped")
        original(self, *args)

    monkeypatch.setattr(Trainer, method, stop)


def test_impossible_dimensions_are_reported_before_images_are_embedded(images: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="requires more than 30 images, but there are 18"):
        train(fast_config(images, *WHITENING, "model.dim=30"), tmp_path / "run")
    with pytest.raises(ModelError, match="channels into 5000 dimensions"):
        train(fast_config(images, *WHITENING, "model.dim=5000"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_batches_are_not_larger_than_chunks_of_training(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest: list[int] = []
    real = Embedder.pooled_features

    def pooled_features(self: Embedder, given: Tensor) -> Tensor:
        largest.append(len(given))
        return real(self, given)

    monkeypatch.setattr(Embedder, "pooled_features", pooled_features)
    train(fast_config(images, *WHITENING, "batch.chunk_size=3"), tmp_path / "run")
    assert max(largest) == 3

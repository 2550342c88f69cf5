"""Training on images of different shapes: loading, one step, embedding, and a run that is resumed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from shortlist import RecallAtKLoss
from shortlist.batches import large_batch
from shortlist.batches.large_batch import LargeBatchStep
from shortlist.batches.memory import GraphSize
from shortlist.data import Catalog, FitTransform, ImageDataset, image_chunks, load_image
from shortlist.data.transforms import transform_image
from shortlist.encoding import embed_images
from shortlist.model import MultiScale
from shortlist.training import Display, describe_plan, make_plan
from shortlist.training import resume_run as resume
from shortlist.training import train_run as train
from shortlist.training.components import build_embedder, build_transforms
from shortlist.training.loop import Trainer
from tests.batches.steps import difference, take_gradients
from tests.training.runs import config, records, same_weights, weights

SIZES = ((48, 36), (36, 48), (40, 40), (90, 30))  # width and height of a class's images; 40 is the longest side allowed
SHAPES = {(3, 30, 40), (3, 40, 30), (3, 40, 40), (3, 13, 40)}
SETTINGS = ("images.size=null", "images.max_side=40", "batch.size=8", "batch.per_class=4", "data.validation=none")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 classes of 8 images."""
    root, random = tmp_path_factory.mktemp("shapes") / "images", np.random.default_rng(0)
    for label in range(8):
        (root / str(label)).mkdir(parents=True)
        pattern = random.integers(0, 256, (4, 4, 3))
        for number in range(8):
            noisy = (pattern + random.normal(0, 60, (4, 4, 3))).clip(0, 255).astype(np.uint8)
            picture = Image.fromarray(noisy).resize(SIZES[number % 4], Image.Resampling.BICUBIC)
            picture.save(root / str(label) / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def catalog(images: Path) -> Catalog:
    return make_plan(config(images, *SETTINGS), Display()).train


def test_transforms_of_a_config(images: Path) -> None:
    chosen = config(images, *SETTINGS, "images.flip=0.3", "images.interpolation=bicubic")
    train_transform, test_transform = build_transforms(chosen, build_embedder(chosen))
    assert train_transform == FitTransform(40, 0.3, "bicubic")
    assert test_transform == FitTransform(40, 0.0, "bicubic")


# One step


@pytest.mark.parametrize("keep", [False, True])
def test_a_step_has_the_gradient_of_one_plain_backward_pass(images: Path, keep: bool) -> None:
    chosen = config(images, *SETTINGS)
    embedder = build_embedder(chosen).double().train()
    transform, _ = build_transforms(chosen, embedder)
    plan = make_plan(chosen, Display())
    epoch, batch = next(plan.batches(0))
    dataset = ImageDataset(plan.train, transform, seed=0)
    keys = [[(epoch, index) for index in chunk.tolist()] for chunk in torch.split(batch, 3)]
    chunks = list(image_chunks(dataset, keys))
    assert {tuple(image.shape) for chunk in chunks for image in chunk} <= SHAPES
    assert len({image.shape for chunk in chunks for image in chunk}) >= 3
    labels = torch.from_numpy(plan.train.labels[batch.numpy()])
    loss = RecallAtKLoss((1, 2), similarity_temperature=0.1)

    def plain(change: nn.Module) -> list[Tensor]:
        vectors = torch.cat([embedder(change(dataset[key][None])) for chunk in keys for key in chunk])
        loss(vectors, labels).backward()
        return take_gradients(embedder)

    expected = plain(nn.Identity())
    out = LargeBatchStep(embedder, loss, 3, keep_graphs=keep)(iter(chunks), labels)
    assert out.chunks == 3
    assert difference(take_gradients(embedder), expected) < 1e-9
    assert difference(plain(nn.ZeroPad2d((0, 1, 0, 0))), expected) > 1e-3  # negative control: a black column changes it


def test_an_automatic_chunk_size_depends_on_the_largest_images(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    small, large = torch.rand(6, 3, 8, 8), torch.rand(2, 3, 64, 64)
    with GraphSize(model.parameters()) as graph:  # and the images, which are stacked for it
        model(large)
    monkeypatch.setattr(large_batch, "available_memory", lambda device: 3.2 * graph.bytes)
    for images, fits in (([*small, *large], 3), ([*small], 64)):
        step = LargeBatchStep(model, lambda vectors, labels: vectors.square().sum(), "auto", keep_graphs=False)
        step(images, torch.zeros(len(images)))
        assert step.chunk_size == fits


# Embedding


def test_embeddings_are_those_of_the_images_one_by_one(images: Path, catalog: Catalog) -> None:
    embedder = build_embedder(config(images, *SETTINGS)).eval()
    transform = FitTransform(40)
    for module in (embedder, MultiScale(embedder, (1, 0.5))):
        with torch.no_grad():
            pictures = [
                transform_image(load_image(catalog.file(index)), transform, Random(0)) for index in range(len(catalog))
            ]
            expected = torch.cat([module(picture[None]) for picture in pictures])
        found = embed_images(module, catalog, transform, batch_size=5)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert (expected[0] - expected[1]).abs().max() > 1e-4  # their order matters


# A run


def test_a_resumed_run_is_bit_identical(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config(images, *SETTINGS, "training.epochs=1", "training.checkpoint_every=2", "batch.chunk_size=auto")
    whole = train(chosen, tmp_path / "whole")
    assert len(records(whole)) == 4
    assert records(whole, "test")
    ended = []

    def stop(self: Trainer) -> None:
        ended.append(self.step)
        raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_finish", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            train(chosen, tmp_path / "stopped")
    (tmp_path / "stopped" / "checkpoints" / "step-00000004.safetensors").unlink()
    resume(tmp_path / "stopped")
    assert ended == [4]
    assert same_weights(weights(tmp_path / "stopped"), weights(whole))


def test_the_plan_estimates_memory_for_the_largest_images(images: Path) -> None:
    def memory(side: int) -> dict[str, float]:
        chosen = config(
            images, *SETTINGS, f"images.max_side={side}", "model.backbone=test_resnet", "batch.chunk_size=8"
        )
        found = describe_plan(make_plan(chosen, Display()), build_embedder(chosen, weights=False))["memory"]
        return {name: float(size.removesuffix(" MB").replace(",", "")) for name, size in found.items()}

    small, large = memory(1024), memory(2048)
    assert small["pixels of a batch"] == 8 * 3 * 1024**2 / 2**20
    for name in ("pixels of a batch", "activations of a chunk of 8"):
        assert large[name] == pytest.approx(4 * small[name], rel=0.01)

"""The requirements of a run, compared with values computed by hand or actually allocated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from timm.layers import AttentionPoolLatent
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shortlist import RecallAtKLoss
from shortlist.batches.tracing import trace
from shortlist.errors import ConfigError
from shortlist.locations import parse_size
from shortlist.training import Display, Requirements, describe_plan, find_requirements, make_plan
from shortlist.training.components import build_embedder
from shortlist.training.requirements import Device, gpu
from tests.training.runs import class_folders, config

MEGABYTE = 2**20


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("needs") / "images")


def needs_of(images: Path, *overrides: str, device: Device | None = None, processes: int = 1) -> Requirements:
    chosen = config(images, "model.backbone=test_resnet", *overrides)
    embedder = build_embedder(chosen, weights=False)
    return find_requirements(make_plan(chosen, Display()), embedder, device=device, processes=processes)


class TestTrace:
    def test_of_a_linear_layer(self) -> None:
        layer, vectors = nn.Linear(256, 512, bias=False), torch.zeros(64, 256)
        found = trace(lambda: layer(vectors))
        assert (found.peak, found.kept) == (4 * 64 * 512, 4 * 64 * 512)
        assert found.flops == 2 * 64 * 256 * 512

    def test_temporaries_count_towards_the_peak_only(self) -> None:
        numbers = torch.zeros(1000)
        found = trace(lambda: (numbers + 1).exp().sum())
        assert found.kept == 4
        assert found.peak == 2 * 4000  # the sum, and the last of the temporaries that it is computed from

    def test_views_and_changes_in_place_are_free(self) -> None:
        numbers = torch.zeros(1000)
        assert trace(lambda: numbers.view(10, 100)[:5].add_(1)).peak == 0

    def test_backward_frees_what_forward_kept(self) -> None:
        weight = torch.ones(1000, requires_grad=True)
        forward = trace(lambda: weight.exp().exp().sum())
        assert forward.kept == 2 * 4000 + 4
        weight.grad = torch.zeros(1000)
        found = trace(lambda: weight.exp().exp().sum(), lambda result: result.backward())
        assert (found.kept, found.flops) == (forward.kept, forward.flops)
        assert found.peak > forward.kept
        assert trace(lambda: weight.exp().exp().sum().backward()).kept == 0

    @pytest.mark.parametrize("name", ["test_efficientnet", "test_vit"])
    def test_work_is_what_torch_counts(self, name: str) -> None:
        """Convolutions, products and attention are counted, but not the backward pass."""
        model, images = timm.create_model(name, num_classes=0), torch.zeros(2, 3, 160, 160)
        with FlopCounterMode(display=False) as counter:
            model(images)
        found = trace(lambda: model(images), lambda result: result.sum().backward())
        assert found.flops == counter.get_total_flops() > 0

    def test_attention_pooling_without_gradients(self) -> None:
        """The query of the attention pooling is a parameter that requires a gradient, but has no graph."""
        pooling = AttentionPoolLatent(8, num_heads=2, pos_embed="")
        with torch.no_grad():
            assert trace(lambda: pooling(torch.zeros(2, 4, 8))).flops > 0

    def test_sparse_tensors(self) -> None:
        """Sparse tensors, such as gradients of the losses, can be traced."""
        trace(lambda: torch.eye(4).to_sparse() @ torch.ones(4, 1))


class TestMemory:
    def test_parts(self, images: Path) -> None:
        needs = needs_of(images, "images.size=64", "batch.chunk_size=4", "data.workers=0")
        embedder = build_embedder(config(images, "model.backbone=test_resnet"), weights=False)
        parameters = 4 * sum(each.numel() for each in embedder.parameters())
        assert needs.memory["gradient"] == parameters
        assert needs.memory["optimizer"] == 2 * parameters  # Adam
        assert needs.memory["weights"] >= parameters
        assert needs.memory["pixels"] == needs.batch * 3 * 64**2
        assert needs.memory["embeddings"] == 2 * 4 * needs.batch * embedder.dim

    def test_of_the_optimizer(self, images: Path) -> None:
        sgd, averaged = needs_of(images, "optimizer.name=sgd"), needs_of(images, "training.ema=0.9")
        assert sgd.states == sgd.trained
        assert averaged.weights > sgd.weights

    def test_a_loss_with_a_schedule_is_traced(self, images: Path) -> None:
        plain, scheduled = needs_of(images), needs_of(images, "loss.start.rank_temperature=50")
        assert scheduled.memory["loss"] > plain.memory["loss"] / 2

    def test_larger_test_images(self, images: Path) -> None:
        plain = needs_of(images, "images.size=64")
        larger = needs_of(images, "images.size=64", "images.test_size=128")
        assert (larger.inference, larger.graph) == (4 * plain.inference, plain.graph)

    def test_a_chunk_is_what_a_real_chunk_allocates(self, images: Path) -> None:
        """The extrapolation from one and two images to eight is compared with an actual chunk."""
        needs = needs_of(images, "images.size=64")
        embedder = build_embedder(config(images, "model.backbone=test_resnet"), weights=False).train()
        pixels = torch.zeros(8, 3, 64, 64, dtype=torch.uint8)
        embedder(pixels).sum().backward()  # allocates the gradients
        found = trace(lambda: embedder(pixels).sum().backward())
        assert needs.training(8) == pytest.approx(found.peak, rel=0.02)
        assert 8 * needs.graph == pytest.approx(trace(lambda: embedder(pixels)).kept, rel=0.02)

    def test_tracing_leaves_no_gradient(self, images: Path) -> None:
        chosen = config(images, "model.backbone=test_resnet")
        embedder, state = build_embedder(chosen, weights=False), torch.get_rng_state()
        find_requirements(make_plan(chosen, Display()), embedder)
        assert all(each.grad is None for each in embedder.parameters())
        assert torch.equal(torch.get_rng_state(), state)

    def test_kept_graphs(self, images: Path) -> None:
        none = replace(needs_of(images, "batch.chunk_size=2", "batch.keep_graphs=false"), batch=6000)
        all_kept = replace(none, keep_graphs=True)
        assert (none.kept, all_kept.kept) == (0, 6000)
        step = none.memory["pixels"] + none.memory["embeddings"] + none.memory["chunk"]
        before = max(step, none.memory["evaluation"], step - none.memory["chunk"] + none.memory["loss"])
        assert all_kept.peak - none.peak == pytest.approx(step + none.graph * (6000 - 2) - before, rel=0.01)
        budget = replace(none, keep_graphs=int(none.graph * 5))
        assert budget.kept == 4  # two chunks of two images

    def test_frozen_backbones_keep_features(self, images: Path) -> None:
        needs = needs_of(images, "model.freeze=backbone", "model.dim=16")
        channels = build_embedder(config(images, "model.backbone=test_resnet"), weights=False).layout.channels
        assert needs.image == 4 * channels
        assert needs.trained < needs.weights / 2
        assert needs.peak >= needs.memory["evaluation"]  # the backbone still computes the features
        assert needs.peak - replace(needs, features=0).peak == needs.features
        views = {number: needs_of(images, "model.freeze=backbone", f"data.views={number}") for number in (1, 2)}
        training_images = len(make_plan(config(images), Display()).train)
        assert views[2].features - views[1].features == 2 * channels * training_images  # in half precision


class TestChunks:
    def test_the_largest_that_fits(self, images: Path) -> None:
        needs = needs_of(images, "batch.keep_graphs=false", "data.workers=0", device=Device(0.0))
        for room in (100 * MEGABYTE, 200 * MEGABYTE):
            fitting = replace(needs, device=Device(room))
            chunk = fitting.largest_chunk
            assert chunk > 0
            assert replace(fitting, chunk_size=chunk, batch=chunk).training(chunk) < room
        assert needs.largest_chunk == 0

    def test_automatic_chunks_leave_room(self, images: Path) -> None:
        needs = needs_of(images, "batch.chunk_size=auto", device=Device(64 * 2**30))
        assert needs.chunk == needs.batch  # everything fits
        state = needs.weights + needs.trained + needs.states + needs.memory["loss"]
        small = replace(needs, device=Device(state + 4 * needs.graph))
        assert small.chunk == 2

    def test_of_gpus(self, images: Path) -> None:
        overrides = ("batch.chunk_size=2", "batch.size=9", "data.validation=none")
        alone = needs_of(images, *overrides, device=gpu(24e9))
        shared = needs_of(images, *overrides, device=gpu(24e9), processes=4)
        assert (alone.share, shared.share) == (9, 4)  # five chunks for four processes
        assert (alone.sent, shared.sent) == (0, 0.75 * 2 * (4 * 9 * shared.dim + shared.trained))
        assert shared.memory["pixels"] < alone.memory["pixels"]


class TestGrowth:
    def test_with_the_batch(self, images: Path) -> None:
        needs = needs_of(images, "batch.keep_graphs=false", "batch.chunk_size=2", "data.workers=0")
        larger = needs.scaled(batch=4)
        assert larger.memory["pixels"] == 4 * needs.memory["pixels"]
        assert larger.memory["chunk"] == needs.memory["chunk"]
        images_only = replace(needs, loss=needs.loss._replace(flops=0))
        assert images_only.scaled(batch=4).step_work == 4 * images_only.step_work
        assert larger.step_work - 4 * images_only.step_work == pytest.approx(16 * needs.loss.flops)

    def test_with_the_side(self, images: Path) -> None:
        needs = needs_of(images, "batch.chunk_size=2")
        assert needs.scaled(side=2).training.each == 4 * needs.training.each
        assert needs.scaled(side=2).memory["weights"] == needs.memory["weights"]

    def test_traced_at_twice_the_side(self, images: Path) -> None:
        small, large = (needs_of(images, f"images.size={side}", "batch.chunk_size=2") for side in (64, 128))
        assert small.scaled(side=2).training(2) == pytest.approx(large.training(2), rel=0.05)
        assert small.scaled(side=2).forward_work == pytest.approx(large.forward_work, rel=0.05)

    def test_with_processes(self, images: Path) -> None:
        needs = needs_of(images, "batch.chunk_size=1")
        assert needs.scaled(processes=3).share == needs.batch / 3


def test_the_loss_is_that_of_the_run(images: Path) -> None:
    chosen = config(images, "model.backbone=test_resnet")
    plan, embedder = make_plan(chosen, Display()), build_embedder(chosen, weights=False)

    class Wasteful(nn.Module):
        def forward(self, vectors: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return (vectors.sum() * torch.ones(MEGABYTE)).sum()

    assert find_requirements(plan, embedder, Wasteful()).loss.peak > 4 * MEGABYTE
    assert find_requirements(plan, embedder, RecallAtKLoss((1, 2))).loss.peak < MEGABYTE


def test_descriptions_say_what_is_not_measured(images: Path) -> None:
    chosen = config(images, "model.backbone=test_resnet")
    plan, embedder = make_plan(chosen, Display()), build_embedder(chosen, weights=False)
    elsewhere = describe_plan(plan, embedder, find_requirements(plan, embedder, device=gpu(2**34), processes=8))
    assert "computed, not measured" in elsewhere["remark"]
    assert elsewhere["processes"] == 8
    assert {"remark", "time"}.isdisjoint(describe_plan(plan, embedder))


@pytest.mark.parametrize("size", ["", "GB", "24 apples", "1.2.3GB", "-3GB"])
def test_sizes_that_are_none(size: str) -> None:
    with pytest.raises(ConfigError, match="must be a size such as 24GB"):
        parse_size(size, "`device_memory`")


@pytest.mark.parametrize(
    ("size", "number"), [("24GB", 24e9), ("24gib", 24 * 2**30), ("7", 7), (1e9, 1e9), ("2 M", 2e6)]
)
def test_sizes(size: str | float, number: float) -> None:
    assert parse_size(size, "`device_memory`") == number

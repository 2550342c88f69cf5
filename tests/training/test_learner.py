"""Steps of training: optimizer, schedule, moving average, random state and checkpoints of a learner."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import Tensor, nn

from shortlist.config import RunConfig, read_config
from shortlist.errors import ConfigError
from shortlist.training.checkpoint import load_optimizer_tensors, optimizer_tensors
from shortlist.training.components import build_embedder, build_optimizer, build_transforms
from shortlist.training.learner import Learner
from tests.training.runs import RECIPE

CPU = torch.device("cpu")


def config(*overrides: str) -> RunConfig:
    return read_config(RECIPE, "tiny", overrides)


def batch(seed: int = 0) -> tuple[list[Tensor], Tensor]:
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8, generator=random)
    return list(images.split(4)), torch.tensor([0, 0, 0, 1, 1, 1])


def learn(learner: Learner, step: int, factor: float = 1.0) -> float:
    chunks, labels = batch(step)
    return float(learner.train_step(step, iter(chunks), labels, factor).gradient_norm)


def vector(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in parameters])


class TestOptimizer:
    @pytest.mark.parametrize(
        ("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
    )
    def test_kinds(self, name: str, kind: type[torch.optim.Optimizer]) -> None:
        embedder = build_embedder(config())
        optimizer = build_optimizer(config(f"optimizer.name={name}").optimizer, embedder.parts(), nn.Identity())
        assert type(optimizer) is kind
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(embedder.parameters()))

    def test_momentum(self) -> None:
        settings = config("optimizer.name=sgd", "optimizer.momentum=0.3").optimizer
        optimizer = build_optimizer(settings, build_embedder(config()).parts(), nn.Identity())
        assert {group["momentum"] for group in optimizer.param_groups} == {0.3}

    def test_rates_and_decay_of_the_parts(self) -> None:
        embedder = build_embedder(config())
        settings = config(
            "optimizer.lr=0.1",
            "optimizer.weight_decay=0.5",
            "optimizer.parts.backbone.lr_multiplier=0.2",
            "optimizer.parts.pooling.lr_multiplier=10",
            "optimizer.parts.pooling.weight_decay=0",
        ).optimizer
        loss = nn.Linear(2, 2)  # a loss with parameters of its own
        groups = {group["name"]: group for group in build_optimizer(settings, embedder.parts(), loss).param_groups}
        found = {name: (pytest.approx(group["lr"]), group["weight_decay"]) for name, group in groups.items()}
        assert found == {"backbone": (0.02, 0.5), "pooling": (1.0, 0.0), "head": (0.1, 0.5), "loss": (0.1, 0.5)}
        owners = {
            "backbone": embedder.backbone.parameters(),
            "pooling": [embedder.pooling.p],
            "head": chain(embedder.layer_norm.parameters(), embedder.linear.parameters()),
            "loss": loss.parameters(),
        }
        for name, owner in owners.items():
            assert {id(each) for each in groups[name]["params"]} == {id(each) for each in owner}

    def test_a_part_with_learning_rate_zero_does_not_change(self) -> None:
        learner = Learner(config("optimizer.parts.head.lr_multiplier=0", "optimizer.name=sgd"), CPU)
        before = {name: vector(part) for name, part in learner.embedder.parts().items()}
        learn(learner, 0)
        after = {name: vector(part) for name, part in learner.embedder.parts().items()}
        assert torch.equal(before["head"], after["head"])
        assert not torch.equal(before["backbone"], after["backbone"])

    def test_the_schedule_multiplies_every_part(self) -> None:
        settings = ["optimizer.name=sgd", "optimizer.lr=0.4", "optimizer.parts.head.lr_multiplier=0.5"]
        learner = Learner(config(*settings), CPU)
        learn(learner, 0, factor=0.1)
        rates = {group["name"]: group["lr"] for group in learner.optimizer.param_groups}
        assert rates == pytest.approx({"backbone": 0.04, "pooling": 0.04, "head": 0.02})
        learn(learner, 1, factor=0.5)  # of the initial rate, not of the last
        assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


class TestStep:
    PLAIN = ("optimizer.name=sgd", "optimizer.lr=1", "optimizer.momentum=0", "optimizer.weight_decay=0")

    def moved(self, *overrides: str) -> tuple[float, float]:
        """The length of a step, and the norm of its gradient."""
        learner = Learner(config(*self.PLAIN, *overrides), CPU)
        before = vector(list(learner.embedder.parameters()))
        norm = learn(learner, 0)
        return float((vector(list(learner.embedder.parameters())) - before).norm()), norm

    def test_clipping(self) -> None:
        moved, norm = self.moved()
        assert moved == pytest.approx(norm, rel=1e-4)
        assert norm > 0.01
        clipped, reported = self.moved(f"training.clip_norm={norm / 2}")
        assert clipped == pytest.approx(norm / 2, rel=1e-3)
        assert reported == pytest.approx(norm)  # of the gradient before clipping
        assert self.moved(f"training.clip_norm={norm * 2}")[0] == pytest.approx(moved, rel=1e-4)

    def test_moving_average(self) -> None:
        decay = 0.6
        learner, plain = Learner(config(f"training.ema={decay}"), CPU), Learner(config(), CPU)
        assert plain.result is plain.embedder
        assert learner.result is not learner.embedder
        expected = None
        for step in range(4):
            learn(learner, step)
            learn(plain, step)
            now = vector(list(learner.embedder.parameters()))
            expected = now if expected is None else decay * expected + (1 - decay) * now
        assert torch.allclose(vector(list(learner.result.parameters())), expected, atol=1e-6)
        assert not torch.allclose(vector(list(learner.result.parameters())), now, atol=1e-4)
        assert torch.equal(now, vector(list(plain.embedder.parameters())))  # training is unchanged

    def test_random_numbers_depend_on_seed_and_step_alone(self) -> None:
        settings = ("model.backbone=test_vit", "model.backbone_args={depth: 1, proj_drop_rate: 0.5}")
        norms = [
            learn(Learner(config(*settings, f"training.seed={seed}"), CPU), step)
            for seed, step in ((0, 1), (0, 1), (0, 2))
        ]
        assert norms[0] == norms[1] != norms[2]
        torch.manual_seed(123)
        assert learn(Learner(config(*settings), CPU), 1) == norms[0]

    def test_initial_weights_depend_on_the_seed_alone(self) -> None:
        torch.manual_seed(5)
        state = torch.get_rng_state()
        first, again, other = (
            vector(list(build_embedder(config(f"training.seed={seed}")).parameters())) for seed in (3, 3, 4)
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert torch.equal(torch.get_rng_state(), state)  # the global generator is not used

    def test_graphs_in_gigabytes(self) -> None:
        assert Learner(config("batch.keep_graphs=1.5"), CPU).large_batch.keep_graphs == 3 * 2**29
        assert Learner(config("batch.keep_graphs=true"), CPU).large_batch.keep_graphs is True


class TestState:
    def test_a_learner_continues_from_a_state_bit_for_bit(self) -> None:
        settings = ("training.ema=0.5", "loss.simix=true")
        one, other = Learner(config(*settings), CPU), Learner(config(*settings, "training.seed=9"), CPU)
        for step in range(2):
            learn(one, step)
        state = one.state(2)
        state = type(state)(2, {name: each.clone().contiguous() for name, each in state.tensors.items()}, state.facts)
        learn(other, 7)
        other.load(state)
        other.config = one.config  # the same seed from here
        for step in (2, 3):
            assert learn(one, step) == learn(other, step)
        assert torch.equal(vector(list(one.result.parameters())), vector(list(other.result.parameters())))

    def test_without_the_state_of_the_optimizer_it_continues_differently(self) -> None:
        """Negative control."""
        one, other = Learner(config(), CPU), Learner(config(), CPU)
        learn(one, 0)
        other.embedder.load_state_dict(one.embedder.state_dict())
        learn(one, 1)
        learn(other, 1)
        assert not torch.equal(vector(list(one.embedder.parameters())), vector(list(other.embedder.parameters())))

    def test_memory_layouts_are_restored(self) -> None:
        learner = Learner(config(), CPU)
        learn(learner, 0)
        before = {index: each["exp_avg"].stride() for index, each in enumerate(learner.optimizer.state.values())}
        tensors = {name: each.contiguous() for name, each in optimizer_tensors(learner.optimizer).items()}
        assert any(
            each.stride() != each.contiguous().stride() for each in optimizer_tensors(learner.optimizer).values()
        )
        load_optimizer_tensors(learner.optimizer, tensors)
        after = {index: each["exp_avg"].stride() for index, each in enumerate(learner.optimizer.state.values())}
        assert before == after


class TestTransforms:
    def test_settings_of_the_config(self) -> None:
        settings = ("images.size=20", "images.resize=24", "images.scale=[0.3, 0.6]", "images.interpolation=bicubic")
        chosen = config(*settings, "images.flip=0.1")
        train, test = build_transforms(chosen, build_embedder(chosen))
        assert (train.size, train.scale, train.flip, train.interpolation) == (20, (0.3, 0.6), 0.1, "bicubic")
        assert (test.size, test.resize, test.interpolation) == (20, 24, "bicubic")

    def test_a_size_of_test_images(self) -> None:
        chosen = config("images.size=20", "images.test_size=32", "images.resize=32")
        train, test = build_transforms(chosen, build_embedder(chosen))
        assert (train.size, test.size, test.resize) == (20, 32, 32)
        with pytest.raises(ConfigError, match="resize 30 is too small for crops of size 32"):
            config("images.size=20", "images.test_size=32", "images.resize=30")

    def test_default_settings_of_the_backbone(self) -> None:
        chosen = config("images.size=null")
        embedder = build_embedder(chosen)
        train, test = build_transforms(chosen, embedder)
        native = embedder.data_config
        assert train.size == test.size == native.input_size[-1]
        assert test.resize == round(test.size / native.crop_pct)
        assert train.interpolation == native.interpolation

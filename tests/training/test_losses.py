"""The loss that a configuration names: those of shortlist, and every loss of pytorch-metric-learning.

Tests import pytorch_metric_learning where they need it: it would slow down the start of every test process.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shortlist.batches.large_batch import LargeBatchStep
from shortlist.config import RunConfig, read_config
from shortlist.errors import ConfigError
from shortlist.extras import MissingExtraError
from shortlist.ranking import BinnedAPLoss, BlackboxAPLoss, RecallAtKLoss, SmoothAPLoss
from shortlist.training import Display, RunFolder, describe_plan, loop, make_plan
from shortlist.training import train_run as train
from shortlist.training.checkpoint import TrainingState, latest_state, save_state
from shortlist.training.components import build_embedder, build_loss
from shortlist.training.learner import Learner
from shortlist.training.user_loss import ExternalLoss
from tests.training.runs import FASTEST_MODEL, RECIPE, class_folders, records
from tests.training.runs import config as run_config

CPU = torch.device("cpu")
CLASSES = torch.tensor([50, -3, 7, 11])  # of a run: any numbers, in any order
DIM = 8


def config(*overrides: str) -> RunConfig:
    return read_config(RECIPE, "tiny", [FASTEST_MODEL, *overrides])


def build(name: str, *overrides: str, classes: Tensor = CLASSES) -> nn.Module:
    return build_loss(config(f"loss.name={name}", *overrides).loss, classes, DIM)


def some_vectors(seed: int = 0, number: int = 12) -> tuple[Tensor, Tensor]:
    """Vectors that require a gradient, of three of the classes."""
    random = torch.Generator().manual_seed(seed)
    vectors = nn.functional.normalize(torch.randn(number, DIM, generator=random))
    return vectors.requires_grad_(), torch.tensor([7, 50, -3]).repeat_interleave(number // 3)


def numbered(labels: Tensor) -> Tensor:
    """Labels as the library requires them: the position of each among the sorted classes."""
    return torch.tensor([[-3, 7, 11, 50].index(label) for label in labels.tolist()])


class TestOurs:
    def test_recall_at_k(self) -> None:
        settings = ("loss.k=[1, 3]", "loss.rank_temperature=2", "loss.similarity_temperature=0.2")
        vectors, labels = some_vectors()
        value = build("recall_at_k", *settings)(vectors, labels)
        assert value == RecallAtKLoss((1, 3), 2.0, 0.2)(vectors, labels)
        assert value != RecallAtKLoss((1, 2), 2.0, 0.2)(vectors, labels)
        assert value != build("recall_at_k", *settings, "loss.count_query=true")(vectors, labels)

    def test_smooth_ap(self) -> None:
        vectors, labels = some_vectors()
        loss = build("smooth_ap", "loss.similarity_temperature=0.2")
        assert isinstance(loss, SmoothAPLoss)
        assert loss(vectors, labels) == SmoothAPLoss(0.2)(vectors, labels)
        counted = build("smooth_ap", "loss.similarity_temperature=0.2", "loss.count_query=true")(vectors, labels)
        assert counted == SmoothAPLoss(0.2, count_query=True)(vectors, labels) != loss(vectors, labels)

    @pytest.mark.parametrize("name", ["recall_at_k", "smooth_ap"])
    def test_simix(self, name: str) -> None:
        plain, mixed = (build(name, f"loss.simix={each}") for each in (False, True))
        vectors, labels = some_vectors()
        torch.manual_seed(0)
        first = mixed(vectors, labels)
        assert first != plain(vectors, labels)
        assert first != mixed(vectors, labels)  # it is random

    def test_binned_ap(self) -> None:
        vectors, labels = some_vectors()
        loss = build("binned_ap", "loss.bins=7")
        assert isinstance(loss, BinnedAPLoss)
        assert loss(vectors, labels) == BinnedAPLoss(7)(vectors, labels) != BinnedAPLoss()(vectors, labels)
        assert build("binned_ap")(vectors, labels) == BinnedAPLoss(20)(vectors, labels)

    def test_blackbox_ap(self) -> None:
        vectors, labels = some_vectors()
        loss = build("blackbox_ap", "loss.blackbox_lambda=2", "loss.margin=0.3")
        assert isinstance(loss, BlackboxAPLoss)

        def gradient(loss: nn.Module) -> Tensor:
            return torch.autograd.grad(loss(vectors, labels), vectors)[0]

        assert torch.equal(gradient(loss), gradient(BlackboxAPLoss(2.0, 0.3)))
        assert not torch.equal(gradient(loss), gradient(BlackboxAPLoss(2.0, 0.2)))
        assert not torch.equal(gradient(loss), gradient(BlackboxAPLoss(1.0, 0.3)))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (
                ["loss.name=binned_ap", "loss.simix=true"],
                "simix works with recall_at_k and smooth_ap only, not with binned",
            ),
            (["loss.name=blackbox_ap", "loss.simix=true"], "simix works with recall_at_k and smooth_ap only"),
            (
                ["loss.name=pml.NCALoss", "loss.simix=true"],
                "simix works with recall_at_k and smooth_ap only, not with pml.N",
            ),
            (["loss.name=pml.NCALoss", "loss.k=[1]"], "loss: k has no effect with pml.NCALoss"),
            (["loss.name=smooth_ap", "loss.bins=7"], "loss: bins has no effect with smooth_ap"),
            (["loss.name=binned_ap", "loss.margin=0.3"], "loss: margin has no effect with binned_ap"),
            (["loss.args.alpha=1"], "loss: args has no effect with recall_at_k"),
            (["loss.memory.size=9"], "loss: memory has no effect with recall_at_k"),
            (["loss.name=smoothap"], "loss.name: unknown loss; did you mean 'smooth_ap'?"),
            (["loss.name=MultiSimilarityLoss"], "write for example pml.MultiSimilarityLoss"),
            (["loss.name=pml."], "write for example pml.MultiSimilarityLoss"),
            (["loss.name=pml.NCALoss", "loss.miner.nam=X"], "loss.miner.nam: unknown key; did you mean 'name'?"),
            (["loss.name=pml.NCALoss", "loss.memory.size=0"], "loss.memory.size: should be greater than or equal to 1"),
        ],
    )
    def test_what_a_config_refuses(self, settings: list[str], message: str) -> None:
        with pytest.raises(ConfigError) as error:
            config(*settings)
        assert message in str(error.value)


class TestEveryLoss:
    def test_it_takes_steps_or_is_refused_with_a_reason(self) -> None:
        """The large-batch step computes gradients for the model and for the parameters of the loss, if it has any."""
        from pytorch_metric_learning import losses

        from shortlist.training.metric_learning import REFUSED_LOSSES
        from shortlist.training.metric_learning_arguments import classes_in

        names = classes_in(losses)
        assert REFUSED_LOSSES.keys() <= names.keys()  # none that the library no longer has
        for name in names:
            if name in REFUSED_LOSSES:
                with pytest.raises(ConfigError) as error:
                    build(f"pml.{name}")
                assert str(error.value) == f"loss.name: pml.{name} cannot be used: {REFUSED_LOSSES[name]}."
            else:
                self.take_steps(name)

    def take_steps(self, name: str) -> None:
        torch.manual_seed(0)
        required = ["loss.args={margin: 0.4, Tn: 1}"] if name == "RankedListLoss" else []  # have no default
        loss = build(f"pml.{name}", *required)
        model = nn.Linear(20, DIM)
        optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
        step = LargeBatchStep(model, loss, chunk_size=5)
        own = [each.detach().clone() for each in loss.parameters()]
        for seed in range(2):
            optimizer.zero_grad()
            images = torch.randn(12, 20, generator=torch.Generator().manual_seed(seed))
            found = step(images, some_vectors()[1]).loss
            assert found.isfinite(), name
            assert found.shape == (), name
            gradients = [each.grad for each in (*model.parameters(), *loss.parameters())]
            assert all(each is not None and each.isfinite().all() and each.any() for each in gradients), name
            optimizer.step()
        assert all(not torch.equal(one, other) for one, other in zip(own, loss.parameters(), strict=True)), name

    @pytest.mark.parametrize("memory", ["null", "{size: 30}"])
    def test_every_miner(self, memory: str) -> None:
        from pytorch_metric_learning import miners

        from shortlist.training.metric_learning import REFUSED_MINERS
        from shortlist.training.metric_learning_arguments import classes_in

        for name in classes_in(miners):
            settings = [f"loss.miner.name={name}", f"loss.memory={memory}"]
            if name in REFUSED_MINERS:
                with pytest.raises(ConfigError) as error:
                    build("pml.TripletMarginLoss", *settings)
                assert f"loss.miner.name: {name} cannot be used: {REFUSED_MINERS[name]}" in str(error.value)
                continue
            loss = build("pml.TripletMarginLoss", *settings)
            vectors, labels = some_vectors()
            value = loss(vectors, labels)
            value.backward()
            assert vectors.grad is not None, name
            assert value.isfinite(), name

    def test_two_losses_are_refused_because_they_depend_on_the_order_of_the_batch(self) -> None:
        from pytorch_metric_learning import losses

        vectors, labels = some_vectors()
        labels = numbered(labels)
        order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
        for loss, wrong in ((losses.SmoothAPLoss(), True), (losses.InstanceLoss(), True), (losses.NCALoss(), False)):
            same = torch.isclose(loss(vectors, labels), loss(vectors[order], labels[order]), atol=1e-5)
            assert bool(same) is not wrong


class TestMetricLearning:
    def test_values_are_those_of_the_library(self) -> None:
        from pytorch_metric_learning import distances, losses, reducers, regularizers

        vectors, labels = some_vectors()
        for name, args, same in (
            ("MultiSimilarityLoss", "{alpha: 3, base: 0.4}", losses.MultiSimilarityLoss(alpha=3, base=0.4)),
            ("FastAPLoss", "{num_bins: 5}", losses.FastAPLoss(num_bins=5)),
            ("MarginLoss", "{beta: 0.9}", losses.MarginLoss(beta=0.9)),
            (
                "ContrastiveLoss",
                "{pos_margin: 1, neg_margin: 0.5, distance: CosineSimilarity}",
                losses.ContrastiveLoss(1, 0.5, distance=distances.CosineSimilarity()),
            ),
            (
                "TripletMarginLoss",
                "{distance: {name: LpDistance, args: {p: 1, power: 2}}, "
                "reducer: {name: ThresholdReducer, args: {low: 0.1}}}",
                losses.TripletMarginLoss(
                    distance=distances.LpDistance(p=1, power=2), reducer=reducers.ThresholdReducer(low=0.1)
                ),
            ),
            (
                "ContrastiveLoss",
                "{embedding_regularizer: {name: LpRegularizer, args: {p: 1}}, embedding_reg_weight: 0.7, "
                "reducer: {name: PerAnchorReducer, args: {reducer: MeanReducer}}}",
                losses.ContrastiveLoss(
                    embedding_regularizer=regularizers.LpRegularizer(p=1),
                    embedding_reg_weight=0.7,
                    reducer=reducers.PerAnchorReducer(reducers.MeanReducer()),
                ),
            ),
        ):
            value = build(f"pml.{name}", f"loss.args={args}")(vectors, labels)
            assert value == same(vectors, numbered(labels)), args
            assert value != getattr(losses, name)()(vectors, numbered(labels)), args  # its arguments are used

    def test_with_a_miner(self) -> None:
        from pytorch_metric_learning import losses, miners

        vectors, labels = some_vectors()
        settings = ["loss.miner.name=MultiSimilarityMiner", "loss.miner.args.epsilon=0.3"]
        value = build("pml.MultiSimilarityLoss", *settings)(vectors, labels)
        mined = miners.MultiSimilarityMiner(epsilon=0.3)(vectors, numbered(labels))
        assert value == losses.MultiSimilarityLoss()(vectors, numbered(labels), mined)
        assert value != losses.MultiSimilarityLoss()(vectors, numbered(labels))

    def test_classes_and_dimensions_come_from_the_run(self) -> None:
        for name, shape in (
            ("ProxyNCALoss", (4, DIM)),
            ("NormalizedSoftmaxLoss", (DIM, 4)),
            ("P2SGradLoss", (DIM, 4)),
            ("SoftTripleLoss", (DIM, 4 * 10)),
            ("SubCenterArcFaceLoss", (DIM, 4 * 3)),
        ):
            (parameter,) = build(f"pml.{name}").parameters()
            assert parameter.shape == shape
        given = build("pml.ProxyNCALoss", "loss.args={num_classes: 9, embedding_size: 8}")
        assert [each.shape for each in given.parameters()] == [(9, DIM)]

    def test_optional_numbers_of_classes_are_not_set_unless_requested(self) -> None:
        """Margin loss has one beta, or with `num_classes: auto` one for each class."""
        learned = ("pml.MarginLoss", "loss.args.learn_beta=true")
        assert [each.shape for each in build(*learned).parameters()] == [(1,)]
        assert [each.shape for each in build(*learned, "loss.args.num_classes=auto").parameters()] == [(4,)]
        assert not list(build("pml.MarginLoss").parameters())

    def test_weights_by_a_function_of_torch(self) -> None:
        args = "loss.args.weight_init_func={name: constant_, args: {val: 0.25}}"
        (proxies,) = build("pml.ProxyNCALoss", args).parameters()
        assert (proxies == 0.25).all()

    def test_labels_may_be_any_numbers(self) -> None:
        """They are mapped to 0..C-1 in ascending order, for any order of the given classes."""
        from pytorch_metric_learning import losses

        vectors, labels = some_vectors()
        torch.manual_seed(0)
        loss = build("pml.ProxyNCALoss")
        torch.manual_seed(0)
        again = build("pml.ProxyNCALoss", classes=CLASSES.flip(0).repeat(3))
        plain = losses.ProxyNCALoss(4, DIM)
        plain.load_state_dict({"proxies": next(loss.parameters())})
        assert loss(vectors, labels) == again(vectors, labels) == plain(vectors, numbered(labels))
        assert loss(vectors, labels) != loss(vectors, labels.roll(1))

    @pytest.mark.parametrize("stranger", [-4, 8, 51])
    def test_a_label_of_no_training_class(self, stranger: int) -> None:
        vectors, labels = some_vectors()
        labels[5] = stranger
        with pytest.raises(ValueError, match="labels that are not among the training classes"):
            build("pml.ProxyNCALoss")(vectors, labels)

    def test_a_batch_of_one_class_has_a_gradient_of_zero(self) -> None:
        vectors, _ = some_vectors()
        value = build("pml.TripletMarginLoss")(vectors, torch.full((12,), 7))
        value.backward()
        assert value == 0
        assert vectors.grad is not None
        assert not vectors.grad.any()


REFUSALS = [
    ("MultiSimilarityLos", [], "has no loss MultiSimilarityLos; did you mean 'MultiSimilarityLoss'?"),
    ("Nothing", [], "has no loss Nothing; known: "),
    (
        "MultiSimilarityLoss",
        ["args.alpa=1"],
        "loss.args.alpa: unknown argument of pml.MultiSimilarityLoss; did you mean 'alpha'?",
    ),
    ("MultiSimilarityLoss", ["args.mat_based_loss=true"], "loss.args.mat_based_loss: unknown"),
    ("RankedListLoss", ["args.margin=1"], "loss.args.Tn is required by pml.RankedListLoss"),
    ("MultiSimilarityLoss", ["args.alpha=much"], "arguments {'alpha': 'much'} does not work: "),
    ("ArcFaceLoss", ["args.margin=wide"], "loss.args: pml.ArcFaceLoss does not accept {'margin': 'wide'}"),
    ("ProxyNCALoss", ["args.num_classes=3"], "loss.args.num_classes: this run has 4, not 3; remove it"),
    ("ProxyNCALoss", ["args.num_classes=all"], "loss.args.num_classes: this run has 4, not 'all'"),
    ("ProxyNCALoss", ["args.embedding_size=16"], "loss.args.embedding_size: this run has 8, not 16"),
    (
        "NCALoss",
        ["args.distance=CosineSimilarty"],
        "loss.args.distance: pytorch-metric-learning has no CosineSimilarty",
    ),
    (
        "NCALoss",
        ["args.distance={name: SNRDistance, args: {q: 2}}"],
        "loss.args.distance.args.q: unknown argument of SNRDistance",
    ),
    ("NCALoss", ["args.distance={nam: LpDistance}"], "loss.args.distance: set it to a name, or to a name and args"),
    ("NCALoss", ["args.distance=BaseDistance"], "has no BaseDistance"),
    ("FastAPLoss", ["args.distance=CosineSimilarity"], "FastAPLoss does not accept {'distance': 'CosineSimilarity'}"),
    ("NCALoss", ["args.reducer=DoNothingReducer"], "use another reducer"),
    (
        "NCALoss",
        ["args.distance={name: LpDistance, args: 5}"],
        "loss.args.distance: set it to a name, or to a name and args",
    ),
    (
        "NCALoss",
        ["args.distance={name: LpDistance, args: {q: 2}}"],
        "loss.args.distance.args.q: unknown argument of LpDist",
    ),
    ("ProxyNCALoss", ["args.weight_init_func=normal"], "torch.nn.init has no normal; did you mean 'normal_'?"),
    ("NormalizedSoftmaxLoss", ["args.temperature=0"], "does not work: its value for four vectors is nan"),
    ("TripletMarginLoss", ["args.margin=.nan"], "loss.args.margin: should be a finite number, not nan"),
    ("TripletMarginLoss", ["args.margin=true"], "loss.args.margin: should be a number, not true"),
    ("TripletMarginLoss", ["args.swap=1"], "loss.args.swap: should be true or false, not 1"),
    (
        "NCALoss",
        ["miner.name=MultiSimilarMiner"],
        "has no miner MultiSimilarMiner; did you mean 'MultiSimilarityMiner'?",
    ),
    (
        "NCALoss",
        ["miner={name: PairMarginMiner, args: {margin: 1}}"],
        "loss.miner.args.margin: unknown argument of PairMarginMin",
    ),
    ("PNPLoss", ["miner.name=MultiSimilarityMiner"], "pml.PNPLoss with the miner MultiSimilarityMiner does not work: "),
    (
        "ProxyNCALoss",
        ["memory.size=100"],
        "loss.memory does not work with pml.ProxyNCALoss. It works with AngularLoss,",
    ),
]


@pytest.mark.parametrize(("name", "settings", "message"), REFUSALS, ids=lambda each: str(each)[:40])
def test_mistakes(name: str, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(f"pml.{name}", *(f"loss.{each}" for each in settings))
    assert message in str(error.value)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shortlist.training.metric_learning", raising=False)
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    with pytest.raises(MissingExtraError, match=r"loss.name=pml.NCALoss needs .* pip install 'shortlist\[baselines\]'"):
        build("pml.NCALoss")
    build("recall_at_k")


MEMORY = ("loss.name=pml.ContrastiveLoss", "loss.memory.size=10")


class TestMemory:
    def test_it_contains_the_last_batches(self) -> None:
        """Contrastive loss of pairs with the last 20 items, including this batch, but not of an item with itself."""
        loss = build("pml.ContrastiveLoss", "loss.memory.size=20", "loss.args={pos_margin: 0.3, neg_margin: 0.9}")
        seen, seen_labels = torch.empty(0, DIM), torch.empty(0, dtype=torch.long)
        for step in range(5):  # batches of 12: the memory overflows
            vectors, labels = some_vectors(step)
            seen, seen_labels = torch.cat((seen, vectors.detach()))[-20:], torch.cat((seen_labels, labels))[-20:]
            distance = torch.cdist(vectors.detach(), seen)
            same = labels[:, None] == seen_labels
            positive = same.clone()
            positive[:, -12:] &= ~torch.eye(12, dtype=torch.bool)
            terms = (distance[positive] - 0.3).clamp(min=0), (0.9 - distance[~same]).clamp(min=0)
            literal = sum(each[each > 0].mean() for each in terms if each.any())
            torch.testing.assert_close(loss(vectors, labels).detach(), literal, atol=1e-4, rtol=1e-4)

    def test_too_small_for_a_batch(self) -> None:
        with pytest.raises(ConfigError, match=r"memory.size 5 is smaller than batch.size 6; it must hold a batch"):
            config("loss.name=pml.ContrastiveLoss", "loss.memory.size=5")
        loss = build("pml.ContrastiveLoss", "loss.memory.size=5", "batch.size=auto")  # a size that is found later
        with pytest.raises(ConfigError, match=r"loss.memory.size=5 is smaller than the batch of 12"):
            loss(*some_vectors())

    def test_its_counters_are_part_of_the_state(self) -> None:
        one, other, broken = (build("pml.ContrastiveLoss", "loss.memory.size=20") for _ in range(3))
        for step in range(2):
            one(*some_vectors(step))
        state = one.state_dict()
        other.load_state_dict(state)
        broken.load_state_dict({**state, "loss._extra_state": torch.tensor([0, 0])})  # negative control
        found = [each(*some_vectors(2)).item() for each in (one, other, broken)]
        assert found[0] == found[1] != found[2]


def batch(seed: int) -> tuple[list[Tensor], Tensor]:
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8, generator=random)
    return list(images.split(4)), torch.tensor([7, 7, 7, 50, 50, 50])


def learn(learner: Learner, step: int) -> float:
    chunks, labels = batch(step)
    return learner.train_step(step, iter(chunks), labels, 1.0).output.loss.item()


class TestLearner:
    @pytest.mark.parametrize(
        "settings",
        [
            (*MEMORY, "loss.miner.name=PairMarginMiner"),
            (*MEMORY, "loss.plus=[{name: pml.ProxyNCALoss, weight: 0.5}]"),
            ("loss.name=pml.DynamicSoftMarginLoss",),  # keeps a histogram
            ("loss.name=pml.MarginLoss", "loss.args={learn_beta: true, num_classes: auto}"),
            ("loss.name=pml.TripletMarginLoss", "loss.miner.name=DistanceWeightedMiner"),  # which is random
        ],
        ids=lambda each: " ".join(each).replace("loss.", ""),
    )
    def test_a_learner_continues_from_a_checkpoint_bit_for_bit(self, settings: tuple[str, ...], tmp_path: Any) -> None:
        one = Learner(config(*settings), CPU, CLASSES)
        for step in range(2):
            learn(one, step)
        save_state(tmp_path, one.state(2))
        other = Learner(config(*settings), CPU, CLASSES)
        learn(other, 9)  # its earlier state does not matter
        state = latest_state(tmp_path)
        assert state is not None
        other.load(state)
        for step in range(2, 4):
            assert learn(one, step) == learn(other, step)
        for name, each in one.state(4).tensors.items():
            assert torch.equal(each, other.state(4).tensors[name]), name

    @pytest.mark.parametrize("settings", [MEMORY, ("loss.name=pml.ProxyNCALoss",)], ids=str)
    def test_without_the_state_of_the_loss_it_continues_differently(self, settings: tuple[str, ...]) -> None:
        """Negative control."""
        one, other = (Learner(config(*settings), CPU, CLASSES) for _ in range(2))
        fresh = other.state(0)
        for step in range(2):
            learn(one, step)
        state = one.state(2)
        of_loss = {name: each for name, each in fresh.tensors.items() if name.startswith("loss.")}
        other.load(TrainingState(2, {**state.tensors, **of_loss}, state.facts))
        assert learn(one, 2) != learn(other, 2)

    def test_initial_weights_depend_on_the_seed_alone(self) -> None:
        random = torch.get_rng_state()
        first, again, other = (
            next(Learner(config("loss.name=pml.ProxyNCALoss", f"training.seed={seed}"), CPU, CLASSES).loss.parameters())
            for seed in (1, 1, 2)
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert torch.equal(torch.get_rng_state(), random)

    def test_its_parameters_have_their_own_learning_rate_and_weight_decay(self) -> None:
        settings = ["loss.name=pml.ProxyNCALoss", "optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0"]
        own = ["optimizer.parts.loss.lr_multiplier=100", "optimizer.parts.loss.weight_decay=0"]
        learner = Learner(config(*settings, *own), CPU, CLASSES)
        group = next(group for group in learner.optimizer.param_groups if group["name"] == "loss")
        assert (group["lr"], group["weight_decay"]) == (pytest.approx(10), 0)
        (proxies,) = group["params"]
        before = proxies.detach().clone()
        learn(learner, 0)
        assert torch.allclose(proxies, before - 10 * proxies.grad, atol=1e-5)
        assert (proxies - before).abs().max() > 1e-3
        still = Learner(config(*settings, "optimizer.parts.loss.lr_multiplier=0"), CPU, CLASSES)
        before = next(still.loss.parameters()).detach().clone()
        learn(still, 0)
        assert torch.equal(next(still.loss.parameters()), before)

    @pytest.mark.filterwarnings("ignore:Out of memory")
    @pytest.mark.parametrize("rewinds", [True, False])
    def test_a_step_repeated_after_out_of_memory_is_in_the_memory_once(
        self, rewinds: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The third stage fails once, so the step is repeated; the memory must not contain its first attempt."""
        settings = (*MEMORY, "batch.keep_graphs=false")
        plain, failing = (Learner(config(*settings), CPU, CLASSES) for _ in range(2))
        if not rewinds:  # negative control
            monkeypatch.setattr(failing, "_rewind_loss", lambda: None)
        learn(plain, 0)
        learn(failing, 0)
        plain.large_batch.chunk_size = 2  # as it will be after the failure
        stage, failures = failing.large_batch._backpropagate, [MemoryError()]

        def fails_once(*args: Any) -> None:
            if failures:
                raise failures.pop()
            stage(*args)

        monkeypatch.setattr(failing.large_batch, "_backpropagate", fails_once)
        learn(plain, 1)
        learn(failing, 1)
        assert failing.large_batch.chunk_size == 2
        assert not failures
        same = learn(plain, 2) == learn(failing, 2)
        assert same is rewinds

    def test_a_loss_with_classes_needs_them(self) -> None:
        with pytest.raises(ValueError, match="requires the labels of the training classes"):
            Learner(config("loss.name=pml.NCALoss"), CPU)


def test_a_run_passes_its_training_classes_to_the_loss(tmp_path: Any) -> None:
    """Classes with too few images are not among them."""
    images = class_folders(tmp_path / "images")
    for extra in sorted((images / "class 01").iterdir())[1:]:
        extra.unlink()
    settings = ["loss.name=pml.ProxyNCALoss", "optimizer.parts.loss.lr_multiplier=10", "training.epochs=1"]
    folder = train(run_config(images, *settings, "data.validation=none"), tmp_path / "run")
    assert isinstance(folder, RunFolder)
    losses = [each["loss"] for each in records(folder)]
    assert losses
    assert 0 < min(losses) <= max(losses) < 10
    state = latest_state(folder.checkpoints)
    assert state is not None
    assert state.tensors["loss.loss.proxies"].shape == (5, 8)  # 6 training classes


def test_a_misspelt_argument_is_reported_before_images_are_opened(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "make_plan", lambda *_: pytest.fail("the images were opened"))
    with pytest.raises(ConfigError, match=r"loss.args.alpa: unknown"):
        train(run_config(tmp_path, "loss.name=pml.MultiSimilarityLoss", "loss.args.alpa=1"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_dry_run_counts_the_parameters_of_the_loss(tmp_path: Any) -> None:
    images = class_folders(tmp_path / "images", classes=8)

    def parameters(*settings: str) -> dict[str, int]:
        chosen = run_config(images, "data.validation=none", *settings)
        found = describe_plan(make_plan(chosen, Display()), build_embedder(chosen, weights=False))
        counted: dict[str, int] = found["parameters"]
        return counted

    plain, proxies = parameters(), parameters("loss.name=pml.ProxyNCALoss")
    assert "loss" not in plain
    assert proxies["loss"] == 4 * 8
    assert proxies["all"] == plain["all"] + 4 * 8
    with pytest.raises(ConfigError, match=r"loss.args.alpa: unknown"):
        parameters("loss.name=pml.MultiSimilarityLoss", "loss.args.alpa=1")


def test_repr_names_the_loss() -> None:
    loss = build("pml.NCALoss", "loss.memory.size=30")
    assert isinstance(loss, ExternalLoss)
    assert "NCALoss" in repr(loss)
    assert not any(inspect.isclass(each) for each in vars(loss).values())

"""The losses inside pytorch-metric-learning: its call, miners, cross-batch memory, several processes, trainer."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils import common_functions
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from pytorch_metric_learning.utils.loss_and_miner_utils import get_all_pairs_indices, get_all_triplets_indices
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from shortlist import RecallAtKLoss, SiMix, SmoothAPLoss, ranking
from shortlist import pytorch_metric_learning as derived
from shortlist.pytorch_metric_learning import CrossBatchMemory, metric_loss_class
from shortlist.ranking import RankingLoss, retrieval_metrics

TEMPERATURE = 0.1  # wide enough for every pair to have a gradient
LOSSES = {"recall": RecallAtKLoss((1, 2, 4), 1.0, TEMPERATURE), "smooth_ap": SmoothAPLoss(TEMPERATURE)}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def some_items(number: int, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unit vectors in float64 that require a gradient, and labels of classes of different sizes."""
    random = torch.Generator().manual_seed(seed)
    vectors = torch.randn(number, 6, generator=random, dtype=torch.float64)
    return normalize(vectors).requires_grad_(), torch.randint(classes, (number,), generator=random)


def literal(loss: RankingLoss, similarities: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """The loss of (Q, N) similarities with (Q, N) masks of the positives and of the other competitors."""
    values = []
    for row, good, bad in zip(similarities, positive, negative, strict=True):
        if good.any():
            at = row[good]
            others = 1 - torch.eye(len(at))
            among = 1 + (others * torch.sigmoid((at - at[:, None]) / TEMPERATURE)).sum(1)
            overall = among + torch.sigmoid((row[bad] - at[:, None]) / TEMPERATURE).sum(1)
            values.append(
                literal_smooth_ap(among, overall) if isinstance(loss, SmoothAPLoss) else literal_recall(overall)
            )
    return torch.stack(values).mean()


def literal_smooth_ap(among: Tensor, overall: Tensor) -> Tensor:
    return 1 - (among / overall).mean()


def literal_recall(overall: Tensor) -> Tensor:
    recalls = [torch.sigmoid(k - overall).sum().clamp(max=k) / min(k, len(overall)) for k in (1, 2, 4)]
    return 1 - sum(recalls) / len(recalls)


def marks(indices: tuple[Tensor, ...], shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Pairs or triplets as two (Q, N) masks."""
    anchors, positives, *negatives = indices
    rivals, negatives = negatives if len(negatives) == 2 else (anchors, negatives[0])
    positive, negative = torch.zeros(2, *shape, dtype=torch.bool)
    positive[anchors, positives] = True
    negative[rivals, negatives] = True
    return positive, negative


def assert_same(found: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    """Equal values, equal and non-zero gradients."""
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, other)
        assert one.abs().max() > 1e-3


# Its call


MINERS = {
    "multi-similarity pairs": miners.MultiSimilarityMiner(epsilon=0.0),
    "hard triplets": miners.TripletMarginMiner(margin=0.2, type_of_triplets="hard"),
    "semihard triplets": miners.TripletMarginMiner(margin=0.2, type_of_triplets="semihard"),
}
each_miner = pytest.mark.parametrize("miner", MINERS.values(), ids=MINERS.keys())


@each_loss
@each_miner
def test_only_mined_pairs_count(loss, miner):
    embeddings, labels = some_items(30)
    mined = miner(embeddings, labels)
    positive, negative = marks(mined, (30, 30))
    assert_same(
        loss(embeddings, labels, mined), literal(loss, embeddings @ embeddings.T, positive, negative), embeddings
    )
    same = labels[:, None] == labels
    assert 0 < positive.sum() < same.sum() - 30  # the miner left something out, on both sides,
    assert 0 < negative.sum() < (~same).sum()
    assert abs(loss(embeddings, labels, mined) - loss(embeddings, labels)) > 1e-3  # and that makes a difference


@each_loss
@each_miner
def test_mined_pairs_of_a_database(loss, miner):
    queries, labels = some_items(12)
    database, database_labels = some_items(30, seed=1)
    mined = miner(queries, labels, database, database_labels)
    expected = literal(loss, queries @ database.T, *marks(mined, (12, 30)))
    assert_same(loss(queries, labels, mined, database, database_labels), expected, queries, database)


@each_loss
@pytest.mark.parametrize("every", [get_all_pairs_indices, get_all_triplets_indices], ids=["pairs", "triplets"])
def test_all_pairs_or_triplets_are_the_default(loss, every):
    embeddings, labels = some_items(30)
    assert_same(loss(embeddings, labels, every(labels)), loss(embeddings, labels), embeddings)


@each_loss
def test_a_pair_listed_twice_counts_once(loss):
    embeddings, labels = some_items(30)
    pairs = get_all_pairs_indices(labels)
    twice = tuple(index.repeat(2) for index in pairs)
    assert_same(loss(embeddings, labels, twice), loss(embeddings, labels, pairs), embeddings)


@each_loss
def test_a_miner_that_finds_nothing_gives_no_loss(loss):
    embeddings, labels = some_items(30)
    value = loss(embeddings, labels, (torch.empty(0, dtype=torch.long),) * 4)
    (gradient,) = torch.autograd.grad(value, embeddings)
    assert value == 0
    assert not gradient.any()


@each_loss
def test_a_database_of_its_own(loss):
    queries, labels = some_items(12, classes=5)  # of which the database has but four
    database, database_labels = some_items(30, seed=1)
    same = labels[:, None] == database_labels
    assert not same.any(1).all()
    expected = literal(loss, queries @ database.T, same, ~same)
    assert_same(loss(queries, labels, ref_emb=database, ref_labels=database_labels), expected, queries, database)
    alone = loss(queries.detach(), labels, ref_emb=database, ref_labels=database_labels)
    assert_same(alone, literal(loss, queries.detach() @ database.T, same, ~same), database)


@each_loss
def test_a_batch_as_its_database(loss):
    """With the batch as ref_emb, an item is in its own database. The gradient is the sum over both arguments."""
    embeddings, labels = some_items(20)
    same = labels[:, None] == labels
    expected = literal(loss, embeddings @ embeddings.T, same, ~same)
    assert_same(loss(embeddings, labels, ref_emb=embeddings, ref_labels=labels), expected, embeddings)


# Its memory


DERIVED = {
    "recall": derived.RecallAtKLoss((1, 2, 4), 1.0, TEMPERATURE),
    "smooth_ap": derived.SmoothAPLoss(TEMPERATURE),
}
plain_or_derived = pytest.mark.parametrize(
    "loss", [*LOSSES.values(), *DERIVED.values()], ids=[*LOSSES, *(f"derived {name}" for name in DERIVED)]
)


@plain_or_derived
def test_cross_batch_memory(loss):
    """The database contains the last 20 items, including this batch; an item is not in its own database."""
    memory = CrossBatchMemory(loss, embedding_size=6, memory_size=20)
    seen, seen_labels = torch.empty(0, 6, dtype=torch.float64), torch.empty(0, dtype=torch.long)
    for step in range(9):  # batches of 8: the third and the eighth run over the end of the queue
        batch, labels = some_items(8, seed=step)
        seen, seen_labels = torch.cat((seen, batch.detach()))[-20:], torch.cat((seen_labels, labels))[-20:]
        same, itself = labels[:, None] == seen_labels, torch.eye(8, dtype=torch.bool)
        positive = same.clone()
        positive[:, -8:] &= ~itself
        assert_same(memory(batch, labels), literal(loss, batch @ seen.T, positive, ~same), batch)
    assert memory.has_been_filled


@each_loss
def test_losses_of_several_batches_can_be_added_up(loss):
    """The memory is modified in place, and the backward pass still works."""
    batches = [some_items(8, seed=step) for step in range(3)]
    together, one_by_one = CrossBatchMemory(loss, 6, 20), CrossBatchMemory(loss, 6, 20)
    gradients = [torch.autograd.grad(one_by_one(batch, labels), batch)[0] for batch, labels in batches]
    sum(together(batch, labels) for batch, labels in batches).backward()
    for (batch, _), gradient in zip(batches, gradients, strict=True):
        torch.testing.assert_close(batch.grad, gradient)


def test_a_memory_continues_from_its_state():
    batches = [some_items(8, seed=step) for step in range(5)]
    memory, other = (CrossBatchMemory(RecallAtKLoss(), 6, 20).double() for _ in range(2))
    for batch, labels in batches[:4]:
        memory(batch, labels)
    other.load_state_dict(memory.state_dict())
    assert_same(other(*batches[4]), memory(*batches[4]), batches[4][0])


class OwnLoss(RankingLoss):
    def __init__(self):
        super().__init__(ranking.SmoothAPHead(), TEMPERATURE)


def test_what_the_memory_accepts():
    for accepted in (OwnLoss(), RecallAtKLoss(), ranking.BinnedAPLoss(), losses.ContrastiveLoss()):
        CrossBatchMemory(accepted, 6, 20)
    with pytest.raises(Exception, match="not supported for ProxyNCALoss"):
        CrossBatchMemory(losses.ProxyNCALoss(4, 6), 6, 20)
    with pytest.raises(Exception, match="not supported for RecallAtKLoss"):  # the control: the library's own
        losses.CrossBatchMemory(derived.RecallAtKLoss(), 6, 20)


# Its base class, and its wrapper for several processes


ALL = ("RecallAtKLoss", "SmoothAPLoss", "BinnedAPLoss", "BlackboxAPLoss", "CalibrationLoss")


@pytest.mark.parametrize("name", ALL)
def test_a_derived_loss_is_the_same_loss(name):
    ours, theirs = getattr(ranking, name)(), getattr(derived, name)()
    assert isinstance(theirs, losses.BaseMetricLossFunction)
    assert isinstance(theirs, type(ours))
    assert theirs.state_dict() == {}
    embeddings, labels = some_items(30)
    assert_same(theirs(embeddings, labels), ours(embeddings, labels), embeddings)
    again = pickle.loads(pickle.dumps(theirs))
    assert_same(again(embeddings, labels), ours(embeddings, labels), embeddings)
    unit = embeddings.detach()[:3]
    torch.testing.assert_close(theirs.distance(unit), unit @ unit.T)


def test_every_loss_is_derived():
    kinds = {name for name in ranking.__all__ if name.endswith("Loss")} - {
        "RankingLoss",
        "ListwiseLoss",
        "CombinedLoss",
    }
    assert kinds == set(ALL) == {name for name in derived.__all__ if name.endswith("Loss")}


def test_arguments_are_those_of_the_loss():
    embeddings, labels = some_items(30)
    loss = derived.RecallAtKLoss(k=2, similarity_temperature=TEMPERATURE, count_query=True)
    assert_same(
        loss(embeddings, labels), RecallAtKLoss(2, 1.0, TEMPERATURE, None, True)(embeddings, labels), embeddings
    )
    with pytest.raises(TypeError, match="kk"):
        derived.RecallAtKLoss(kk=2)


def test_the_wrapper_refuses_the_plain_loss():
    with pytest.raises(TypeError, match="must extend BaseMetricLossFunction"):  # the control
        DistributedLossWrapper(RecallAtKLoss())
    DistributedLossWrapper(metric_loss_class(OwnLoss)())


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "recall": lambda: derived.RecallAtKLoss((1, 2, 4), 1.0, TEMPERATURE),
    "recall with the query": lambda: derived.RecallAtKLoss((1, 2, 4), 1.0, TEMPERATURE, count_query=True),
    "smooth AP": lambda: derived.SmoothAPLoss(TEMPERATURE),
    "binned AP": lambda: derived.BinnedAPLoss(),
    "blackbox AP": lambda: derived.BlackboxAPLoss(),
    "recall and memory": lambda: CrossBatchMemory(derived.RecallAtKLoss((1, 2, 4), 1.0, TEMPERATURE), 6, 48),
    "smooth AP and memory": lambda: CrossBatchMemory(derived.SmoothAPLoss(TEMPERATURE), 6, 48),
}


def gradients(loss: nn.Module, model: nn.Module, rows: slice) -> list[Tensor]:
    """The gradients of a linear model after each of three batches of 24 items, or of the given rows of them."""
    found = []
    for step in range(3):
        items, labels = some_items(24, seed=step)
        model.zero_grad()
        loss(normalize(model(items.detach()[rows])), labels[rows]).backward()
        found += [each.grad.clone() for each in model.parameters()]
    return found


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 6, dtype=torch.float64)


def _train(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    rows = slice(12 * rank, 12 * (rank + 1))
    found = {
        name: gradients(DistributedLossWrapper(build()), DistributedDataParallel(linear()), rows)
        for name, build in WRAPPED.items()
    }
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_have_the_gradient_of_one(tmp_path, commands):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom tests.test_pytorch_metric_learning import _train\n"
        "_train(int(sys.argv[1]), Path.cwd())\n"
    )
    started = [commands.start(str(rank), cwd=tmp_path, script=script) for rank in range(2)]
    for process in started:
        assert process.wait() == 0, process.err
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, build in WRAPPED.items():
            expected = gradients(build(), linear(), slice(None))
            torch.testing.assert_close(found[name], expected)
            half = gradients(build(), linear(), slice(12))
            assert max((one - other).abs().max() for one, other in zip(half, expected, strict=True)) > 1e-3


# Its trainer


@pytest.fixture
def one_thread():
    """A second thread makes such small steps slower, especially on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Normalize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return normalize(x)


def toy_images(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ten classes that differ in 4 of 20 dimensions; the others are noise."""
    centres = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % 10
    signal = centres[labels] + 0.1 * torch.randn(number, 4, generator=random)
    return torch.cat((signal, torch.randn(number, 16, generator=random)), dim=1), labels


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # the trainer's progress bar does
@pytest.mark.parametrize(
    ("loss", "miner"),
    [
        (RecallAtKLoss(k=(1, 2, 4)), None),
        (RecallAtKLoss(k=(1, 2, 4, 8), simix=SiMix()), None),
        (SmoothAPLoss(), None),
        (SmoothAPLoss(simix=SiMix()), None),
        (RecallAtKLoss(k=(1, 2, 4)), miners.MultiSimilarityMiner()),
        (CrossBatchMemory(RecallAtKLoss(k=(1, 2, 4)), embedding_size=8, memory_size=80), None),
    ],
    ids=["recall", "recall and SiMix", "smooth AP", "smooth AP and SiMix", "recall and miner", "recall and memory"],
)
def test_its_trainer_trains(loss, miner, monkeypatch):
    from pytorch_metric_learning import samplers, trainers  # they import scikit-learn

    monkeypatch.setattr(common_functions, "NUMPY_RANDOM", np.random.default_rng(0))  # of the sampler
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(20, 8), Normalize())
    images, labels = toy_images(200, seed=1)
    unseen, unseen_labels = toy_images(100, seed=2)

    def r_at_1():
        return retrieval_metrics(trunk(unseen), unseen_labels, k=1)["r@1"]

    before = r_at_1()
    trainers.MetricLossOnly(
        models={"trunk": trunk},
        optimizers={"trunk_optimizer": torch.optim.Adam(trunk.parameters(), lr=0.04)},
        batch_size=40,
        loss_funcs={"metric_loss": loss},
        mining_funcs={} if miner is None else {"tuple_miner": miner},
        dataset=torch.utils.data.TensorDataset(images, labels),
        sampler=samplers.MPerClassSampler(labels, m=4, batch_size=40, length_before_new_iter=40 * 40),
        dataloader_num_workers=0,
        data_device=torch.device("cpu"),
    ).train(num_epochs=1)
    assert before < 0.4
    assert r_at_1() > 0.8


# Its Smooth-AP


def test_its_smooth_ap_is_ours_with_the_query_in_the_database():
    """It counts a query as its own first positive, as the authors of Smooth-AP do and as our `count_query` does.

    Its batches are here square, as many classes as items in each, in order: those it cuts into classes correctly.
    """
    embeddings = some_items(16)[0].detach().float().requires_grad_()  # it computes in float32
    labels = torch.arange(4).repeat_interleave(4)
    ours, theirs = SmoothAPLoss(TEMPERATURE), losses.SmoothAPLoss(TEMPERATURE)
    unit = normalize(embeddings)  # as it does by itself
    value = theirs(embeddings, labels)
    assert_same(ours(unit, labels, ref_emb=unit, ref_labels=labels), value, embeddings)
    counted = SmoothAPLoss(TEMPERATURE, count_query=True)(normalize(embeddings), labels)
    assert_same(counted, theirs(embeddings, labels), embeddings)
    assert abs(ours(unit, labels) - value) > 1e-3

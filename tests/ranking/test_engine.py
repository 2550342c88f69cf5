"""The engine, compared with the literal formulas and with itself under other settings."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shortlist.ranking import (
    Engine,
    LinearTail,
    MedianRank,
    RankingLoss,
    Ranks,
    RecallAtKLoss,
    RecallHead,
    SiMix,
    SmoothAPLoss,
    counting,
    query_scores,
    ranking_loss,
    recall_at_k_loss,
    smooth_ap_loss,
    tiles,
)
from tests import reference
from tests.processes import Commands
from tests.ranking.losses import assert_same, clusters, unit, value_and_gradient

Loss = Callable[..., Tensor]


batches = st.tuples(
    st.lists(st.integers(-3, 3), min_size=1, max_size=9),  # labels of any size of class, singletons too
    st.integers(0, 10**6),
    st.sampled_from([(1,), (1, 2, 4), (3,), (2, 50)]),
    st.sampled_from([(1.0, 0.01), (0.3, 0.2), (2.0, 0.05)]),
)


@settings(max_examples=30, deadline=None)
@given(batch=batches, tile_size=st.integers(1, 10), prune=st.booleans(), count_query=st.booleans())
def test_recall_is_the_literal_formula(batch: tuple, tile_size: int, prune: bool, count_query: bool) -> None:
    labels, seed, k, (rank_temperature, similarity_temperature) = batch
    embeddings, labels = unit(len(labels), 3, seed=seed), torch.tensor(labels)
    options = {
        "k": k,
        "rank_temperature": rank_temperature,
        "similarity_temperature": similarity_temperature,
        "count_query": count_query,
    }
    want = value_and_gradient(reference.recall_at_k_loss, embeddings, labels, **options)
    engine = Engine(tile_size=tile_size, prune=prune)
    assert_same(value_and_gradient(recall_at_k_loss, embeddings, labels, engine=engine, **options), want)


@settings(max_examples=20, deadline=None)
@given(batch=batches, tile_size=st.integers(1, 10), prune=st.booleans(), count_query=st.booleans())
def test_smooth_ap_is_the_literal_formula(batch: tuple, tile_size: int, prune: bool, count_query: bool) -> None:
    labels, seed, _, (_, temperature) = batch
    embeddings, labels = unit(len(labels), 3, seed=seed), torch.tensor(labels)
    options = {"similarity_temperature": temperature, "count_query": count_query}
    want = value_and_gradient(reference.smooth_ap_loss, embeddings, labels, **options)
    engine = Engine(tile_size=tile_size, prune=prune)
    assert_same(value_and_gradient(smooth_ap_loss, embeddings, labels, engine=engine, **options), want)


def test_recall_is_clipped() -> None:
    """Without the clip at k, the loss of more than k positives at the top is negative."""
    embeddings, labels = torch.ones(11, 1, dtype=torch.float64), torch.zeros(11, dtype=torch.long)
    clipped = reference.recall_at_k_loss(embeddings, labels, k=(8,))
    assert recall_at_k_loss(embeddings, labels, k=8) == clipped == 0
    assert reference.recall_at_k_loss(embeddings, labels, k=(8,), clip=False) < -0.1


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_order_of_the_batch_and_names_of_labels_do_not_matter(data: st.DataObject) -> None:
    labels = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=20)))
    order = torch.tensor(data.draw(st.permutations(range(len(labels)))))
    names = torch.tensor(data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=5, max_size=5, unique=True)))
    embeddings = unit(len(labels), 6, seed=3)
    value, gradient = value_and_gradient(recall_at_k_loss, embeddings, labels)
    assert_same(value_and_gradient(recall_at_k_loss, embeddings[order], names[labels][order]), (value, gradient[order]))


WIDE = RecallAtKLoss(rank_temperature=MedianRank())  # a reach of thousands of ranks
STAGES = {"trained": 0.35, "half-trained": 0.9, "untrained": 4.0}
LABELS = torch.arange(600) // 4  # a batch that is large enough for every way of pruning
BY_ROW = {"sorted rows": 0, "one way for all rows": math.inf}  # values of _SORT_FROM


@pytest.fixture(params=[*BY_ROW.values()], ids=[*BY_ROW])
def sort_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the way of pruning row by row, as for large batches, or one way for all rows."""
    monkeypatch.setattr(tiles, "_SORT_FROM", request.param)


@pytest.mark.parametrize(
    "loss", [RecallAtKLoss(), SmoothAPLoss(), RecallAtKLoss(k=4, rank_temperature=0.2), WIDE], ids=str
)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("by_row", "dtype"), [*zip(BY_ROW, (torch.float64, torch.float32), strict=True)])
def test_pruned_equals_unpruned(
    loss: RankingLoss, stage: str, by_row: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference is only rounding, at every stage of training."""
    monkeypatch.setattr(tiles, "_SORT_FROM", BY_ROW[by_row])
    embeddings, labels = clusters(150, 4, STAGES[stage], dtype=dtype), LABELS
    found = {}
    for prune in (True, False):
        loss.engine = Engine(prune=prune)
        found[prune] = value_and_gradient(loss, embeddings, labels)
    scale = found[False][1].abs().max()
    value_tolerance, tolerance = (1e-6, 1e-5) if dtype == torch.float32 else (1e-13, 1e-12)
    torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=value_tolerance)
    torch.testing.assert_close(found[True][1] / scale, found[False][1] / scale, rtol=0, atol=tolerance)


@pytest.mark.usefixtures("sort_from")
@pytest.mark.parametrize("length", [1e-3, 30.0, 1e4, 1e12])
def test_pruned_equals_unpruned_for_vectors_of_any_length(length: float) -> None:
    """Similarities may lie any number of temperatures apart."""
    embeddings, labels = length * clusters(150, 4, 0.9, dtype=torch.float32), LABELS
    found = [value_and_gradient(recall_at_k_loss, embeddings, labels, engine=Engine(prune=p)) for p in (True, False)]
    scale = found[1][1].abs().max().clamp(min=1e-30)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0][1] / scale, found[1][1] / scale, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("sort_from")
@pytest.mark.parametrize("stage", STAGES)
def test_simix_pruned_equals_unpruned(stage: str) -> None:
    embeddings, labels = clusters(60, 4, STAGES[stage]), LABELS[:240]
    virtual = SiMix(torch.Generator().manual_seed(0))(labels)
    runs = [
        value_and_gradient(recall_at_k_loss, embeddings, labels, virtual=virtual, engine=Engine(prune=prune))
        for prune in (True, False)
    ]
    assert_same(runs[0], runs[1], 1e-13)


def test_without_sparse_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch has no fast sparse product, the gradient is dense and has the same values."""
    monkeypatch.setattr(tiles, "_SORT_FROM", 0)
    embeddings, labels = clusters(150, 4, STAGES["trained"]), LABELS
    want = value_and_gradient(recall_at_k_loss, embeddings, labels, engine=Engine(prune=True))
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert_same(value_and_gradient(recall_at_k_loss, embeddings, labels, engine=Engine(prune=True)), want, 1e-13)


@pytest.mark.parametrize("simix", [False, True], ids=["plain", "SiMix"])
def test_users_may_check_their_sparse_tensors(simix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of a sparse gradient are not sorted, which torch refuses inside this context."""
    monkeypatch.setattr(tiles, "_SORT_FROM", 0)
    embeddings, labels = clusters(150, 4, STAGES["trained"]), LABELS
    virtual = SiMix(torch.Generator().manual_seed(0))(labels) if simix else None
    loss = partial(recall_at_k_loss, virtual=virtual, engine=Engine(prune=True))
    want = value_and_gradient(loss, embeddings, labels)
    with torch.sparse.check_sparse_tensor_invariants():
        assert_same(value_and_gradient(loss, embeddings, labels), want, 0)
        assert torch.sparse.check_sparse_tensor_invariants.is_enabled()
        with pytest.raises(RuntimeError, match="sorted and distinct"):  # the control
            torch.sparse_csr_tensor(torch.tensor([0, 2]), torch.tensor([1, 0]), torch.ones(2), (1, 2))
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize("engine", [Engine(), Engine(compile=True), Engine(prune=True)], ids=repr)
def test_a_gpu_gives_the_same_result(engine: Engine) -> None:
    embeddings, labels = clusters(150, 4, STAGES["half-trained"]), LABELS
    virtual = SiMix(torch.Generator().manual_seed(0))(labels)
    want = value_and_gradient(recall_at_k_loss, embeddings, labels, virtual=virtual, engine=Engine(prune=False))
    there = virtual._replace(pairs=virtual.pairs.cuda(), alphas=virtual.alphas.cuda())
    got = value_and_gradient(recall_at_k_loss, embeddings.cuda(), labels.cuda(), virtual=there, engine=engine)
    assert_same((got[0].cpu(), got[1].cpu()), want)


@pytest.mark.parametrize(
    ("loss", "stage", "way"),
    [
        (RecallAtKLoss(), "trained", "BandCounts"),
        (RecallAtKLoss(), "half-trained", "SeriesCounts"),
        (RecallAtKLoss(k=4, rank_temperature=0.2), "untrained", None),
        (SmoothAPLoss(), "untrained", "FactoredCounts"),
    ],
    ids=str,
)
def test_every_way_of_pruning_is_used(
    loss: RankingLoss, stage: str, way: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the tests above, which prove nothing if pruning computes all sigmoids."""
    rows: Counter[str] = Counter()

    def counted(plain: type, compared: counting.Comparison, *others: Any) -> Any:
        rows[plain.__name__] += len(compared.items)
        return plain(compared, *others)

    for plain in (tiles.BandCounts, tiles.SeriesCounts, tiles.FactoredCounts):
        monkeypatch.setattr(tiles, plain.__name__, partial(counted, plain))
    monkeypatch.setattr(tiles, "_SORT_FROM", 0)
    embeddings, labels = clusters(150, 4, STAGES[stage]).requires_grad_(), LABELS
    found = {}
    for prune in (True, False):
        loss.engine = Engine(prune=prune)
        with _Watch() as found[prune]:
            loss(embeddings, labels)
    items, pairs = 600 * 600, 600 * 3 * 600
    assert rows[way] > 300 if way else rows.total() < 300  # beyond the reach: not counted at all
    assert found[True].sigmoids < pairs / 16  # of the positives among each other, and of the head
    assert found[True].exponentials < 2.5 * items  # twice, for counts and gradient, and not for each pair
    assert found[False].sigmoids >= pairs  # the control


SIGMOIDS = 24 * 3 * 24  # of 24 queries, 3 positives each, 24 items


@pytest.mark.parametrize(
    ("engine", "prune_from", "way"),
    [
        (Engine(), SIGMOIDS, "pruned"),
        (Engine(), SIGMOIDS + 1, "plain"),
        (Engine(compile=False), SIGMOIDS, "pruned"),
        (Engine(compile=True), SIGMOIDS, "compiled"),
        (Engine(compile=True, prune=True), SIGMOIDS, "pruned"),
        (Engine(prune=True), SIGMOIDS + 1, "pruned"),
        (Engine(prune=False), SIGMOIDS, "plain"),
    ],
    ids=str,
)
def test_when_a_cpu_prunes_and_compiles(
    engine: Engine, prune_from: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def noted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: taken.append(name) or plain(*given)

    monkeypatch.setattr(tiles, "SeriesCounts", noted("pruned", tiles.SeriesCounts))
    monkeypatch.setattr(tiles, "soft_steps", noted("plain", counting.soft_steps))
    monkeypatch.setattr(tiles, "compiled_steps", noted("compiled", counting.soft_steps))
    monkeypatch.setattr(tiles, "_PRUNE_FROM", prune_from)
    monkeypatch.setattr(tiles, "_COMPILE_FROM", 0)  # of GPUs
    recall_at_k_loss(unit(24, 4), torch.arange(24) // 4, engine=engine)
    assert taken == [way]


@pytest.mark.parametrize(
    ("on_cpu", "prune", "rows", "stops"),
    [
        (True, False, 2, [8, 12, 14, 17, 18, 20]),  # 8 x 6 elements, and what is too large is halved: 4 x 2 x 6, ...
        (True, True, 2, [8, 12, 16, 18, 19, 20]),  # at most 8 rows, since 8 x 6 elements are enough
        (True, True, 10, [10, 15, 17, 18, 19, 20]),  # and at least 10, unless 10 x 7 x 7 are too many
        (False, False, 2, [10, 12, 14, 15, 17, 18, 19, 20]),
        (False, True, 2, [10, 15, 17, 18, 19, 20]),
    ],
)
def test_sizes_of_tiles(
    on_cpu: bool, prune: bool, rows: int, stops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile holds its rows and, per positive, the whole database, or with pruning only the other positives."""
    for name, value in {"_CPU_TILE": 48, "_CPU_ROWS": rows, "_CPU_PAIRS": 84, "_GPU_PAIRS": 60}.items():
        monkeypatch.setattr(tiles, name, value)
    counts = [1] * 10 + [2, 2, 3, 3, 3, 4, 4, 5, 6, 7]
    found = list(Engine()._tiles(counts, 6, on_cpu, prune))
    assert [(part.start, part.stop) for part, _ in found] == list(zip([0, *stops], stops, strict=False))
    assert [width for _, width in found] == [counts[stop - 1] for stop in stops]
    assert [part.stop for part, _ in Engine(tile_size=7)._tiles(counts, 6, on_cpu, prune)] == [7, 14, 20]
    for name in ("_CPU_PAIRS", "_GPU_PAIRS"):
        monkeypatch.setattr(tiles, name, 0)
    assert [part.stop for part, _ in Engine()._tiles(counts, 6, on_cpu, prune)] == list(range(1, 21))  # a row at least


class _Watch(TorchDispatchMode):
    """Counts sigmoids and exponentials, and records the size of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sigmoids, self.exponentials, self.largest = 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel() if tensor.layout is torch.strided else 0)
        if "sigmoid" in func.__name__ and "backward" not in func.__name__:
            self.sigmoids += out.numel()
        self.exponentials += out.numel() if func.__name__.startswith("exp_") else 0
        return out


class _Subnormals(TorchDispatchMode):
    """Counts the subnormal numbers that operations return. Fresh memory must be filled: see `no_garbage`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not func.is_view:
                values = tensor if tensor.layout is torch.strided else tensor.values()
                tiny = (values != 0) & (values.abs() < torch.finfo(values.dtype).tiny)
                self.found[func.__name__] += int(tiny.sum())
        return out


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Fill fresh memory with nan instead of leaving its earlier contents."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("no_garbage")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    loss=st.sampled_from([RecallAtKLoss, SmoothAPLoss]),
    simix=st.sampled_from([None, SiMix()]),
    tail=st.sampled_from([None, None, LinearTail()]),
    sort_from=st.sampled_from([None, 0, math.inf]),
    per_class=st.sampled_from([2, 3, 6]),
    latent=st.sampled_from([1, 2, 4, 16]),
    shared=st.floats(0, 2),
    spread=st.floats(0, 4),
    length=st.sampled_from([1.0, 1.0, 30.0]),
    temperature=st.sampled_from([0.001, 0.01, 0.01, 0.1]),
    rank_temperature=st.sampled_from([0.01, 0.1, 1.0, 1.0, 5.0, 500.0, MedianRank()]),
)
def test_nothing_is_subnormal(
    loss, simix, tail, sort_from, per_class, latent, shared, spread, length, temperature, rank_temperature
) -> None:
    """Some processors are a hundred times slower for subnormal numbers. Any distribution of similarities avoids them.

    Without pruning, `sort_from` is None.
    """
    classes = 48 // per_class
    random = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, latent, generator=random).repeat_interleave(per_class, dim=0)
    vectors = centres + spread * torch.randn(centres.shape, generator=random)
    vectors = torch.cat((vectors, torch.full((len(vectors), 1), shared * latent**0.5 + 1e-3)), dim=1)
    embeddings = (length * torch.nn.functional.normalize(vectors)).requires_grad_()
    options = {"rank_temperature": rank_temperature} if loss is RecallAtKLoss else {}
    engine = Engine(prune=sort_from is not None)
    module = loss(similarity_temperature=temperature, simix=simix, tail=tail, engine=engine, **options)
    with pytest.MonkeyPatch.context() as patch, _Subnormals() as watch:
        patch.setattr(tiles, "_SORT_FROM", sort_from)
        module(embeddings, torch.arange(len(embeddings)) // per_class).backward()
    assert not +watch.found


def test_a_plain_sigmoid_gives_subnormals() -> None:
    """The control of the test above: similarities like these, without the cut."""
    similarities = unit(64, 8, dtype=torch.float32) @ unit(64, 8, dtype=torch.float32).T
    with _Subnormals() as watch:
        torch.sigmoid((similarities - similarities[:, :1]) / 0.01)
    assert watch.found["sigmoid.default"] > 0


@pytest.mark.parametrize("sort_from", [None, *BY_ROW.values()], ids=["not pruned", *BY_ROW])
@pytest.mark.parametrize("simix", [None, SiMix()], ids=str)
def test_nothing_larger_than_a_tile_exists(
    sort_from: float | None, simix: SiMix | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor has the size batch x positives x batch or batch x batch, with virtual examples or without."""
    monkeypatch.setattr(tiles, "_SORT_FROM", sort_from)
    classes, per_class, tile = 25, 4, 4
    embeddings = clusters(classes, per_class, 0.9, dimensions=8).requires_grad_()
    loss = RecallAtKLoss(simix=simix, engine=Engine(prune=sort_from is not None, tile_size=tile))
    with _Watch() as watch:
        loss(embeddings, torch.arange(len(embeddings)) // per_class).backward()
    items, positives = (len(embeddings), 3) if simix is None else (len(embeddings) * 10 // 4, 9)
    assert watch.largest <= tile * positives * items
    assert watch.largest < len(embeddings) ** 2


def test_large_classes_do_not_make_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positives are ranked among each other: with classes of 100, no tensor has the size queries x 100 x 100."""
    for name in ("_CPU_TILE", "_CPU_PAIRS"):
        monkeypatch.setattr(tiles, name, 2**17)
    with _Watch() as watch:
        value = recall_at_k_loss(unit(300, 4).requires_grad_(), torch.arange(300) // 100)
    assert value > 0
    assert watch.largest <= 2**18 < 300 * 100 * 100


def test_gradcheck() -> None:
    embeddings, labels = unit(9, 4, seed=5).requires_grad_(), torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 3])
    options = {"rank_temperature": 1.0, "similarity_temperature": 0.3}
    assert torch.autograd.gradcheck(lambda x: recall_at_k_loss(x, labels, (1, 2), **options), embeddings)
    assert torch.autograd.gradcheck(lambda x: smooth_ap_loss(x, labels, 0.3), embeddings)
    virtual = SiMix()(labels)
    assert torch.autograd.gradcheck(
        lambda x: recall_at_k_loss(x, labels, (1, 4), virtual=virtual, **options), embeddings
    )


def test_the_gradient_follows_the_chain_rule() -> None:
    embeddings, labels = unit(8, 4), torch.arange(8) // 2
    _, gradient = value_and_gradient(recall_at_k_loss, embeddings, labels)
    _, scaled = value_and_gradient(lambda x, y: (3 * recall_at_k_loss(x, y)) ** 2, embeddings, labels)
    value = recall_at_k_loss(embeddings, labels)
    torch.testing.assert_close(scaled, 18 * value * gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    half, labels = unit(24, 16, dtype=torch.float32).to(dtype), torch.arange(24) // 4
    want, want_gradient = value_and_gradient(recall_at_k_loss, half.float(), labels)
    value, gradient = value_and_gradient(recall_at_k_loss, half, labels)
    assert value.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(value, want, rtol=0, atol=0)
    torch.testing.assert_close(gradient, want_gradient.to(dtype), rtol=0, atol=0)


def test_autocast_and_fast_matmuls_do_not_reach_the_loss() -> None:
    embeddings, labels = unit(64, 16, dtype=torch.float32), torch.arange(64) // 4
    want = value_and_gradient(recall_at_k_loss, embeddings, labels)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = embeddings @ embeddings.T
            got = value_and_gradient(recall_at_k_loss, embeddings, labels)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert rounded.dtype == torch.bfloat16  # the control: autocast was on
    assert_same(got, want, 0)


@pytest.mark.parametrize("spread", STAGES.values())
def test_smooth_metrics_tend_to_the_exact_ones(spread: float) -> None:
    """As both temperatures go to 0, recall@k with |P| <= k and average precision become the exact metrics."""
    embeddings, labels = clusters(25, 4, spread), torch.arange(100) // 4
    exact = query_scores(embeddings, labels, k=(4, 10))
    smooth = [
        1 - recall_at_k_loss(embeddings, labels, k, rank_temperature=1e-2, similarity_temperature=1e-7) for k in (4, 10)
    ]
    halves = [1 - recall_at_k_loss_shifted(embeddings, labels, k) for k in (4, 10)]
    for index in range(2):
        assert smooth[index] <= exact.recall_at_k[:, index].double().mean() + 1e-9
        assert halves[index].item() == pytest.approx(exact.recall_at_k[:, index].double().mean().item(), abs=1e-6)
    precision = 1 - smooth_ap_loss(embeddings, labels, similarity_temperature=1e-7)
    assert precision.item() == pytest.approx(exact.average_precision.double().mean().item(), abs=1e-6)
    loose = 1 - smooth_ap_loss(embeddings, labels, similarity_temperature=0.5)
    assert abs(loose.item() - precision.item()) > 1e-3  # the control: a temperature matters


def recall_at_k_loss_shifted(embeddings: Tensor, labels: Tensor, k: int) -> Tensor:
    """Smooth recall with H(0) = 1 in the limit: ranks are whole, so k + 1/2 decides as k does, without the tie."""

    class Shifted(RecallHead):
        def __call__(self, ranks: Ranks) -> Tensor:
            return super().__call__(ranks._replace(overall=ranks.overall - 0.5))

    return ranking_loss(Shifted((k,), 1e-2), embeddings, labels, similarity_temperature=1e-7)


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], AbstractContextManager[None]], prune: bool) -> None:
    embeddings, labels = clusters(20, 4, 0.9).requires_grad_(), torch.arange(80) // 4
    want = recall_at_k_loss(embeddings, labels).detach()
    with mode():
        value = recall_at_k_loss(embeddings, labels, virtual=None, engine=Engine(prune=prune))
    assert not value.requires_grad
    torch.testing.assert_close(value.clone(), want)


def test_deterministic_algorithms() -> None:
    embeddings, labels = clusters(20, 4, 0.9), torch.arange(80) // 4
    want = value_and_gradient(recall_at_k_loss, embeddings, labels)
    torch.use_deterministic_algorithms(True)
    try:
        for prune in (True, False):
            assert_same(value_and_gradient(recall_at_k_loss, embeddings, labels, engine=Engine(prune=prune)), want)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_newer_precision_settings_of_torch(commands: Commands) -> None:
    """After its newer settings were used, torch refuses the older one. This needs a process of its own."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has only the older switch")
    code = """
import torch
from shortlist.ranking import RecallHead, ranking_loss

switches = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
for switch in switches:
    switch.fp32_precision = "tf32"
try:
    torch.get_float32_matmul_precision()
except RuntimeError:
    print("the older switch is refused")

class Watching(RecallHead):
    def __call__(self, ranks):
        print("inside", *(switch.fp32_precision for switch in switches))
        return super().__call__(ranks)

labels = torch.tensor([0, 0, 1, 1])
print(ranking_loss(Watching((1,), 1.0), torch.eye(4), labels, similarity_temperature=0.01).item() > 0)
print("after", *(switch.fp32_precision for switch in switches))
"""
    lines = ["the older switch is refused", "inside ieee ieee", "True", "after tf32 tf32"]
    assert commands.python(code).splitlines() == lines


def test_mixed_precisions_are_computed_in_the_wider_one() -> None:
    queries, database = unit(6, 4, dtype=torch.float32), unit(9, 4, seed=1)
    labels, loss = torch.arange(9) % 3, RecallAtKLoss(k=1)
    value = loss(queries, labels[:6], ref_emb=database, ref_labels=labels)
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, loss(queries.double(), labels[:6], ref_emb=database, ref_labels=labels))


def test_a_new_loss_is_a_head() -> None:
    """A head of three lines is enough for the mean rank of the positives with its gradient."""

    class MeanRank:
        def __call__(self, ranks: Ranks) -> Tensor:
            return (ranks.overall * ranks.present).sum(1) / ranks.number

        def reach(self, width: float) -> float:
            return math.inf

    embeddings, labels = unit(12, 4), torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    value, gradient = value_and_gradient(
        lambda x, y: ranking_loss(MeanRank(), x, y, similarity_temperature=0.1, engine=Engine(tile_size=5)),
        embeddings,
        labels,
    )
    leaf = embeddings.clone().requires_grad_()
    step, similarity = reference.sigmoid(0.1), leaf @ leaf.T
    means = [
        sum(reference.rank(similarity[q], x, database, step) for x in positives) / len(positives)
        for q, (database, positives) in enumerate(reference.databases(labels))
    ]
    want = torch.stack(means).mean()
    want.backward()
    assert leaf.grad is not None
    assert_same((value, gradient), (want.detach(), leaf.grad))


def test_one_large_class_among_small_ones() -> None:
    labels = torch.cat((torch.zeros(15, dtype=torch.long), torch.arange(1, 6).repeat_interleave(2)))
    embeddings = unit(25, 5)
    want = value_and_gradient(reference.recall_at_k_loss, embeddings, labels, (1, 4))
    assert_same(value_and_gradient(recall_at_k_loss, embeddings, labels, (1, 4)), want)


def test_very_long_vectors_and_tiny_temperatures_stay_finite() -> None:
    embeddings, labels = 1e4 * unit(20, 4, dtype=torch.float32), torch.arange(20) // 4
    for temperature in (1e-8, 1e8):
        value, gradient = value_and_gradient(recall_at_k_loss, embeddings, labels, similarity_temperature=temperature)
        assert value.isfinite()
        assert gradient.isfinite().all()


def test_losses_show_their_settings() -> None:
    shown = repr(RecallAtKLoss(k=(1, 2), simix=SiMix(), count_query=False))
    head = "RecallHead(k=(1, 2), rank_temperature=1.0)"
    assert shown == f"RecallAtKLoss(head={head}, similarity_temperature=0.01, simix=SiMix(), count_query=False)"


@pytest.mark.parametrize("size", range(120, 145))
def test_batches_of_about_the_size_from_which_positives_can_be_out_of_reach(size: int) -> None:
    embeddings, labels = torch.nn.functional.normalize(torch.randn(size, 8)), torch.arange(size) // 4
    found = [recall_at_k_loss(embeddings, labels, engine=Engine(prune=prune)) for prune in (True, False)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)

"""Invalid inputs of the losses and metrics, each with one error that names the cause, and valid edge cases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shortlist.ranking import (
    Engine,
    RecallAtKLoss,
    SiMix,
    SmoothAPLoss,
    VirtualBatch,
    query_scores,
    recall_at_k_loss,
    retrieval_metrics,
    smooth_ap_loss,
)

NAN, INF = float("nan"), float("inf")
EMBEDDINGS = nn.functional.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
LABELS = torch.tensor([0, 0, 0, 1, 1, 2])
PAIRS = (torch.tensor([0, 3]), torch.tensor([1, 4]), torch.tensor([0, 3]), torch.tensor([3, 0]))
VIRTUAL = VirtualBatch(torch.tensor([[0, 1], [3, 4]]), torch.tensor([0.3, 0.6]))

DOORS = {
    "recall_at_k_loss": recall_at_k_loss,
    "smooth_ap_loss": smooth_ap_loss,
    "RecallAtKLoss": RecallAtKLoss(),
    "SmoothAPLoss": SmoothAPLoss(),
    "query_scores": query_scores,
    "retrieval_metrics": retrieval_metrics,
}
DATABASES = {  # the same doors with another database, which must be as good
    "ref_emb": lambda vectors, labels: RecallAtKLoss()(EMBEDDINGS, LABELS, ref_emb=vectors, ref_labels=labels),
    "gallery": lambda vectors, labels: query_scores(EMBEDDINGS, LABELS, gallery=vectors, gallery_labels=labels),
}
EACH_LOSS = {
    "recall": RecallAtKLoss(),
    "recall and SiMix": RecallAtKLoss(simix=SiMix()),
    "recall with the query": RecallAtKLoss(count_query=True),
    "recall without pruning": RecallAtKLoss(engine=Engine(prune=False)),
    "smooth AP": SmoothAPLoss(),
    "smooth AP and SiMix": SmoothAPLoss(simix=SiMix()),
}
each_loss = pytest.mark.parametrize("loss", EACH_LOSS.values(), ids=EACH_LOSS.keys())


def assert_refused(error: type[Exception], match: str, use: Callable[..., object], *args: object, **kwargs: object):
    with pytest.raises(error, match=match):
        pytest.fail(f"no error like {match!r}, but {use(*args, **kwargs)}")


def with_row(row: int, value: float) -> Tensor:
    embeddings = EMBEDDINGS.clone()
    embeddings[row, 1] = value
    return embeddings


# Embeddings and labels


BAD_VECTORS = [
    (torch.randn(6), LABELS, ValueError, r"{what} must be a matrix .* got shape \(6,\)"),
    (torch.randn(6, 4, 1), LABELS, ValueError, r"{what} must be a matrix .* got shape \(6, 4, 1\)"),
    (torch.ones(6, 4, dtype=torch.long), LABELS, TypeError, r"{what} must be floating point, got torch.int64"),
    (torch.ones(6, 4, dtype=torch.complex64), LABELS, TypeError, r"{what} must be floating point, got torch.complex64"),
    (torch.ones(6, 0), LABELS, ValueError, r"{what} have no dimensions: shape \(6, 0\)"),
    (EMBEDDINGS, LABELS[:5], ValueError, r"6 {what} but 5 labels"),
    (EMBEDDINGS[:5], LABELS, ValueError, r"5 {what} but 6 labels"),
    (EMBEDDINGS, LABELS[:, None], ValueError, r"labels of {what} must be a vector.* got shape \(6, 1\)"),
    (EMBEDDINGS, LABELS[0], ValueError, r"labels of {what} must be a vector.* got shape \(\)"),
    (EMBEDDINGS, LABELS.float(), TypeError, r"labels of {what} must be integers, got torch.float32"),
    (EMBEDDINGS, LABELS > 0, TypeError, r"labels of {what} must be integers, got torch.bool"),
    (EMBEDDINGS, LABELS.to("meta"), ValueError, r"{what} are on cpu but their labels on meta"),
    (with_row(2, NAN), LABELS, ValueError, r"{what} hold nan or inf in 1 of 6 rows, first in row 2"),
    (with_row(4, INF), LABELS, ValueError, r"{what} hold nan or inf in 1 of 6 rows, first in row 4"),
    (with_row(0, -INF), LABELS, ValueError, r"{what} hold nan or inf in 1 of 6 rows, first in row 0"),
    (with_row(1, 1e30), LABELS, ValueError, r"{what} hold values .*overflow in 1 of 6 rows, first in row 1"),
    (with_row(5, 1.2e19), LABELS, ValueError, r"{what} hold values .*overflow in 1 of 6 rows, first in row 5"),
    (with_row(3, NAN).index_fill(0, torch.tensor(5), INF), LABELS, ValueError, r"in 2 of 6 rows, first in row 3"),
]


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS.keys())
def test_bad_embeddings_and_labels(door):
    for embeddings, labels, error, match in BAD_VECTORS:
        assert_refused(error, match.format(what="embeddings"), door, embeddings, labels)
    door(EMBEDDINGS, LABELS)  # valid input is accepted


@pytest.mark.parametrize("what", DATABASES)
def test_bad_database(what):
    for vectors, labels, error, match in BAD_VECTORS:
        assert_refused(error, match.format(what=what), DATABASES[what], vectors, labels)
    DATABASES[what](EMBEDDINGS, LABELS)


@pytest.mark.parametrize("what", DATABASES)
def test_a_database_that_does_not_match(what):
    with pytest.raises(ValueError, match="queries have 4 dimensions but the database 3"):
        DATABASES[what](EMBEDDINGS[:, :3], LABELS)
    with pytest.raises(ValueError, match=f"{what} and .* must be passed together"):
        DATABASES[what](EMBEDDINGS, None)
    with pytest.raises(ValueError, match=f"{what} and .* must be passed together"):
        DATABASES[what](None, LABELS)


@pytest.mark.parametrize("simix", [None, SiMix()])
@pytest.mark.parametrize("labels", [LABELS.float(), LABELS[:, None]])
def test_bad_labels_with_and_without_simix(simix, labels):
    with pytest.raises((TypeError, ValueError), match=r"labels .*must be"):
        RecallAtKLoss(simix=simix)(EMBEDDINGS, labels)


# Numbers


@pytest.mark.parametrize(
    "use",
    [
        RecallAtKLoss,
        partial(recall_at_k_loss, EMBEDDINGS, LABELS),
        partial(query_scores, EMBEDDINGS, LABELS),
        partial(retrieval_metrics, EMBEDDINGS, LABELS),
    ],
    ids=["RecallAtKLoss", "recall_at_k_loss", "query_scores", "retrieval_metrics"],
)
def test_bad_k(use):
    for k in (0, -3, 1.5, True, "4", None):
        for given in (k, (1, k)):
            assert_refused(ValueError, f"k must contain positive integers, got {k!r}$", use, k=given)
    assert_refused(ValueError, "k is empty", use, k=())
    use(k=(1, 2))


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("similarity_temperature", RecallAtKLoss),
        ("similarity_temperature", SmoothAPLoss),
        ("similarity_temperature", partial(recall_at_k_loss, EMBEDDINGS, LABELS)),
        ("similarity_temperature", partial(smooth_ap_loss, EMBEDDINGS, LABELS)),
        ("rank_temperature", RecallAtKLoss),
        ("rank_temperature", partial(recall_at_k_loss, EMBEDDINGS, LABELS)),
    ],
)
def test_bad_temperature(use, name):
    for value in (0, 0.0, -0.01, NAN, INF, -INF, True, "0.01", None):
        assert_refused(ValueError, f"{name} must be a finite number above 0, got {value!r}", use, **{name: value})
    use(**{name: 1})  # a whole number will do


@pytest.mark.parametrize(
    "use",
    [
        Engine,
        partial(query_scores, EMBEDDINGS, LABELS),
        partial(retrieval_metrics, EMBEDDINGS, LABELS),
        partial(query_scores, EMBEDDINGS, LABELS, gallery=EMBEDDINGS, gallery_labels=LABELS),
    ],
    ids=["Engine", "query_scores", "retrieval_metrics", "gallery"],
)
def test_bad_tile_size(use):
    for tile_size in (0, -1):
        assert_refused(ValueError, f"tile_size must be at least 1, got {tile_size}", use, tile_size=tile_size)
    use(tile_size=1)


# Mined pairs


@pytest.mark.parametrize("given", [{"ref_emb": EMBEDDINGS, "ref_labels": LABELS}, {"indices_tuple": PAIRS}])
def test_options_that_need_the_batch_as_database(given):
    with pytest.raises(ValueError, match="count_query needs the batch to be its own database"):
        RecallAtKLoss(count_query=True)(EMBEDDINGS, LABELS, **given)
    with pytest.raises(ValueError, match="count_query needs the batch to be its own database"):
        SmoothAPLoss(count_query=True)(EMBEDDINGS, LABELS, **given)
    for loss in (RecallAtKLoss(simix=SiMix()), SmoothAPLoss(simix=SiMix())):
        with pytest.raises(ValueError, match="SiMix needs the batch to be its own database"):
            loss(EMBEDDINGS, LABELS, **given)
    RecallAtKLoss()(EMBEDDINGS, LABELS, **given)


def test_a_tuple_is_triplets_or_pairs():
    for number in (0, 1, 2, 5):
        given = (PAIRS * 2)[:number]
        assert_refused(ValueError, f"3 tensors .* or 4 .*, got {number}", RecallAtKLoss(), EMBEDDINGS, LABELS, given)


@pytest.mark.parametrize(("position", "who"), [(0, "query"), (1, "database"), (2, "query"), (3, "database")])
def test_an_index_out_of_range(position, who):
    for index in (-1, 6, 2**40):
        pairs = [each.clone() for each in PAIRS]
        pairs[position][1] = index
        match = rf"indices_tuple contains a {who} index outside 0\.\.5"
        assert_refused(ValueError, match, RecallAtKLoss(), EMBEDDINGS, LABELS, tuple(pairs))


def test_indices_are_of_queries_and_database():
    """Each side has its own range: item 4 of the database exists, but query 4 does not."""
    queries = (EMBEDDINGS[:4], LABELS[:4])
    RecallAtKLoss()(*queries, (PAIRS[0], PAIRS[1], PAIRS[2], PAIRS[3]), EMBEDDINGS, LABELS)
    with pytest.raises(ValueError, match=r"indices_tuple contains a query index outside 0\.\.3"):
        RecallAtKLoss()(*queries, (PAIRS[1], PAIRS[0], PAIRS[2], PAIRS[3]), EMBEDDINGS, LABELS)


@pytest.mark.parametrize("size", [1, 2])
def test_mined_pairs_with_fewer_items_than_queries(size):
    anchors, item, nothing = torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([], dtype=torch.long)
    value = RecallAtKLoss(k=1)(EMBEDDINGS, LABELS, (anchors, item, nothing, nothing), EMBEDDINGS[:size], LABELS[:size])
    assert value == 0.5  # rank 1 of 1: sigmoid(0)


@pytest.mark.parametrize("anchors", [torch.tensor([0]), torch.tensor([0, 3, 4])])
def test_anchors_and_others_have_the_same_length(anchors):
    with pytest.raises(ValueError, match="indices_tuple"):
        RecallAtKLoss()(EMBEDDINGS, LABELS, (anchors, *PAIRS[1:]))


def test_indices_are_integers():
    with pytest.raises(TypeError, match="indices_tuple"):
        RecallAtKLoss()(EMBEDDINGS, LABELS, tuple(index + 0.5 for index in PAIRS))


# Virtual batches


@pytest.mark.parametrize("loss", [recall_at_k_loss, smooth_ap_loss])
def test_bad_virtual_batch(loss):
    for virtual, error, match in [
        (VIRTUAL._replace(pairs=torch.tensor([0, 1])), ValueError, r"pairs \(V, 2\) .* got \(2,\) and \(2,\)"),
        (VIRTUAL._replace(pairs=torch.zeros(2, 3).long()), ValueError, r"pairs \(V, 2\) .* got \(2, 3\) and \(2,\)"),
        (VIRTUAL._replace(alphas=torch.rand(3)), ValueError, r"alphas \(V,\), got \(2, 2\) and \(3,\)"),
        (VIRTUAL._replace(alphas=torch.rand(2, 1)), ValueError, r"alphas \(V,\), got \(2, 2\) and \(2, 1\)"),
        (
            VIRTUAL._replace(pairs=VIRTUAL.pairs.float()),
            TypeError,
            r"Virtual pairs must be integers, got torch.float32",
        ),
        (VIRTUAL._replace(pairs=torch.tensor([[0, 1], [3, 6]])), ValueError, r"outside the batch 0\.\.5"),
        (VIRTUAL._replace(pairs=torch.tensor([[0, -1], [3, 4]])), ValueError, r"outside the batch 0\.\.5"),
        (VIRTUAL._replace(pairs=torch.tensor([[0, 1], [2, 3]])), ValueError, r"Virtual pair 1 mixes two labels"),
        (VIRTUAL._replace(alphas=torch.tensor([0.5, 1.1])), ValueError, r"alphas must lie between 0 and 1"),
        (VIRTUAL._replace(alphas=torch.tensor([-0.1, 0.5])), ValueError, r"alphas must lie between 0 and 1"),
        (VIRTUAL._replace(alphas=torch.tensor([NAN, 0.5])), ValueError, r"alphas must lie between 0 and 1"),
        (VIRTUAL._replace(pairs=VIRTUAL.pairs.to("meta")), ValueError, r"on meta but the labels on cpu"),
        (VIRTUAL._replace(alphas=VIRTUAL.alphas.to("meta")), ValueError, r"on meta but the labels on cpu"),
    ]:
        assert_refused(error, match, loss, EMBEDDINGS, LABELS, virtual=virtual)
    loss(EMBEDDINGS, LABELS, virtual=VIRTUAL)


def test_virtual_pairs_of_any_integer():
    expected = recall_at_k_loss(EMBEDDINGS, LABELS, virtual=VIRTUAL)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        pairs = VIRTUAL.pairs.to(dtype)
        assert recall_at_k_loss(EMBEDDINGS, LABELS, virtual=VIRTUAL._replace(pairs=pairs)) == expected, dtype


# Edge cases that are fine


@each_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_no_positive_pair_gives_zero_and_no_gradient(loss, dtype):
    for number in (0, 1, 5):
        embeddings = torch.randn(number, 4).to(dtype).requires_grad_()
        value = loss(embeddings, torch.arange(number))
        value.backward()
        assert value == 0
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert embeddings.grad.shape == (number, 4)
        assert embeddings.grad.dtype == dtype
        assert not embeddings.grad.any()


@pytest.mark.parametrize("number", [0, 3])
def test_no_positive_in_the_database_gives_zero_and_no_gradient(number):
    queries, database = EMBEDDINGS.clone().requires_grad_(), torch.randn(number, 4, requires_grad=True)
    value = RecallAtKLoss()(queries, LABELS, ref_emb=database, ref_labels=torch.full((number,), 9))
    value.backward()
    assert value == 0
    assert not queries.grad.any()
    assert not database.grad.any()
    assert database.grad.shape == (number, 4)


INTEGERS = (torch.uint8, torch.uint16, torch.int8, torch.int32)
NAMES = ((-3, -2, -1), (-(2**63), 2**63 - 1, 0), (2**40, 2**41, 2**42))


def seeded(loss: nn.Module, labels: Tensor) -> float:
    torch.manual_seed(0)  # of SiMix
    return loss(EMBEDDINGS, labels).item()


@each_loss
def test_labels_of_a_loss_are_integers_of_any_kind(loss):
    expected = seeded(loss, LABELS)
    assert expected > 0
    for dtype in INTEGERS:
        assert seeded(loss, LABELS.to(dtype)) == expected, dtype
    for names in NAMES:
        assert seeded(loss, torch.tensor(names)[LABELS]) == pytest.approx(expected), names


def test_labels_of_the_metrics_are_integers_of_any_kind():
    expected = retrieval_metrics(EMBEDDINGS, LABELS)
    for dtype in INTEGERS:
        assert retrieval_metrics(EMBEDDINGS, LABELS.to(dtype)) == expected, dtype
    for names in NAMES:
        assert retrieval_metrics(EMBEDDINGS, torch.tensor(names)[LABELS]) == pytest.approx(expected), names


# The second derivative


@each_loss
def test_the_second_derivative_is_refused(loss):
    embeddings = EMBEDDINGS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(embeddings, LABELS), embeddings, create_graph=True)
    with pytest.raises(RuntimeError, match="A ranking loss can be differentiated only once"):
        gradient.pow(2).sum().backward()


@pytest.mark.parametrize("share", [1.0, 1e-6])
def test_the_second_derivative_of_a_sum_behind_a_model_is_refused(share):
    """Autograd could differentiate the other terms, and zeros in place of ours would go unnoticed."""
    model = nn.Linear(4, 3)
    inputs = EMBEDDINGS.clone().requires_grad_()
    outputs = model(inputs).tanh()
    total = share * RecallAtKLoss()(outputs, LABELS) ** 2 + outputs.pow(3).sum()
    gradients = torch.autograd.grad(total, [inputs, *model.parameters()], create_graph=True)
    with pytest.raises(RuntimeError, match="A ranking loss can be differentiated only once"):
        sum(gradient.pow(2).sum() for gradient in gradients).backward()


def test_the_second_derivative_for_a_database_is_refused():
    database = EMBEDDINGS.clone().requires_grad_()
    value = RecallAtKLoss()(EMBEDDINGS, LABELS, ref_emb=database, ref_labels=LABELS)
    (gradient,) = torch.autograd.grad(value, database, create_graph=True)
    with pytest.raises(RuntimeError, match="A ranking loss can be differentiated only once"):
        torch.autograd.grad(gradient.sum(), database)


@each_loss
def test_an_unused_graph_of_the_gradient_changes_nothing(loss):
    def gradient(factor: float, create_graph: bool) -> Tensor:
        torch.manual_seed(0)  # of SiMix
        embeddings = EMBEDDINGS.clone().requires_grad_()
        return torch.autograd.grad(factor * loss(embeddings, LABELS), embeddings, create_graph=create_graph)[0]

    assert gradient(1, False).any()
    assert torch.equal(gradient(4, True), gradient(4, False))
    assert torch.equal(gradient(4, False), 4 * gradient(1, False))


# Not tensors


@pytest.mark.parametrize(("embeddings", "labels"), [([[1.0]], LABELS), (EMBEDDINGS, None), (EMBEDDINGS, [0] * 6)])
def test_only_tensors(embeddings, labels):
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor, got (list|NoneType)"):
        RecallAtKLoss()(embeddings, labels)


TRANSFORMS = {
    "grad": lambda function: torch.func.grad(function)(EMBEDDINGS),
    "hessian": lambda function: torch.func.hessian(function)(EMBEDDINGS),
    "jacfwd": lambda function: torch.func.jacfwd(function)(EMBEDDINGS),
    "jacrev": lambda function: torch.func.jacrev(function)(EMBEDDINGS),
    "jvp": lambda function: torch.func.jvp(function, (EMBEDDINGS,), (EMBEDDINGS,)),
    "vjp": lambda function: torch.func.vjp(function, EMBEDDINGS),
    "vmap": lambda function: torch.func.vmap(function)(EMBEDDINGS[None]),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # which torch itself uses for jvp
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("door", ["recall_at_k_loss", "SmoothAPLoss", "retrieval_metrics"])
def test_transforms_of_torch_func_are_refused(door, transform):
    with pytest.raises(TypeError, match=r"are inside a transform of torch\.func, which ranking losses and metrics do"):
        TRANSFORMS[transform](lambda vectors: DOORS[door](vectors, LABELS))


def test_numpy_numbers_are_accepted():
    value = recall_at_k_loss(EMBEDDINGS, LABELS, [np.int64(1), np.uint8(2)], np.float32(1), np.float64(0.01))
    assert value == recall_at_k_loss(EMBEDDINGS, LABELS, (1, 2))

"""Items with several labels: positives share any of them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from shortlist.ranking import SiMix, VirtualBatch, query_scores, recall_at_k_loss, smooth_ap_loss
from shortlist.ranking.calibration import calibration_loss
from tests import reference, reference_metrics

K = (1, 2, 4)


def label_sets(number: int, seed: int, classes: int = 6) -> list[set[int]]:
    """One to three labels per item; the last item shares none."""
    drawn = random.Random(seed)
    return [set(drawn.sample(range(classes), drawn.randint(1, 3))) for _ in range(number - 1)] + [{classes}]


def padded(sets: list[set[int]], width: int = 4) -> Tensor:
    return torch.tensor([[*sorted(each), *[-1] * (width - len(each))] for each in sets])


def vectors(number: int, seed: int) -> Tensor:
    return normalize(torch.randn(number, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count_query", [False, True])
def test_loss_and_gradient_are_those_of_the_reference(seed: int, count_query: bool) -> None:
    sets, found, expected = label_sets(9, seed), vectors(9, seed).requires_grad_(), vectors(9, seed).requires_grad_()
    loss = recall_at_k_loss(found, padded(sets), K, count_query=count_query)
    literal = reference.recall_at_k_loss(expected, sets, K, count_query=count_query)
    torch.testing.assert_close(loss, literal)
    torch.testing.assert_close(*torch.autograd.grad(loss, found), *torch.autograd.grad(literal, expected))
    primary = torch.tensor([min(each) for each in sets])
    assert loss.item() != pytest.approx(recall_at_k_loss(found, primary, K, count_query=count_query).item())


def test_other_losses() -> None:
    sets, points = label_sets(8, 1), vectors(8, 1)
    torch.testing.assert_close(smooth_ap_loss(points, padded(sets)), reference.smooth_ap_loss(points, sets))
    torch.testing.assert_close(calibration_loss(points, padded(sets)), reference.calibration_loss(points, sets))


@pytest.mark.parametrize("seed", range(3))
def test_simix_mixes_pairs_that_share_a_label(seed: int) -> None:
    """A virtual example has the labels that both of its items have."""
    sets, points = label_sets(7, seed), vectors(7, seed)
    virtual = SiMix()(padded(sets))
    expected = [[x, z] for x in range(7) for z in range(x + 1, 7) if sets[x] & sets[z]]
    assert sorted(virtual.pairs.tolist()) == expected
    alphas = virtual.alphas.double()
    built, _ = reference.with_virtual(points, torch.zeros(7, dtype=torch.int64), virtual.pairs, alphas)
    literal = reference.recall_at_k_loss(built, reference.label_sets_with_virtual(sets, virtual.pairs), K)
    found = recall_at_k_loss(points, padded(sets), K, virtual=VirtualBatch(virtual.pairs, alphas))
    torch.testing.assert_close(found, literal)


@pytest.mark.parametrize("seed", range(3))
def test_metrics_are_those_of_the_definitions(seed: int) -> None:
    sets, gallery_sets = label_sets(10, seed), label_sets(12, seed + 10)
    points, gallery = vectors(10, seed), vectors(12, seed + 10)
    for options, others in (
        ({}, ()),
        ({"gallery": gallery, "gallery_labels": padded(gallery_sets, 3)}, (gallery, gallery_sets)),
    ):
        found = query_scores(points, padded(sets), K, **options)
        literal = [each.tolist() if isinstance(each, Tensor) else each for each in others]
        expected = reference_metrics.rankings(points.tolist(), sets, *literal)
        assert found.queries.tolist() == list(expected)
        for place, database in enumerate(expected.values()):
            assert found.r_at_k[place].tolist() == [reference_metrics.r_at_k(database, cut) for cut in K]
            assert found.average_precision[place].item() == pytest.approx(reference_metrics.average_precision(database))
            assert found.map_at_r[place].item() == pytest.approx(reference_metrics.map_at_r(database))


def test_one_label_each_is_the_same_as_labels_of_one_dimension() -> None:
    labels, points = torch.tensor([0, 0, 1, 1, 1, 2]), vectors(6, 0)
    with_padding = torch.stack((labels, torch.full_like(labels, -1)), dim=1)
    torch.testing.assert_close(recall_at_k_loss(points, with_padding, K), recall_at_k_loss(points, labels, K))
    one, other = (query_scores(points, each, K) for each in (with_padding, labels))
    for column, expected in zip(one, other, strict=True):
        torch.testing.assert_close(column, expected)


def test_a_one_hot_matrix_is_not_taken_for_labels() -> None:
    one_hot = torch.nn.functional.one_hot(torch.tensor([0, 0, 1, 2]))
    with pytest.raises(ValueError, match=r"row 0 repeats one; of a one-hot matrix, use argmax"):
        recall_at_k_loss(vectors(4, 0), one_hot, K)


def test_virtual_pairs_must_share_a_label() -> None:
    labels, points = padded(label_sets(6, 0)), vectors(6, 0).float()
    with pytest.raises(ValueError, match="Virtual pair 0 mixes two labels"):
        recall_at_k_loss(points, labels, K, virtual=VirtualBatch(torch.tensor([[0, 5]]), torch.tensor([0.5])))

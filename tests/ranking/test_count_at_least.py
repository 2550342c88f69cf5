"""Fast counting of values that reach a threshold, compared with counting one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.ranking import count_at_least as module
from shortlist.ranking.count_at_least import count_at_least


def counted(values: Tensor, thresholds: Tensor) -> list[list[int]]:
    return [
        [sum(v >= threshold for v in row) for threshold in levels]
        for row, levels in zip(values.tolist(), thresholds.tolist(), strict=True)
    ]


WAYS = {
    "compared": (10**9, 10**9),
    "searched": (-1, 10**9),
    "bucketed": (-1, 0),
}  # largest number of thresholds, smallest of values


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose(monkeypatch, request.param)
    return request.param


def choose(patch: pytest.MonkeyPatch, way: str) -> None:
    names = "_FEW_THRESHOLDS", "_FEW_THRESHOLDS_IN_LONG_ROW", "_LONG_ROW"
    for name, value in zip(names, (WAYS[way][0], *WAYS[way]), strict=True):
        patch.setattr(module, name, value)


NUMBERS = st.sampled_from([-torch.inf, -3e38, -2.0, -1e-45, 0.0, 1e-45, 0.25, 1.0, 1 + 2**-23, 2.0, 1e30, 3e38])


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(WAYS)), st.sampled_from([torch.float32, torch.float64]))
def test_every_way_counts(data: st.DataObject, way: str, dtype: torch.dtype) -> None:
    """Ties, equal thresholds, neighbours in floating point, huge and infinite numbers, padding."""
    rows, number, width = (data.draw(st.integers(low, 6)) for low in (1, 0, 1))

    def table(columns: int, numbers: st.SearchStrategy[float]) -> Tensor:
        row = st.lists(numbers, min_size=columns, max_size=columns)
        cells = data.draw(st.lists(row, min_size=rows, max_size=rows))
        return torch.tensor(cells, dtype=dtype).view(rows, columns)

    finite = NUMBERS.filter(lambda x: x > -torch.inf)
    values, thresholds = table(number, NUMBERS), table(width, finite | st.just(torch.inf))
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, way)
        assert count_at_least(values, thresholds).tolist() == counted(values, thresholds)


@pytest.mark.parametrize("spread", [0.0, 1e-7, 1e-3, 0.1], ids=["one point", "rounding", "near", "wide"])
def test_many_values(way: str, spread: float) -> None:
    random = torch.Generator().manual_seed(0)
    values = 0.5 + spread * torch.randn(5, 9000, generator=random)
    thresholds = 0.5 + spread * torch.randn(5, 70, generator=random)
    thresholds[2, 40:] = torch.inf
    thresholds[3, 0] = -7  # far from all others: the buckets are coarse
    found = count_at_least(values, thresholds)
    assert torch.equal(found, (values[:, None] >= thresholds[:, :, None]).sum(2))
    if spread:
        assert found.float().std() > 100


def test_the_way_is_chosen_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    names = ["_count_by_comparison", "_histogram_by_search", "_histogram_by_buckets"]
    for name in names:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, name=name, real=real: taken.append(name) or real(*x))
    for number, width in ((9000, 2), (500, 60), (9000, 60)):
        count_at_least(torch.randn(2, number), torch.randn(2, width))
    assert taken == names

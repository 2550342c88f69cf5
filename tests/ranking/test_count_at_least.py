"""Counting what reaches a bar, against counting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.ranking import reaching
from shortlist.ranking.count_at_least import count_at_least


def counted(values: Tensor, bars: Tensor) -> list[list[int]]:
    return [
        [sum(v >= bar for v in row) for bar in levels]
        for row, levels in zip(values.tolist(), bars.tolist(), strict=True)
    ]


WAYS = {"compared": (10**9, 10**9), "searched": (-1, 10**9), "bucketed": (-1, 0)}  # up to few bars, from many values


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose(monkeypatch, request.param)
    return request.param


def choose(patch: pytest.MonkeyPatch, way: str) -> None:
    for name, value in zip(("_FEW", "_FEW_OF_MANY", "_MANY"), (WAYS[way][0], *WAYS[way]), strict=True):
        patch.setattr(reaching, name, value)


NUMBERS = st.sampled_from([-torch.inf, -3e38, -2.0, -1e-45, 0.0, 1e-45, 0.25, 1.0, 1 + 2**-23, 2.0, 1e30, 3e38])


@settings(max_examples=120, deadline=None)
@given(st.data(), st.sampled_from(sorted(WAYS)), st.sampled_from([torch.float32, torch.float64]))
def test_every_way_counts(data: st.DataObject, way: str, dtype: torch.dtype) -> None:
    """Ties, equal bars, neighbours in floating point, huge and infinite numbers, padding."""
    rows, number, width = (data.draw(st.integers(low, 6)) for low in (1, 0, 1))

    def table(columns: int, numbers: st.SearchStrategy[float]) -> Tensor:
        row = st.lists(numbers, min_size=columns, max_size=columns)
        cells = data.draw(st.lists(row, min_size=rows, max_size=rows))
        return torch.tensor(cells, dtype=dtype).view(rows, columns)

    values, bars = table(number, NUMBERS), table(width, NUMBERS.filter(lambda x: x > -torch.inf) | st.just(torch.inf))
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, way)
        assert count_at_least(values, bars).tolist() == counted(values, bars)


@pytest.mark.parametrize("spread", [0.0, 1e-7, 1e-3, 0.1], ids=["one point", "rounding", "near", "wide"])
def test_of_many(way: str, spread: float) -> None:
    random = torch.Generator().manual_seed(0)
    values = 0.5 + spread * torch.randn(5, 9000, generator=random)
    bars = 0.5 + spread * torch.randn(5, 70, generator=random)
    bars[2, 40:] = torch.inf
    bars[3, 0] = -7  # far from all others: the buckets are coarse
    found = count_at_least(values, bars)
    assert torch.equal(found, (values[:, None] >= bars[:, :, None]).sum(2))
    if spread:
        assert found.float().std() > 100


def test_the_way_is_chosen_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("_compared", "_searched", "_bucketed"):
        real = getattr(reaching, name)
        monkeypatch.setattr(reaching, name, lambda *x, name=name, real=real: taken.append(name) or real(*x))
    for number, width in ((9000, 2), (500, 60), (9000, 60)):
        count_at_least(torch.randn(2, number), torch.randn(2, width))
    assert taken == ["_compared", "_searched", "_bucketed"]

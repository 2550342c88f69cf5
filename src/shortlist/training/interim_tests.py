"""Tests during training (`evaluation.test_every`): the last and the best result, which is not used for selection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shortlist.evaluation import Evaluation

INTERIM_TEST = "test during training"  # kind of the records


def with_interim_tests(evaluations: Sequence[Evaluation], records: Sequence[dict[str, Any]]) -> list[Evaluation]:
    """Add a remark on the last and the best test to each evaluation of images that were tested during training.

    Args:
        evaluations: Evaluations of the trained embedder.
        records: All records of the run.
    """
    return [_with_interim_remark(each, records) for each in evaluations]


def _with_interim_remark(evaluation: Evaluation, records: Sequence[dict[str, Any]]) -> Evaluation:
    tests: list[tuple[int, Mapping[str, float]]] = [
        (record["epoch"], record)
        for record in records
        if record["kind"] == INTERIM_TEST and record["data"] == evaluation.data
    ]
    if not tests:
        return evaluation
    if not any(record["kind"] == "validation" for record in records):  # the trained embedder is that of the last epoch
        tests.append((max(record["epoch"] for record in records if record["kind"] == "step"), evaluation.values))
    names = list(evaluation.headline)
    best = max(tests, key=lambda test: test[1][names[0]])  # the first, if several are equal

    def described(test: tuple[int, Mapping[str, float]]) -> str:
        return f"{', '.join(f'{name} {100 * test[1][name]:.1f}' for name in names)} (epoch {test[0]})"

    remark = (
        f"last of {len(tests)} tests during training: {described(tests[-1])}; best by {names[0]}: {described(best)}. "
        "The best is chosen on the test images, for comparison with the authors' release; it did not select this model."
    )
    return replace(evaluation, remarks=(*evaluation.remarks, remark))

"""Runs against each other on the same queries: whether one is really better, or was lucky with the test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shortlist.config import CONFIG_KEYS
from shortlist.data import Catalog
from shortlist.errors import ConfigError, RunError, translate_arguments
from shortlist.evaluation.intervals import RESAMPLES, Difference, paired_differences
from shortlist.evaluation.protocols import QueryTable, score_queries
from shortlist.progress import Display, default_display
from shortlist.report.opening import Tested, open_finished, open_test
from shortlist.training.datasets import open_eval_sets, open_run_images

FEW_QUERIES = 30  # of fewer, intervals of a bootstrap are too narrow: three that agree would be certain


@dataclass(frozen=True, eq=False)
class ComparedTest:
    """One test that all runs took.

    Args:
        tested: by run, the images and their vectors; the first is what others are compared with.
        queries: by metric, how many queries stand behind it.
        means: by run and metric.
        differences: by run (all but the first) and metric: the run - the first.
    """

    tested: dict[str, Tested]
    queries: dict[str, int]
    means: dict[str, dict[str, float]]
    differences: dict[str, dict[str, Difference]]

    @property
    def catalog(self) -> Catalog:
        return next(iter(self.tested.values())).catalog


@dataclass(frozen=True, eq=False)
class Comparison:
    """Several runs, by name, on the tests that they have in common."""

    runs: dict[str, Path]
    tests: list[ComparedTest]

    @property
    def first(self) -> str:
        """The run that the others are compared with."""
        return next(iter(self.runs))

    def verdicts(self) -> list[str]:
        """For each test and each run but the first, a sentence on the first metric."""
        return [
            f"{test.catalog.name}: {_verdict(self.first, run, test.queries, *next(iter(found.items())))}"
            for test in self.tests
            for run, found in test.differences.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        tests = [
            {
                "data": test.catalog.name,
                "queries": test.queries,
                "metrics": test.means,
                "differences": {
                    run: {name: {**asdict(each), "real": each.real} for name, each in found.items()}
                    for run, found in test.differences.items()
                },
            }
            for test in self.tests
        ]
        return {"runs": {name: str(path) for name, path in self.runs.items()}, "first": self.first, "tests": tests}


def _verdict(first: str, run: str, queries: dict[str, int], metric: str, found: Difference) -> str:
    value, _, interval = str(found).partition(" ")
    points = f"{metric} {value} points, 95 % interval {interval}, p {shown_p(found)}"
    if queries[metric] < FEW_QUERIES:
        points += f"; but {queries[metric]} queries are too few to rely on that"
    if found.real:
        return f"{run} is {'better' if found.value > 0 else 'worse'} than {first} ({points})"
    return f"the queries do not tell {run} from {first} ({points})"


def shown_p(found: Difference) -> str:
    """A p-value as text; the least that the resamples can show is a bound."""
    least = 2 / (RESAMPLES + 1)
    return f"< {1.01 * least:.4f}" if found.p <= least else f"{found.p:.4f}" if found.p < 0.01 else f"{found.p:.2f}"


def compare_runs(paths: Sequence[Path | str], display: Display | None = None) -> Comparison:
    """Measure finished runs on the same queries, each against the first by a paired bootstrap.

    Cut-offs are those of the first run. Tests that not all runs took, of the same images in the same order with the
    same labels, are left out.

    Raises:
        ConfigError: fewer than two runs, or one given twice.
        RunError: a run is not finished, its images have changed since, or the runs have no test in common.
    """
    display = display or default_display()
    runs = _named([Path(path) for path in paths])
    taken = {name: _tests(path, display) for name, path in runs.items()}
    first = next(iter(taken.values()))
    common = [key for key in first if all(key in tests for tests in taken.values())]
    if not common:
        each = "; ".join(f"{name}: {_listed(tests)}" for name, tests in taken.items())
        raise RunError(
            f"These runs were not tested on the same queries, so they cannot be compared ({each}). Test them on the "
            "same images: with the same data.source, data.split_seed and data.on_missing, or the same evaluation.tests."
        )
    return Comparison(runs, [_compared({name: tests[key] for name, tests in taken.items()}, display) for key in common])


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    """By the names of their folders or, where two are alike, by the paths as given."""
    if len(paths) < 2:
        raise ConfigError("To compare, give the folders of at least two runs.")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("A run is given twice: compare different ones.")
    names = [path.resolve().name for path in paths]
    return dict(zip(names if len(set(names)) == len(names) else map(str, paths), paths, strict=True))


@translate_arguments(CONFIG_KEYS)
def _tests(path: Path, display: Display) -> dict[str, Tested]:
    """By the fingerprint of what was tested."""
    folder, config, encoder = open_finished(path)
    eval_sets = open_eval_sets(config, display, lambda: open_run_images(config, display, folder).catalog)
    return {
        eval_set.catalog.fingerprint(): open_test(folder, config, encoder, eval_set, display) for eval_set in eval_sets
    }


def _listed(tests: dict[str, Tested]) -> str:
    named = [f"{len(each.catalog):,} images of {each.catalog.name}, {key[:12]}" for key, each in tests.items()]
    return " and ".join(named) or "none"


def _compared(tested: dict[str, Tested], display: Display) -> ComparedTest:
    (_, first), *_ = tested.items()
    tables: dict[str, dict[str, QueryTable]] = {}
    for name, each in tested.items():
        with display.task(f"ranking {first.catalog.name} for {name}") as progress:
            tables[name] = score_queries(each.vectors, each.catalog, first.k, progress=progress)
    (start, reference), *others = tables.items()
    setups = [setup for setup, table in reference.items() if len(table.queries)]
    queries = {metric: len(reference[setup].queries) for setup in setups for metric in reference[setup].names}
    means = {
        run: {
            metric: value
            for setup in setups
            for metric, value in zip(found[setup].names, found[setup].values.double().mean(0).tolist(), strict=True)
        }
        for run, found in tables.items()
    }
    differences: dict[str, dict[str, Difference]] = {run: {} for run, _ in others}
    for run, found in others:
        with display.task(f"comparing {run} with {start}"):
            for setup in setups:
                one, other = reference[setup], found[setup]
                differences[run] |= paired_differences(one.names, one.values, other.values)
    return ComparedTest(tested, queries, means, differences)

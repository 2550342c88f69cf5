"""Comparison of groups of runs. The runs of a group differ in their seed; runs of two groups are paired by seed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from shortlist.errors import ConfigError
from shortlist.evaluation.intervals import Difference, group_differences
from shortlist.evaluation.protocols import QueryTable
from shortlist.progress import Display, default_display
from shortlist.report.analysis import EmbeddedTest
from shortlist.report.comparison import (
    ComparedTest,
    Comparison,
    count_queries,
    find_runs,
    mean_scores,
    open_common_tests,
    score_runs,
)
from shortlist.training import RunFolder

Groups = dict[str, dict[int, Path]]  # folders of runs by group and seed


def compare_groups(groups: Sequence[Sequence[Path | str]], display: Display | None = None) -> Comparison:
    """Compare groups of finished runs with the first group on the same queries, paired by seed and by query.

    See `group_differences` for the bootstrap: it draws classes (queries for judged tests) and, independently, seeds.

    Args:
        groups: For each group the folders of its runs, or glob patterns that match them.
        display: Shows the progress.

    Raises:
        ConfigError: Fewer than two groups, the same run twice, or groups that do not have the same seeds.
        RunError: A run is not finished, its images have changed, or the runs have no test in common.
    """
    display = display or default_display()
    if len(groups) < 2:
        raise ConfigError("To compare groups, give the folders of at least two groups of runs.")
    found = [find_runs(group) for group in groups]
    folders = [path.resolve() for group in found for path in group]
    if len(set(folders)) < len(folders):
        raise ConfigError("The same run is given twice: give different runs.")
    by_seed = {name: _by_seed(name, runs) for name, runs in zip(name_groups(found), found, strict=True)}
    _check_same_seeds(by_seed)
    runs = {_run_name(group, seed): path for group, paths in by_seed.items() for seed, path in paths.items()}
    tests = [_compare_test(by_seed, tests, display) for tests in open_common_tests(runs, display)]
    return Comparison(runs, tests, by_seed)


def name_groups(groups: Sequence[Sequence[Path]]) -> list[str]:
    """Name each group by the common prefix and suffix of its paths, with a * in between.

    Example:
        >>> name_groups([[Path("runs/rsk-0"), Path("runs/rsk-1")], [Path("runs/sap-0"), Path("runs/sap-1")]])
        ['rsk-*', 'sap-*']
    """
    resolved = [[path.resolve() for path in group] for group in groups]
    parent = os.path.commonpath([path.parent for group in resolved for path in group])
    names = [_pattern([str(path.relative_to(parent)) for path in group]) for group in resolved]
    return names if len(set(names)) == len(names) else [f"group {number}" for number in range(1, len(names) + 1)]


def _pattern(paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    start = os.path.commonprefix(paths)  # noqa: RUF071 - of characters
    end = os.path.commonprefix([path[len(start) :][::-1] for path in paths])[::-1]  # noqa: RUF071
    return f"{start}*{end}"


def _run_name(group: str, seed: int) -> str:
    return f"{group}, seed {seed}"


def _by_seed(name: str, paths: Sequence[Path]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for path in paths:
        seed = RunFolder.open(path).config().training.seed
        if seed in found:
            raise ConfigError(
                f"{found[seed]} and {path} in the group {name} have the same training.seed, {seed}. Give runs that "
                "differ in their seed only, or compare them as single runs."
            )
        found[seed] = path
    return dict(sorted(found.items()))


def _check_same_seeds(groups: Groups) -> None:
    for name, runs in groups.items():
        for other, others in groups.items():
            missing = ", ".join(str(seed) for seed in others if seed not in runs)
            if missing:
                raise ConfigError(
                    f"The group {name} has no run with seed {missing}, but {other} has: runs are paired by seed, so "
                    "all groups need the same seeds."
                )


def _compare_test(groups: Groups, tests: dict[str, EmbeddedTest], display: Display) -> ComparedTest:
    """Compare the groups on one test, given by run."""
    first, *others = groups
    scores = score_runs(tests, display)
    by_group = {
        group: {seed: scores[_run_name(group, seed)] for seed in paths} for group, paths in groups.items()
    }  # tables by group, seed and setup
    differences: dict[str, dict[str, Difference]] = {group: {} for group in others}
    catalog = next(iter(tests.values())).catalog
    for group in others:
        with display.task(f"comparing {group} with {first}"):
            for setup, table in next(iter(scores.values())).items():
                rows = table.queries if catalog.judgements else catalog.labels[table.queries]
                one, other = (_stack(by_group[name], setup) for name in (first, group))
                differences[group] |= group_differences(table.names, one, other, torch.from_numpy(rows.copy()))
    seeds = {group: {seed: mean_scores(each) for seed, each in runs.items()} for group, runs in by_group.items()}
    means = {
        group: {metric: sum(each[metric] for each in runs.values()) / len(runs) for metric in next(iter(runs.values()))}
        for group, runs in seeds.items()
    }
    shown = {group: tests[_run_name(group, next(iter(paths)))] for group, paths in groups.items()}
    return ComparedTest(shown, count_queries(next(iter(scores.values()))), means, differences, seeds)


def _stack(runs: dict[int, dict[str, QueryTable]], setup: str) -> torch.Tensor:
    """Return the scores of a group, (seeds, queries, metrics)."""
    return torch.stack([tables[setup].values.double().cpu() for tables in runs.values()])

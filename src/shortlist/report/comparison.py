"""Comparison of runs, or galleries, on the same queries: statistics by a paired bootstrap, and an HTML page."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.config import CONFIG_KEYS
from shortlist.data import Catalog
from shortlist.encoding.pretrained import is_pretrained, is_timm
from shortlist.errors import ConfigError, RunError, translate_arguments
from shortlist.evaluation.intervals import RESAMPLES, Difference, paired_differences
from shortlist.evaluation.protocols import QueryTable, score_queries
from shortlist.files import check_writable
from shortlist.progress import Display, default_display
from shortlist.report.analysis import Analysis, EmbeddedTest, analyse, open_finished_run, open_test
from shortlist.report.pages import QueryBrowser, Thumbnails, browse_queries, write_page
from shortlist.report.paper_tables import error_reduction
from shortlist.training import RunFolder, open_encoder
from shortlist.training.datasets import open_eval_sets, open_run_images
from shortlist.training.folder import ImagesChangedError
from shortlist.training.run_evaluation import embed_test, no_test_images

MIN_QUERIES = 30  # with fewer, bootstrap intervals are too narrow: three queries that agree have an interval of width 0
OWN_QUERIES = (
    "The queries are the labelled images of the galleries. A model looks better than it is on images that it was "
    "trained on: to compare the models on new images, use --queries"
)
GROUP_SIZE = 12  # queries per group in the page


@dataclass(frozen=True, eq=False)
class ComparedTest:
    """A test that all runs have in common. If groups of runs are compared, "run" means a group of runs.

    Args:
        runs: The images and their vectors by run (for a group, those of its first seed). The other runs are compared
            with the first.
        queries: Number of queries by metric.
        means: Mean over the queries (and seeds) by run and metric.
        differences: Difference from the first run, by run (without the first) and metric.
        seeds: Mean over the queries by group, seed and metric; empty if single runs are compared.
    """

    runs: dict[str, EmbeddedTest]
    queries: dict[str, int]
    means: dict[str, dict[str, float]]
    differences: dict[str, dict[str, Difference]]
    seeds: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)

    @property
    def catalog(self) -> Catalog:
        """The images of the test."""
        return next(iter(self.runs.values())).catalog

    def error_reduction(self, run: str, metric: str) -> float | None:
        """Relative reduction of the error of the first run in %; None if it has none."""
        return error_reduction(100 * self.means[run][metric], 100 * next(iter(self.means.values()))[metric])

    @property
    def reach(self) -> float:
        """Largest absolute bound of an interval, or 1 if all are 0."""
        return max(max(abs(d.low), abs(d.high)) for each in self.differences.values() for d in each.values()) or 1


@dataclass(frozen=True, eq=False)
class Comparison:
    """Several runs, or galleries, by name, on the tests that they have in common.

    Args:
        runs: Folders of all runs by name.
        tests: The tests.
        groups: Folders of the runs by group and seed; empty if single runs are compared.
        noun: What is compared, in the singular and the plural.
        own_queries: Whether the queries are images of the compared galleries themselves.
    """

    runs: dict[str, Path]
    tests: list[ComparedTest]
    groups: dict[str, dict[int, Path]] = field(default_factory=dict)
    noun: tuple[str, str] = ("run", "runs")
    own_queries: bool = False

    @property
    def names(self) -> list[str]:
        """Names of the compared groups or runs."""
        return list(self.groups or self.runs)

    @property
    def first(self) -> str:
        """Name of the run or group that the others are compared with."""
        return self.names[0]

    def verdicts(self) -> list[str]:
        """Return a sentence about the first metric for each test and each run but the first."""
        return [
            f"{test.catalog.name}: {_verdict(self.first, run, test, *next(iter(differences.items())))}"
            for test in self.tests
            for run, differences in test.differences.items()
        ]

    def remarks(self) -> list[str]:
        """Return sentences that help to interpret the results: on the queries, and on the pooling of timm models."""
        return [OWN_QUERIES] * self.own_queries + [
            f"{name} pools its features as usual for this timm model (average, or the class token). The baseline that "
            "training is compared with, the pretrained backbone alone, has the pooling of the run"
            for name, path in self.runs.items()
            if is_timm(str(path))
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON data."""
        tests = [
            {
                "data": test.catalog.name,
                "queries": test.queries,
                "metrics": test.means,
                "differences": {
                    run: {name: {**asdict(each), "significant": each.significant} for name, each in differences.items()}
                    for run, differences in test.differences.items()
                },
                **({"seeds": test.seeds} if test.seeds else {}),
            }
            for test in self.tests
        ]
        groups = {name: {seed: str(path) for seed, path in runs.items()} for name, runs in self.groups.items()}
        runs = {name: str(path) for name, path in self.runs.items()}
        facts = {"groups": groups, "remarks": self.remarks()}
        shown = {name: value for name, value in facts.items() if value}
        return {"runs": runs, **shown, "first": self.first, "tests": tests}


def _verdict(first: str, run: str, test: ComparedTest, metric: str, difference: Difference) -> str:
    value, _, interval = str(difference).partition(" ")
    details = f"{metric} {value} points, 95 % interval {interval}, p {format_p(difference)}"
    if test.seeds:
        number = len(test.seeds[run])
        details += f", {number} seed{'s' if number > 1 else ''}"
    if test.queries[metric] < MIN_QUERIES:
        details += f"; but {test.queries[metric]} queries are too few for a reliable interval"
    if difference.significant:
        return f"{run} is {'better' if difference.value > 0 else 'worse'} than {first} ({details})"
    return f"there is no significant difference between {run} and {first} ({details})"


def format_p(difference: Difference) -> str:
    """Format a p-value; the smallest value that the resamples can show is given as a bound."""
    p, smallest = difference.p, 2 / (RESAMPLES + 1)
    return f"< {1.01 * smallest:.4f}" if p <= smallest else f"{p:.4f}" if p < 0.01 else f"{p:.2f}"


def compare_runs(
    paths: Sequence[Path | str],
    display: Display | None = None,
    *,
    queries: Path | str | None = None,
    label_separator: str | None = None,
) -> Comparison:
    """Compare finished runs, or galleries, with the first one on the same queries, by a paired bootstrap.

    The cut-offs k are those of the first run. Tests that are not common to all runs (the same images in the same order
    with the same labels) are ignored.

    Args:
        paths: Folders of the runs, or glob patterns that match them. At least one is a run; others may be pretrained
            models, as in `open_encoder`, which are tested on its images. Or folders or names of galleries.
        display: Shows the progress.
        queries: Labelled images to search galleries with. None: each labelled image searches for the other images with
            its label.
        label_separator: Separator of several labels of an image in `queries`, a table.

    Raises:
        ConfigError: Fewer than two runs, the same run twice, or no run.
        RunError: A run is not finished, its images have changed, or the runs have no test in common.
    """
    display = display or default_display()
    if label_separator is not None and queries is None:
        raise ConfigError("`label_separator` is for tables that are given as `queries`.")
    runs = _name_runs(find_runs(paths))
    if _are_galleries(runs):
        from shortlist.report.gallery_tests import open_gallery_test  # needs the extra search

        opened = open_gallery_test(runs, queries, display, label_separator=label_separator)
        noun = ("gallery", "galleries")
        return Comparison(runs, [_compare_test(opened, display)], noun=noun, own_queries=queries is None)
    if queries is not None:
        raise ConfigError("`queries` are for galleries: runs are compared on the images that they were tested on.")
    return Comparison(runs, [_compare_test(tests, display) for tests in open_common_tests(runs, display)])


def _are_galleries(paths: Mapping[str, Path]) -> bool:
    found = {name: path.is_file() or (path / "gallery.json").is_file() for name, path in paths.items()}
    if any(found.values()) and not all(found.values()):
        other = next(name for name, each in found.items() if not each)
        raise ConfigError(f"{other} is not a gallery, but others are: compare either galleries or runs.")
    return all(found.values())


def find_runs(patterns: Sequence[Path | str]) -> list[Path]:
    """Return the folders of runs that are given by their paths or by glob patterns.

    Raises:
        RunError: A pattern matches no run.
    """
    found: list[Path] = []
    for pattern in map(str, patterns):
        matches = [Path(pattern)]
        if not matches[0].exists() and glob.escape(pattern) != pattern:
            paths = map(Path, sorted(glob.glob(pattern)))  # noqa: PTH207 - the pattern may be absolute
            matches = [path for path in paths if RunFolder(path).config_file.is_file()]
        if not matches:
            raise RunError(f"No folder of a run matches {pattern}.")
        found += matches
    return found


def open_common_tests(runs: Mapping[str, Path], display: Display) -> list[dict[str, EmbeddedTest]]:
    """Open the tests that all runs have in common, each by run.

    Raises:
        RunError: A run is not finished, its images have changed, or the runs have no test in common.
    """
    of_runs = {name: _open_tests(path, display) for name, path in runs.items() if not is_pretrained(path)}
    if not of_runs:
        raise no_test_images(_first_missing(runs), "give at least one run, on whose images the models are compared.")
    first = next(iter(of_runs.values()))
    tests_of = {
        name: of_runs[name] if name in of_runs else _embed_tests(path, first, display) for name, path in runs.items()
    }
    common = [key for key in first if all(key in tests for tests in tests_of.values())]
    if not common:
        listed = "; ".join(f"{name}: {_list_tests(tests)}" for name, tests in tests_of.items())
        raise RunError(
            f"These runs were not tested on the same queries, so they cannot be compared ({listed}). Test them on the "
            "same images: with the same data.source, data.split_seed and data.on_missing, or the same evaluation.tests."
        )
    return [{name: tests[key] for name, tests in tests_of.items()} for key in common]


def _first_missing(runs: Mapping[str, Path]) -> Path:
    """Return the first model that is neither a folder nor a timm model: probably a misspelled path of a run."""
    paths = list(runs.values())
    return next((path for path in paths if not is_timm(str(path)) and not path.exists()), paths[0])


def _name_runs(paths: Sequence[Path]) -> dict[str, Path]:
    """Name runs by their folders or, if two folders have the same name, by their paths."""
    if len(paths) < 2:
        raise ConfigError("To compare, give the folders of at least two runs.")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("The same run is given twice: give different runs.")
    names = [path.resolve().name for path in paths]
    return dict(zip(names if len(set(names)) == len(names) else map(str, paths), paths, strict=True))


@translate_arguments(CONFIG_KEYS)
def _open_tests(path: Path, display: Display) -> dict[str, EmbeddedTest]:
    """Open the tests of a run by the fingerprint of their images."""
    folder, config, encoder = open_finished_run(path)
    try:
        eval_sets = open_eval_sets(config, display, lambda: open_run_images(config, display, folder).catalog)
    except ImagesChangedError as error:
        advice = "Galleries can be compared even so: shortlist compare GALLERY NEW-GALLERY --queries IMAGES"
        raise ImagesChangedError(f"{error} {advice}") from None
    return {
        eval_set.catalog.fingerprint(): open_test(folder, config, encoder, eval_set, display) for eval_set in eval_sets
    }


def _embed_tests(model: Path, tests: Mapping[str, EmbeddedTest], display: Display) -> dict[str, EmbeddedTest]:
    """Embed the images of tests with a pretrained model."""
    encoder, found = open_encoder(model), {}
    for key, test in tests.items():
        with display.task(f"embedding {test.catalog.name} with {model}", "images") as progress:
            vectors = embed_test(encoder, test.catalog, None, None, progress)
        found[key] = replace(test, vectors=vectors.to(test.vectors.device))
    return found


def _list_tests(tests: Mapping[str, EmbeddedTest]) -> str:
    named = [f"{len(each.catalog):,} images of {each.catalog.name}, {key[:12]}" for key, each in tests.items()]
    return " and ".join(named) or "none"


def _compare_test(runs: dict[str, EmbeddedTest], display: Display) -> ComparedTest:
    first, *others = runs
    scores = score_runs(runs, display)
    differences: dict[str, dict[str, Difference]] = {}
    for run in others:
        differences[run] = {}
        with display.task(f"comparing {run} with {first}"):
            for setup, one in scores[first].items():
                differences[run] |= paired_differences(one.names, one.values, scores[run][setup].values)
    means = {run: mean_scores(tables) for run, tables in scores.items()}
    return ComparedTest(runs, count_queries(scores[first]), means, differences)


def score_runs(runs: Mapping[str, EmbeddedTest], display: Display) -> dict[str, dict[str, QueryTable]]:
    """Score the queries of a test for each run, with the cut-offs of the first: tables by run and setup."""
    reference = next(iter(runs.values()))
    scores: dict[str, dict[str, QueryTable]] = {}
    for run, test in runs.items():
        with display.task(f"ranking {reference.catalog.name} for {run}") as progress:
            tables = score_queries(test.vectors, test.catalog, reference.k, progress=progress)
        scores[run] = {setup: table for setup, table in tables.items() if len(table.queries)}
    return scores


def mean_scores(tables: Mapping[str, QueryTable]) -> dict[str, float]:
    """Return the mean over the queries by metric."""
    return {
        metric: value
        for table in tables.values()
        for metric, value in zip(table.names, table.values.double().mean(0).tolist(), strict=True)
    }


def count_queries(tables: Mapping[str, QueryTable]) -> dict[str, int]:
    """Return the number of queries by metric."""
    return {metric: len(table.queries) for table in tables.values() for metric in table.names}


def write_comparison(comparison: Comparison, out: Path | str, display: Display | None = None) -> Path:
    """Write a page with the differences of all metrics, and the same queries side by side.

    Args:
        comparison: The comparison.
        out: File to write.
        display: Shows the progress.

    Returns:
        The file.

    Raises:
        ConfigError: The file cannot be written.
    """
    display, thumbnails, file = display or default_display(), Thumbnails(), Path(out)
    check_writable(file)
    suffixes = [f": {test.catalog.name}" if len(comparison.tests) > 1 else "" for test in comparison.tests]
    names, (_, nouns) = comparison.names, comparison.noun
    return write_page(
        file,
        "comparison.html",
        thumbnails,
        title=" against ".join(reversed(names)) if len(names) == 2 else f"Comparison of {nouns}",
        sections=[*(f"{part}{suffix}" for suffix in suffixes for part in ("Numbers", "Queries")), nouns.capitalize()],
        comparison=comparison,
        tests=[(test, _browse_test(thumbnails, test, display)) for test in comparison.tests],
        format_p=format_p,
    )


def _browse_test(thumbnails: Thumbnails, test: ComparedTest, display: Display) -> QueryBrowser:
    analyses: dict[str, Analysis] = {}
    for run, each in test.runs.items():
        with display.task(f"ranking {test.catalog.name} for {run}", "queries") as progress:
            analyses[run] = analyse(each.vectors, test.catalog, progress)
    with display.task("drawing the queries"):
        return browse_queries(thumbnails, test.catalog, analyses, choose_differing(analyses), {})


def choose_differing(analyses: Mapping[str, Analysis], group_size: int = GROUP_SIZE) -> dict[str, list[int]]:
    """Choose queries to show: those where each run differs most from the first, and random ones.

    Returns:
        Indices of queries by group: "RUN better" and "RUN worse" for each run but the first, and "random".
    """
    (first, reference), *others = analyses.items()
    answerable = reference.answerable
    chosen: dict[str, list[int]] = {}
    for run, analysis in others:
        than = f" than {first}" if len(others) > 1 else ""
        gain = (_quality(analysis) - _quality(reference))[answerable]
        order = np.argsort(-gain, kind="stable")
        chosen[f"{run} better{than}"] = answerable[order[gain[order] > 0][:group_size]].tolist()
        chosen[f"{run} worse{than}"] = answerable[order[gain[order] < 0][::-1][:group_size]].tolist()
    chosen["random"] = np.random.default_rng(0).permutation(answerable)[:group_size].tolist()
    return chosen


def _quality(analysis: Analysis) -> NDArray[np.float64]:
    """Return the reciprocal rank of the first correct result per query; correct results break ties."""
    quality: NDArray[np.float64] = 1 / np.maximum(analysis.first_rank, 1) + 1e-6 * analysis.correct.sum(1)
    return quality

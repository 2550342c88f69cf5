"""The report of a run: an HTML page with its metrics, training curves, results and failures."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from torch import Tensor, nn

from shortlist.config import RunConfig
from shortlist.data import Catalog
from shortlist.data.inspection import find_look_alikes
from shortlist.encoding.pretrained import is_pretrained
from shortlist.errors import MAX_NAMES, DataError, shorten_list
from shortlist.evaluation import Evaluation
from shortlist.evaluation.protocols import gallery_rows
from shortlist.files import check_writable, read_text
from shortlist.progress import Display, default_display, format_duration
from shortlist.report import findings
from shortlist.report.analysis import NUM_BINS, Analysis, EmbeddedTest, analyse, open_finished_run, open_test
from shortlist.report.pages import Picture, QueryBrowser, Thumbnails, browse_queries, write_page
from shortlist.report.paper_tables import landmark_means, percentages, reductions_to_previous_best
from shortlist.report.plots import Plot, bar_plot, distributions_plot, training_curves
from shortlist.report.terminal_tables import counts
from shortlist.report.thresholds import Threshold, recommended, thresholds
from shortlist.training import Plan, RunFolder, make_plan
from shortlist.training.baseline import baseline_name
from shortlist.training.folder import ImagesChangedError
from shortlist.training.plan import run_workers
from shortlist.training.run_evaluation import embed_test, is_run, no_test_images

MAX_CLASSES = 150  # classes with a query in the report, over all tests; all thumbnails together take a few MB
MAX_DUPLICATES = 24  # maximum number of pairs that are shown
MAX_COMPARED_IMAGES = 50_000  # images that are compared visually; decoding them takes a few minutes


@dataclass(frozen=True)
class ResultSections:
    """The sections of the report about one test."""

    queries: QueryBrowser
    plots: list[Plot]
    separation: float | None
    thresholds: list[Threshold]
    images: int
    k: tuple[int, ...]
    sizes: list[findings.Bin]
    confusions: list[tuple[findings.Confusion, list[tuple[Picture, Picture]]]]
    duplicates: list[tuple[Picture, Picture]]
    num_duplicates: int
    num_unchecked: int
    near: list[tuple[Picture, Picture]]
    num_near: int

    @property
    def recommended(self) -> Threshold | None:
        """The minimum score to use in a search, if there is one."""
        return recommended(self.thresholds)


@dataclass(frozen=True)
class RepeatedRun:
    """The run that a run of `shortlist train --final` repeats with all classes.

    Args:
        name: Name of its folder.
        link: Relative URL of its report; None if there is none.
        evaluations: Its results and those of its baseline, by test; none if the folder does not exist any more.
    """

    name: str
    link: str | None
    evaluations: list[tuple[Evaluation, Evaluation | None]]

    @classmethod
    def of(cls, path: str, page: Path) -> RepeatedRun:
        """Open the run in a folder, for a page that links to its report."""
        folder = RunFolder(Path(path))
        report = folder.path / "report.html"
        link = quote(os.path.relpath(report, page.resolve().parent)) if report.is_file() else None
        return cls(folder.path.name, link, _evaluations(folder))


@dataclass(frozen=True)
class LookAlikeSection:
    """Images of a run that look the same, although their files differ.

    Args:
        leaks: Some pairs of a training image and a validation or test image.
        num_leaks: Number of all such pairs.
        classes: Some other pairs of images of different classes.
        num_classes: Number of all such pairs.
    """

    leaks: list[tuple[Picture, Picture]]
    num_leaks: int
    classes: list[tuple[Picture, Picture]]
    num_classes: int


def write_report(
    path: Path | str,
    out: Path | str | None = None,
    display: Display | None = None,
    *,
    model: nn.Module | None = None,
    training_images: bool = False,
) -> Path:
    """Write the report of a finished run.

    If the run's images cannot be opened or have changed, the report says so and omits the results.

    Args:
        path: Folder of the run.
        out: File to write; report.html in the run's folder by default.
        display: Shows the progress.
        model: The model, if it was given in Python; see `Encoder.from_run`.
        training_images: Whether to embed the training images, and to list test images with almost the same vector.

    Returns:
        The file.

    Raises:
        RunError: The folder contains no run, or the run is not finished.
        ConfigError: The file cannot be written, or a pretrained model is given, which has no test images.
    """
    display = display or default_display()
    if is_pretrained(path) and not is_run(path):
        command = shlex.join(["shortlist", "report", str(path), "my-images"])
        raise no_test_images(path, f"give labelled images to report on, such as: {command}")
    folder, config, encoder = open_finished_run(path, model)
    file = folder.path / "report.html" if out is None else Path(out)
    check_writable(file)
    plan: Plan | None = None
    tests: list[EmbeddedTest] = []
    problem = "The run had no test images, so there are no results to show."
    try:
        plan = make_plan(config, display, folder)
        tests = [open_test(folder, config, encoder, eval_set, display) for eval_set in plan.eval_sets]
    except ImagesChangedError as error:
        problem = f"The images have changed since the training, so no results are shown. {error}"
    except DataError as error:
        problem = f"The images cannot be opened, so no results are shown: {error}"
    evaluations = _evaluations(folder)
    repeated = None if config.repeats is None else RepeatedRun.of(config.repeats, file)
    measured = percentages([after for after, _ in evaluations])
    thumbnails, records = Thumbnails(), folder.metrics()
    near_training = None
    if plan is not None and training_images:
        with display.task("embedding the training images", "images") as progress:
            train = replace(plan.train, name=f"{plan.train.name}-train")
            trained = embed_test(encoder, train, run_workers(config), folder, progress)
        near_training = _near_training(thumbnails, train, trained, tests)
    sections = [result_sections(thumbnails, test, len(tests), display) for test in tests]
    alike = None if plan is None or not tests else look_alike_section(thumbnails, plan.catalog, display, sections)
    if sections:
        best = sections[0].recommended
        folder.recommend_min_score(None if best is None else (best.min_score, best.rate))
    suffixes = [f": {test.catalog.name}" if len(tests) > 1 else "" for test in tests]
    results = [f"{part}{suffix}" for suffix in suffixes for part in ("Results", "Failures")] or ["Results"]
    return write_page(
        file,
        "report.html",
        thumbnails,
        title=folder.path.absolute().name,
        sections=["Numbers", "Curves", *results, "Look-alikes", "What was run"],
        alike=alike,
        near_training=near_training,
        compared=MAX_COMPARED_IMAGES,
        recipe=config.name,
        evaluations=evaluations,
        repeated=repeated,
        pooling=config.model.pooling,
        counts=counts,
        baseline_name=baseline_name,
        reductions=reductions_to_previous_best(config, measured),
        means=landmark_means(measured),
        paper_means=landmark_means(config.paper),
        curves=training_curves(records),
        validated=any(record["kind"] == "validation" for record in records),
        tests=sections,
        problem=problem,
        facts=_run_facts(folder, config, plan, records),
        command=f"shortlist train {shlex.quote(str(folder.config_file.absolute()))} --run NEW",
        embed_command=f"shortlist report {shlex.quote(str(folder.path))} --training-images",
        config=read_text(folder.config_file),
    )


def _evaluations(folder: RunFolder) -> list[tuple[Evaluation, Evaluation | None]]:
    """Return the results of a run, each with that of its baseline, if any."""
    tested_before = folder.evaluations(before=True) if folder.before_file.exists() else []
    before = {each.data: each for each in tested_before}
    tested = folder.evaluations() if folder.evaluation_file.exists() else []
    return [(each, before.get(each.data)) for each in tested]


def report_after_training(folder: RunFolder, display: Display, model: nn.Module | None = None) -> None:
    """Write the report of a run that was just trained. If this fails, only a message is shown."""
    try:
        file = write_report(folder.path, display=display, model=model)
    except Exception as error:  # an error in the report must not end a finished training
        retry = f"shortlist report {shlex.quote(str(folder.path))}"
        reason = f"{type(error).__name__}: {error}"
        display.message(f"The report could not be written ({reason}). To try again: {retry}", report=None)
    else:
        display.message(f"The report is {file}.", report=str(file))


def result_sections(thumbnails: Thumbnails, test: EmbeddedTest, num_tests: int, display: Display) -> ResultSections:
    """Analyse a test for the report.

    Args:
        thumbnails: Thumbnails of the page.
        test: The images and their vectors.
        num_tests: Number of tests in the report, which share the number of classes to show.
        display: Shows the progress.
    """
    catalog = test.catalog
    with display.task(f"ranking {catalog.name}", "queries") as progress:
        analysis = analyse(test.vectors, catalog, progress)
    with display.task("drawing the queries"):
        chosen = findings.choose_queries(analysis, catalog, max_classes=max(20, MAX_CLASSES // num_tests))
        labels = {"every class": _class_group_label(catalog, analysis, len(chosen["every class"]))}
        queries = browse_queries(thumbnails, catalog, {"": analysis}, chosen, labels)
    with display.task("comparing images with equal vectors", "pairs") as progress:
        identical = findings.identical_pairs(analysis, catalog, progress)

    equal = set(identical.pairs)
    near = [pair for pair in findings.similar_pairs_across_classes(analysis, catalog) if pair not in equal]

    def picture(row: int) -> Picture:
        return Picture.of(thumbnails, catalog, int(row))

    confusions = [
        (each, [(picture(analysis.queries[query]), picture(analysis.results[query, 0])) for query in each.examples])
        for each in findings.confusions(analysis, catalog)
    ]
    return ResultSections(
        queries,
        [_rank_plot(analysis), _similarity_plot(analysis)],
        findings.separation(analysis),
        thresholds(analysis),
        len(gallery_rows(catalog)),
        test.k,
        findings.recall_by_class_size(analysis, test.k),
        confusions,
        [(picture(one), picture(other)) for one, other in identical.pairs[:MAX_DUPLICATES]],
        len(identical.pairs),
        identical.num_unchecked,
        [(picture(one), picture(other)) for one, other in near[:MAX_DUPLICATES]],
        len(near),
    )


def look_alike_section(
    thumbnails: Thumbnails, catalog: Catalog, display: Display, sections: Sequence[ResultSections] = ()
) -> LookAlikeSection | None:
    """Find images of a run that look the same; None if there are too many images.

    Args:
        thumbnails: Thumbnails of the page.
        catalog: The images.
        display: Shows the progress.
        sections: Sections about tests, which show identical images. Those pairs are left out.
    """
    if len(catalog) > MAX_COMPARED_IMAGES:
        return None
    with display.task("searching for images that look the same", "images") as progress:
        found = find_look_alikes(catalog, progress=progress)
    own = (each for each in sections if each.queries.name == catalog.name)
    shown = {frozenset(picture.path for picture in pair) for each in own for pair in each.duplicates}
    found = [each for each in found if frozenset(str(catalog.paths[row]) for row in each[0]) not in shown]
    by_kind: dict[bool, list[tuple[Picture, Picture]]] = {True: [], False: []}
    for (one, other), leak in found:
        if len(by_kind[leak]) < MAX_DUPLICATES:
            pair = sorted((one, other), key=lambda row: catalog.splits[row] != "train")
            first, second = (Picture.of(thumbnails, catalog, row) for row in pair)
            by_kind[leak].append((first, second))
    num_leaks = sum(leak for _, leak in found)
    return LookAlikeSection(by_kind[True], num_leaks, by_kind[False], len(found) - num_leaks)


def _near_training(
    thumbnails: Thumbnails, train: Catalog, trained: Tensor, tests: Sequence[EmbeddedTest]
) -> tuple[list[tuple[Picture, Picture]], int]:
    """Return some pairs of training and test images with almost the same vector, and the number of all pairs."""
    pairs = [
        (row, test.catalog, other)
        for test in tests
        for row, other in findings.near_training_images(trained, test.vectors)
    ]
    shown = [
        (Picture.of(thumbnails, train, row), Picture.of(thumbnails, catalog, other))
        for row, catalog, other in pairs[:MAX_DUPLICATES]
    ]
    return shown, len(pairs)


def _class_group_label(catalog: Catalog, analysis: Analysis, shown: int) -> str:
    if catalog.judgements:
        return "all queries" if shown == len(analysis.answerable) else f"{shown:,} queries"
    classes = len(np.unique(catalog.labels[analysis.queries[analysis.answerable]]))
    return "one of every class" if shown == classes else f"one of each of {shown} classes"


def _rank_plot(analysis: Analysis) -> Plot:
    total = len(analysis.answerable)
    bars = [
        (
            f"{each.high:,}",
            100 * each.queries / total,
            f"rank {each.name}: {each.queries:,} queries, {100 * each.queries / total:.1f} %",
        )
        for each in findings.first_rank_histogram(analysis)
    ]
    median = int(np.median(analysis.first_rank[analysis.answerable]))
    summary = f"Rank of the first correct result: at most {median:,} for half of the queries."
    return bar_plot("rank of the first correct result", bars, x_name="rank, up to", summary=summary)


def _similarity_plot(analysis: Analysis) -> Plot:
    edges = np.linspace(-1, 1, NUM_BINS + 1).tolist()
    pairs = {"positive pairs": analysis.positive_pairs, "negative pairs": analysis.negative_pairs}
    shares = {name: (each / max(1, each.sum())).tolist() for name, each in pairs.items()}
    return distributions_plot("similarity", edges, shares, "Similarities of positive and negative pairs.")


def _run_facts(
    folder: RunFolder, config: RunConfig, plan: Plan | None, records: Sequence[dict[str, Any]]
) -> list[tuple[str, str, bool]]:
    """Return the name, the text and whether it is code for each fact; without a plan, fewer facts are known."""
    facts = folder.facts().model_dump() if folder.facts_file.exists() else {}
    texts = {
        "recipe": f"{config.name}{': ' if config.about else ''}{config.about}",
        "repeats": "" if config.repeats is None else f"{config.repeats}, with all classes",
        "images": config.data.source + (f" in {config.data.root}" if config.data.root else ""),
        **({} if plan is None else _data_facts(plan)),
        "excluded classes": _listing(facts.get("classes_too_small", []), "too few images for a batch"),
        "missing images": _listing(facts.get("missing", []), "skipped because of data.on_missing=skip"),
        **(
            {}
            if plan is None
            else {"unreadable images": _listing([f"{path}: {reason}" for path, reason in plan.unreadable], "skipped")}
        ),
        **_training_facts(facts.get("batch_size", config.batch.size), plan, records),
        "device": f"{facts.get('device', 'unknown')}; {facts.get('platform', '')}",
        "threads": str(facts.get("threads") or ""),
        "seed": str(facts.get("seed", "")),
        "versions": ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items() if version),
        "catalog": facts.get("catalog", "unknown"),
        "command": facts.get("command", "unknown"),
    }
    return [(name, text, name in ("catalog", "command")) for name, text in texts.items() if text]


def _data_facts(plan: Plan) -> dict[str, str]:
    catalogs = {"training": plan.train}
    if plan.validation is not None:
        catalogs["validation"] = plan.validation.catalog
    catalogs |= {f"test, {eval_set.name}": eval_set.catalog for eval_set in plan.eval_sets}
    return {**{name: catalog_counts(each) for name, each in catalogs.items()}, "remarks": "; ".join(plan.remarks)}


def catalog_counts(catalog: Catalog) -> str:
    """Describe the size of a test set, or of training images."""
    if catalog.roles is not None and catalog.roles.any():
        queries, gallery = (int((catalog.roles == role).sum()) for role in ("query", "gallery"))
        return f"{queries:,} queries and {gallery:,} images to search"
    sizes = catalog.class_sizes()
    per_class = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max():,}"
    return f"{len(catalog):,} images of {len(sizes):,} class{'' if len(sizes) == 1 else 'es'}, {per_class} per class"


def _training_facts(size: int | str, plan: Plan | None, records: Sequence[dict[str, Any]]) -> dict[str, str]:
    steps = [record for record in records if record["kind"] == "step"]
    if not steps:
        return {"steps": "none"}
    epochs = steps[-1]["epoch"]
    facts = {"steps": f"{steps[-1]['step']:,} in {epochs:,} epoch{'' if epochs == 1 else 's'}"}
    if plan is not None:
        facts["batches"] = str(plan.sampler)
    if isinstance(size, int):  # otherwise, facts.json is missing, and the configuration has auto
        seconds = sum(size / record["images_per_second"] for record in steps)
        facts["time"] = f"{format_duration(seconds)} for all steps, without validation and tests"
    return facts


def _listing(names: Sequence[str], reason: str) -> str:
    return f"{len(names):,} ({reason}): {shorten_list(names, MAX_NAMES)}" if names else "none"

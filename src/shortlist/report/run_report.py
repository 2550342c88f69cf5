"""The report of a run: one page that says what its model does well and badly."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from shortlist.errors import DataError
from shortlist.evaluation import Evaluation
from shortlist.files import check_writable, write_text_atomically
from shortlist.progress import Display, default_display
from shortlist.report.curves import curves
from shortlist.report.facts import what_was_run
from shortlist.report.headline import gauge_key, lead, numbers
from shortlist.report.markup import Html, document, page_body, tag
from shortlist.report.opening import Tested, open_finished, open_test, read_evaluations
from shortlist.report.results import results
from shortlist.report.thumbnails import Album
from shortlist.training import Plan, RunFolder, make_plan
from shortlist.training.folder import ImagesChangedError


def write_report(path: Path | str, out: Path | str | None = None, display: Display | None = None) -> Path:
    """Write the report of a finished run.

    Where its images can no longer be opened, or have changed, it says so, and shows the rest: numbers, curves, and what
    was run.

    Args:
        path: the run's folder.
        out: the file; by default report.html in the run's folder.
        display: for progress.

    Returns:
        The file.

    Raises:
        RunError: there is no run, or it is not finished.
        ConfigError: the file cannot be written.
    """
    display = display or default_display()
    folder, config, encoder = open_finished(path)
    file = folder.path / "report.html" if out is None else Path(out)
    check_writable(file)
    plan: Plan | None = None
    tested: list[Tested] = []
    problem = "The run had no test images, so there are no results to show."
    try:
        plan = make_plan(config, display, folder)
        tested = [open_test(folder, config, encoder, eval_set, display) for eval_set in plan.eval_sets]
    except ImagesChangedError as error:
        problem = f"The images have changed since, so no results are shown. {error}"
    except DataError as error:
        problem = f"The images cannot be opened any more, so no results are shown: {error}"
    after, before = read_evaluations(folder.evaluation_file), read_evaluations(folder.before_file)
    album, records = Album(), folder.metrics()
    sections = {"Numbers": _numbers(after, before), "Curves": curves(records)}
    for each in tested:
        sections |= results(album, each, len(tested), display)
    if not tested:
        sections["Results"] = tag("section", tag("h2", "Results"), tag("p", problem))
    sections["What was run"] = what_was_run(folder, plan, records)
    body = page_body(_head(folder, config.name, after, before), sections, "shortlist report")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, document(f"{folder.path.absolute().name}: report", body, album.pictures))
    return file


def report_after_training(folder: RunFolder, display: Display) -> None:
    """Write the report of a run that was just trained, and say where it is. If that fails, the run is still whole."""
    try:
        file = write_report(folder.path, display=display)
    except Exception as error:  # whatever it is: hours of training must not end with it
        again = f"shortlist report {shlex.quote(str(folder.path))}"
        why = f"{type(error).__name__}: {error}"
        display.message(f"The report could not be written ({why}). To try again: {again}", report=None)
    else:
        display.message(f"The report is {file}.", report=str(file))


def _head(folder: RunFolder, recipe: str, after: Sequence[Evaluation], before: Sequence[Evaluation]) -> Html:
    sentences = [lead(each, _of(each, before)) for each in after[:1]]
    title = tag("h1", folder.path.absolute().name)
    return tag("header", tag("div", title, sentences or tag("p", f"A run of {recipe}.", class_="lead")))


def _of(measured: Evaluation, others: Sequence[Evaluation]) -> Evaluation | None:
    return next((each for each in others if each.data == measured.data), None)


def _numbers(after: Sequence[Evaluation], before: Sequence[Evaluation]) -> Html:
    parts = []
    for each in after:
        parts += [tag("h3", f"{each.data}: {each.protocol}"), numbers(each, _of(each, before))]
    about = gauge_key(after, before) if after else "Nothing was tested in this run."
    return tag("section", tag("h2", "Numbers"), tag("p", about, class_="note"), parts)

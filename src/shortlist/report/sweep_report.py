"""The report of a sweep: an HTML page with its trials, their history, and the importance of each searched key."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from shortlist.files import check_writable
from shortlist.progress import format_duration
from shortlist.report.pages import Thumbnails, write_page
from shortlist.report.plots import HistoryPoint, Plot, history_plot
from shortlist.training import SweepResult, TrialResult
from shortlist.training.sweeps import MIN_FOR_IMPORTANCES


def write_sweep_report(result: SweepResult, out: Path | str | None = None) -> Path:
    """Write the report of a sweep, finished or not.

    Args:
        result: The trials.
        out: File to write; report.html in the folder of the study by default.

    Returns:
        The file.

    Raises:
        ConfigError: The file cannot be written.
    """
    file = result.path / "report.html" if out is None else Path(out)
    check_writable(file)
    return write_page(
        file,
        "sweep.html",
        Thumbnails(),
        title=result.path.absolute().name,
        sections=["Trials", "History", "Importance", "What was run"],
        result=result,
        lead=describe_best(result),
        header=header(result),
        rows=rows(result),
        history=_history(result),
        min_trials=MIN_FOR_IMPORTANCES,
        facts=_facts(result),
        command=f"shortlist sweep best {shlex.quote(str(result.path))}",
    )


def header(result: SweepResult) -> list[str]:
    """Return the names of the columns of the table of trials."""
    return ["trial", *result.keys, f"validation {result.metric}, %", result.unit, "duration", "state"]


def rows(result: SweepResult) -> list[list[str]]:
    """Return a row of texts per trial: complete trials first, then by value."""
    order = sorted(result.trials, key=lambda each: (each.state != "complete", -(each.value or 0.0), each.number))
    return [_row(trial, result.keys) for trial in order]


def _row(trial: TrialResult, keys: tuple[str, ...]) -> list[str]:
    value = "-" if trial.value is None else f"{100 * trial.value:.1f}"
    length = str(max(trial.validations, default="-"))
    duration = "-" if trial.seconds is None else format_duration(trial.seconds)
    return [str(trial.number), *(_show(trial.values.get(key)) for key in keys), value, length, duration, trial.state]


def _show(value: Any) -> str:
    """Format a value as in YAML, with few digits."""
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def describe_best(result: SweepResult) -> str:
    """Return a sentence about the best trial."""
    best, progress = result.best, f"{result.done} of {result.total} trials are done"
    if best is None:
        return f"{progress}, and none is complete."
    values = ", ".join(f"{key}={_show(value)}" for key, value in best.values.items())
    value = f"validation {result.metric} {100 * (best.value or 0):.1f} %"
    return f"Trial {best.number} is the best: {value} with {values}. {progress}."


def _history(result: SweepResult) -> Plot | None:
    """Plot the value of each trial that is complete, and the last validation of each that was pruned."""
    if result.best is None:
        return None
    points = []
    for trial in result.trials:
        value = list(trial.validations.values())[-1:] if trial.state == "pruned" else [trial.value]
        if trial.state in ("complete", "pruned") and value and value[0] is not None:
            state = ", pruned" if trial.state == "pruned" else ""
            text = f"trial {trial.number}: {100 * value[0]:.1f} %{state}"
            points.append(HistoryPoint(trial.number, 100 * value[0], text, trial.state == "complete"))
    return history_plot(f"validation {result.metric}", points, x_name="trial", unit=" %")


def _facts(result: SweepResult) -> dict[str, str]:
    states = [trial.state for trial in result.trials]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return {
        "recipe": result.recipe,
        "sampler": result.sampler,
        "pruner": result.pruner,
        "trials": f"{', '.join(counts) or 'none'}; {result.total} when the sweep is finished",
        "folder": str(result.path.absolute()),
    }

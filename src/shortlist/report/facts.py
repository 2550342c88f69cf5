"""What was run: data, config, versions, time, and the command to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from shortlist.config import RunConfig
from shortlist.data import Catalog
from shortlist.errors import MAX_NAMES
from shortlist.files import read_json
from shortlist.report.markup import Child, Html, join, tag
from shortlist.training import Plan, RunFolder


def what_was_run(folder: RunFolder, plan: Plan | None, records: Sequence[dict[str, Any]]) -> Html:
    """The last section of a report; without a plan (the images are gone), what the run's folder knows."""
    config = folder.config()
    facts = read_json(folder.facts_file) if folder.facts_file.exists() else {}
    rows: dict[str, Child] = {
        "recipe": f"{config.name}{': ' if config.about else ''}{config.about}",
        "images": config.data.source + (f" in {config.data.root}" if config.data.root else ""),
        **({} if plan is None else _data(plan)),
        "classes left out": _some(facts.get("classes_too_small", []), "too few images for a batch"),
        "missing": _some(facts.get("missing", []), "left out as data.on_missing=skip says"),
        **({} if plan is None else {"unreadable": _some([path for path, _ in plan.unreadable], "left out")}),
        **_training(config, plan, records),
        "device": f"{facts.get('device', 'unknown')}; {facts.get('platform', '')}",
        "threads": facts.get("threads"),
        "seed": facts.get("seed"),
        "versions": ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items() if version),
        "catalog": tag("code", facts.get("catalog", "unknown")),
        "command": tag("code", facts.get("command", "unknown")),
    }
    listed = [join(tag("dt", name), tag("dd", value)) for name, value in rows.items() if value not in (None, "")]
    repeat = f"shortlist train {shlex.quote(str(folder.config_file.absolute()))} --run NEW"
    return tag(
        "section",
        tag("h2", "What was run"),
        tag("dl", listed, class_="facts"),
        tag("h3", "To repeat it"),
        tag("pre", repeat),
        tag("details", tag("summary", "The whole config"), tag("pre", folder.config_file.read_text(encoding="utf-8"))),
    )


def _data(plan: Plan) -> dict[str, Child]:
    parts = {"training": plan.train}
    if plan.validation is not None:
        parts["validation"] = plan.validation.catalog
    parts |= {f"test, {eval_set.name}": eval_set.catalog for eval_set in plan.eval_sets}
    return {**{name: _count(part) for name, part in parts.items()}, "remarks": "; ".join(plan.remarks)}


def _count(catalog: Catalog) -> str:
    sizes = catalog.class_sizes()
    each = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max():,}"
    text = f"{len(catalog):,} images of {len(sizes):,} classes, {each} a class"
    if catalog.roles is not None and catalog.roles.any():
        queries = int((catalog.roles == "query").sum())
        text = f"{queries:,} queries and {int((catalog.roles == 'gallery').sum()):,} images to search"
    return text


def _training(config: RunConfig, plan: Plan | None, records: Sequence[dict[str, Any]]) -> dict[str, Child]:
    steps = [record for record in records if record["kind"] == "step"]
    if not steps:
        return {"steps": "none"}
    found: dict[str, Child] = {"steps": f"{steps[-1]['step']:,} in {steps[-1]['epoch']:,} epochs"}
    size = config.batch.size if plan is None else plan.sampler.batch_size
    if plan is not None:
        found["batches"] = str(plan.sampler)
    if size != "auto":
        seconds = sum(size / record["images_per_second"] for record in steps)
        found["time"] = f"{duration(seconds)} for all steps, without validation and tests"
    return found


def duration(seconds: float) -> str:
    """For people.

    >>> duration(42.3), duration(192), duration(9000)
    ('42 s', '3 min 12 s', '2 h 30 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _some(names: Sequence[str], why: str) -> str:
    if not names:
        return "none"
    return f"{len(names):,} ({why}): {', '.join(names[:MAX_NAMES])}{', ...' if len(names) > MAX_NAMES else ''}"

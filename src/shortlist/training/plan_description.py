"""Description of the plan of a run: its images and steps, its requirements, and how they scale."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shortlist.config.schema import DataConfig
from shortlist.data import BENCHMARKS, Catalog
from shortlist.data.inspection import describe_splits
from shortlist.model import Embedder
from shortlist.progress import format_count, format_duration
from shortlist.training.components import build_loss, trained_parts
from shortlist.training.datasets import EvalSet
from shortlist.training.durations import Durations
from shortlist.training.plan import Plan
from shortlist.training.requirements import Requirements, find_requirements

COMPUTED = "GPU memory is computed, not measured."


def describe_plan(
    plan: Plan, embedder: Embedder, needs: Requirements | None = None, durations: Durations | None = None
) -> dict[str, Any]:
    """Describe a plan as `shortlist plan` and `--dry-run` print it.

    Args:
        plan: Plan of the run.
        embedder: Embedder of the run; its weights do not matter.
        needs: Requirements of the run. Default: those of one process on this machine.
        durations: Measured durations, if any.

    Returns:
        JSON-compatible dictionary.
    """
    config, needs = plan.config, needs or find_requirements(plan, embedder)
    return {
        **({"remark": COMPUTED} if needs.device.kind == "cuda" else {}),
        "data": {
            "source": config.data.source,
            **{name: _describe_size(part) for name, part in _splits(plan).items()},
            "missing": len(plan.catalog.missing),
            "unreadable": len(plan.unreadable),
            "fingerprint": plan.catalog.fingerprint(),
            **({"remarks": list(plan.remarks)} if plan.remarks else {}),
        },
        "batches": str(plan.sampler),
        "classes left out": plan.classes_left_out,
        "steps": plan.total_steps,
        "images": plan.total_steps * needs.batch,
        "parameters": _count_parameters(plan, embedder),
        "processes": needs.processes,
        "memory": describe_memory(plan, needs),
        "chunk": _describe_chunk(needs),
        "floating-point operations": _describe_work(plan, needs),
        **({} if durations is None else {"time": _describe_time(plan, durations)}),
        "growth": {name: _describe_growth(each) for name, each in growth(needs).items()},
        "tests": [_describe_eval_set(eval_set) for eval_set in plan.eval_sets],
        **({} if durations is None else {"estimated time": durations.estimate(plan)}),
    }


def describe_memory(plan: Plan, needs: Requirements) -> dict[str, str]:
    """Describe the memory of each process by part. The peak is less than the sum, since not all parts coexist."""
    parts, batch = needs.memory, "features" if plan.config.frozen else "pixels"
    names = {
        "process": "process itself" if needs.device.kind == "cpu" else "CUDA context",
        "weights": "weights",
        "gradient": "gradient",
        "optimizer": "optimizer",
        "pixels": f"{batch} of a batch",
        "embeddings": "embeddings of a batch",
        "chunk": f"activations of a chunk of {needs.chunk}",
        "kept_graphs": f"kept graphs of {needs.kept:,} images",
        "loss": "tile of the loss",
        "evaluation": "encoding and evaluation" if plan.config.frozen else "evaluation",
    }
    memory = {text: format_bytes(parts[name]) for name, text in names.items()}
    if plan.config.frozen:
        memory["cached features, mapped from disk"] = format_bytes(parts["features"])
    return {**memory, "peak": format_bytes(needs.peak)}


def describe_data(plan: Plan, run: Path) -> Iterator[str]:
    """Yield lines that describe the training, validation and test classes, and how to train on all classes.

    Args:
        plan: Plan of the run.
        run: Folder of the run.
    """
    rows = describe_splits(plan.catalog, plan.config.batch.per_class)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
    if plan.config.data.source not in BENCHMARKS:
        yield f"Names of the classes: {_show_command(plan.config.data)}"
    held_out = plan.validation is not None and plan.config.data.validation == "half"
    if held_out and not plan.config.data.withhold_test:  # not for a trial of a sweep
        length = "epochs" if plan.config.training.validate_every_steps is None else "steps"
        command = f"shortlist train --final {shlex.quote(str(run))}"
        yield f"To train on all classes afterwards, for the best number of {length}: {command}"


def _show_command(data: DataConfig) -> str:
    """Return the command that lists the classes of the images."""
    given = {"--root": data.root, "--split-seed": data.split_seed, "--label-separator": data.label_separator}
    options = [f"{option}={value}" for option, value in given.items() if value is not None]
    return shlex.join(["shortlist", "data", "show", data.source, "--classes", *options])


def describe_needs(plan: Plan, needs: Requirements) -> str:
    """Describe the requirements of a run in one line, which `train` shows before it starts."""
    parts = describe_memory(plan, needs)
    largest = sorted(needs.memory, key=lambda name: -needs.memory[name])[:3]
    named = dict(zip(needs.memory, parts.items(), strict=False))
    shown = ", ".join(f"{text} {size}" for text, size in (named[name] for name in largest))
    where = "memory" if needs.processes == 1 else "memory of each process"
    return f"{where}: about {parts['peak']} ({shown}); {format_work(needs.step_work)} per step"


def growth(needs: Requirements) -> dict[str, Requirements]:
    """Return the requirements of the run with a larger batch, larger images and more processes."""
    return {
        "this run": needs,
        "batch x 2": needs.scaled(batch=2),
        "batch x 4": needs.scaled(batch=4),
        "side of images x 2": needs.scaled(side=2),
        "processes x 2": needs.scaled(processes=2),
        "processes x 8": needs.scaled(processes=8),
    }


def format_bytes(size: float) -> str:
    """Format a number of bytes.

    Example:
        >>> [format_bytes(size) for size in (300_000, 5 * 2**20, 1.5 * 2**30)]
        ['0.3 MB', '5 MB', '1,536 MB']
    """
    megabytes = size / 2**20
    return f"{megabytes:,.0f} MB" if megabytes >= 1 or not size else f"{megabytes:.1g} MB"


def format_work(operations: float) -> str:
    """Format a number of floating-point operations.

    Example:
        >>> [format_work(operations) for operations in (5e8, 2.5e12, 7e18)]
        ['0.5 GFLOP', '2.5 TFLOP', '7 EFLOP']
    """
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12)):
        if operations >= size:
            return f"{operations / size:.3g} {unit}FLOP"
    return f"{operations / 1e9:.3g} GFLOP"


def _describe_chunk(needs: Requirements) -> str:
    kept = "all graphs" if needs.kept == needs.share else f"the graphs of {needs.kept:,} of {needs.share:,} images"
    return f"{needs.chunk} images; {kept} are kept; the largest chunk that fits has {needs.largest_chunk:,} images"


def _describe_work(plan: Plan, needs: Requirements) -> dict[str, str]:
    run = needs.step_work * plan.total_steps
    return {"per step": format_work(needs.step_work), "run, without evaluations": format_work(run)}


def _describe_time(plan: Plan, durations: Durations) -> dict[str, str]:
    found = durations.of(plan).items()
    return {name: format_duration(seconds) if seconds >= 10 else f"{seconds:.2g} s" for name, seconds in found}


def _describe_growth(needs: Requirements) -> str:
    parts = {name: format_bytes(size) for name, size in needs.memory.items()}
    return (
        f"{format_bytes(needs.peak)} per process, including chunk of {needs.chunk} {parts['chunk']}, "
        f"{needs.kept:,} kept graphs {parts['kept_graphs']}, pixels {parts['pixels']}, loss {parts['loss']}; "
        f"{format_work(needs.step_work)} per step, {format_bytes(needs.sent)} sent"
    )


def _count_parameters(plan: Plan, embedder: Embedder) -> dict[str, int]:
    trained = trained_parts(plan.config, embedder)
    parts = {name: sum(p.numel() for p in part if p.requires_grad) for name, part in trained.items()}
    loss = build_loss(plan.config.loss, plan.classes, embedder.dim)
    if proxies := sum(p.numel() for p in loss.parameters()):
        parts["loss"] = proxies
    return {**parts, "all": sum(parts.values())}


def _splits(plan: Plan) -> dict[str, Catalog]:
    own = None if plan.config.evaluation.tests else next(iter(plan.eval_sets), None)
    others = {"validation": plan.validation, "test": own}
    return {
        "train": plan.train,
        **{name: eval_set.catalog for name, eval_set in others.items() if eval_set is not None},
    }


def _describe_eval_set(eval_set: EvalSet) -> str:
    distractors = eval_set.distractors
    more = "" if distractors is None else f", without and with {len(distractors):,} images of {distractors.name}"
    return f"{eval_set.name}: {len(eval_set.catalog):,} images{more}, reported at {', '.join(map(str, eval_set.k))}"


def _describe_size(catalog: Catalog) -> str:
    return f"{format_count(len(catalog), 'images')} of {format_count(len(catalog.classes()), 'classes')}"

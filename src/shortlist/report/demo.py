"""The demonstration: train on glyphs, and draw results before and after training."""

from __future__ import annotations

import time
from pathlib import Path

from shortlist.config import RunConfig
from shortlist.encoding import embed_images
from shortlist.progress import Display
from shortlist.report.contact_sheet import Column, draw_rankings, sample_queries
from shortlist.report.run_report import report_after_training
from shortlist.training import open_embedder, train_run
from shortlist.training.components import build_embedder, build_transforms
from shortlist.training.datasets import open_images
from shortlist.training.plan import run_workers

NUM_QUERIES = 10


def run_demo(config: RunConfig, path: Path, display: Display) -> Path:
    """Train in a new folder, print r@1 before and after training, and draw random queries with their results.

    Args:
        config: Configuration of the run.
        path: Folder of the run.
        display: Shows progress and messages.

    Returns:
        The picture.
    """
    started = time.perf_counter()
    folder = train_run(config, path, display)
    test = open_images(config, display, folder).catalog.split("test")
    trained = open_embedder(folder)
    _, transform = build_transforms(config, trained)
    r1 = [folder.evaluations(before=before)[0].values["r@1"] for before in (True, False)]
    workers = run_workers(config)
    columns = [
        Column(f"{when} training: r@1 {100 * value:.1f} %", embed_images(embedder, test, transform, workers=workers))
        for when, value, embedder in zip(("before", "after"), r1, (build_embedder(config), trained), strict=True)
    ]
    title = f"Characters not used in training: random queries, and their nearest images among {len(test):,}"
    picture = draw_rankings(
        test, sample_queries(test, NUM_QUERIES), columns, folder.path / "before-and-after.png", title=title
    )
    display.message(
        f"r@1 on {len(test.classes())} characters not used in training: {100 * r1[0]:.1f} % before, "
        f"{100 * r1[1]:.1f} % after ({time.perf_counter() - started:.0f} s). The picture is {picture}.",
        before=r1[0],
        after=r1[1],
        picture=str(picture),
    )
    report_after_training(folder, display)
    return picture

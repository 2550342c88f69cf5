"""The demonstration: train on glyphs, and show what was learned."""

from __future__ import annotations

import time
from pathlib import Path

from shortlist.config import RunConfig
from shortlist.encoding import embed_images
from shortlist.files import read_json
from shortlist.progress import Display
from shortlist.report.pictures import Column, draw_results, sample_queries
from shortlist.report.run_report import report_after_training
from shortlist.training import open_embedder, train
from shortlist.training.datasets import open_images
from shortlist.training.components import build_embedder, build_transforms
from shortlist.training.plan import decoding_workers

QUERIES = 10


def run_demo(config: RunConfig, path: Path, display: Display) -> Path:
    """Train `config` in a new folder, say r@1 before and after, and draw random queries with their results.

    Returns:
        The picture.
    """
    started = time.perf_counter()
    folder = train(config, path, display)
    catalog, _ = open_images(config, display, folder)
    test = catalog.split("test")
    after = open_embedder(folder)
    _, transform = build_transforms(config, after)
    r1 = [read_json(file)[0]["metrics"]["r@1"]["value"] for file in (folder.before_file, folder.evaluation_file)]
    workers = decoding_workers(config)
    columns = [
        Column(f"{when} training: r@1 {100 * value:.1f} %", embed_images(each, test, transform, workers=workers))
        for when, value, each in zip(("before", "after"), r1, (build_embedder(config), after), strict=True)
    ]
    title = (
        f"Characters that the network never saw in training: random queries, and their nearest of {len(test):,} images"
    )
    picture = draw_results(
        test, sample_queries(test, QUERIES), columns, folder.path / "before-and-after.png", title=title
    )
    display.message(
        f"r@1 on {len(test.classes())} characters never seen in training: {100 * r1[0]:.1f} % before, "
        f"{100 * r1[1]:.1f} % after ({time.perf_counter() - started:.0f} s). Look at {picture}",
        before=r1[0],
        after=r1[1],
        picture=str(picture),
    )
    report_after_training(folder, display)
    return picture

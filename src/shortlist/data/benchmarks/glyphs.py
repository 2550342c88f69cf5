"""The embedded benchmark, among the others."""

from __future__ import annotations

from pathlib import Path

from shortlist.data.benchmarks.benchmark import Benchmark, Count, Progress
from shortlist.data.catalog import Catalog


def read(root: Path, progress: Progress | None = None) -> Catalog:
    """Rendered into the folder, if this is the first time."""
    from shortlist.data.glyphs import glyphs  # only then: it imports matplotlib

    return glyphs(root, progress=progress)


BENCHMARK = Benchmark(
    name="glyphs",
    about="characters drawn in many fonts, rendered on the spot",
    read=read,
    protocol="leave-one-out",
    k=(1, 2, 4, 8),
    download="nothing to download",
    expects=None,
    counts={"train": Count(2_400, 150), "test": Count(2_400, 150)},
)

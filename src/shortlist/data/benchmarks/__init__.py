"""The benchmarks that are known by name: one file each, from the folder on disk to the catalog."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from shortlist.data.benchmarks import cars196, omniglot
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError

Progress = Callable[[int, int], None]  # done, total


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and how it is reported.

    Args:
        name: what a user calls it.
        read: from its folder (None where none was given), "error" or "skip", and progress, to its catalog.
        k: the cut-offs of the r@k that papers report.
        about: one sentence.
        expects: what its folder must hold; None where it needs none.
    """

    name: str
    read: Callable[[Path | None, str, Progress | None], Catalog]
    k: tuple[int, ...]
    about: str
    expects: str | None

    def load(self, root: Path | None, on_missing: str = "error", progress: Progress | None = None) -> Catalog:
        """Its catalog, with splits.

        Raises:
            DataError: no root where one is needed, or it does not hold what is expected.
        """
        if self.expects is not None and root is None:
            raise DataError(f"{self.name} needs its folder: set data.root to the one that holds {self.expects}")
        if root is not None and self.expects is not None and not root.is_dir():
            raise DataError(f"{self.name}: there is no folder {root}; data.root must hold {self.expects}")
        return self.read(root, on_missing, progress)


def _cars196(root: Path | None, on_missing: str, progress: Progress | None) -> Catalog:
    assert root is not None
    return cars196.load(root, on_missing=on_missing)


def _omniglot(root: Path | None, on_missing: str, progress: Progress | None) -> Catalog:
    assert root is not None
    return omniglot.load(root, on_missing=on_missing, progress=progress)


def _glyphs(root: Path | None, on_missing: str, progress: Progress | None) -> Catalog:
    from shortlist.data.glyphs import glyphs  # only then: it imports matplotlib

    return glyphs(root, progress=progress)


_ALL = (
    Benchmark("cars196", _cars196, (1, 2, 4, 8), "196 models of cars, 98 train and 98 test", cars196.EXPECTS),
    Benchmark(
        "omniglot",
        _omniglot,
        (1, 2, 4, 8),
        "1,623 handwritten characters of 50 alphabets, 20 drawings each",
        omniglot.EXPECTS,
    ),
    Benchmark("glyphs", _glyphs, (1, 2, 4, 8), "characters drawn in many fonts, rendered on the spot", None),
)
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType({benchmark.name: benchmark for benchmark in _ALL})

"""What is known of a benchmark, and how its folder is opened: looked at, read, counted, and its images looked for."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shortlist.cache import cache_folder
from shortlist.data.benchmarks.places import first_with, misplaced, somewhere_near, split_folders
from shortlist.data.catalog import Catalog
from shortlist.data.missing_files import without_missing
from shortlist.errors import DataError

Progress = Callable[[int, int], None]  # done, total


@dataclass(frozen=True)
class Count:
    """How many images a part has, and how many classes where it has classes."""

    images: int
    classes: int | None = None

    def __str__(self) -> str:
        return f"{self.images:,} images" + ("" if self.classes is None else f" of {self.classes:,} classes")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark, where it is found, and how it is reported.

    Args:
        name: what a user calls it.
        about: one sentence.
        read: from its folder (the cache, where none is needed and none was given) and progress to the catalog of all
            that it lists.
        protocol: how it is evaluated; "training only" where it has nothing to test on.
        k: the cut-offs that papers report.
        download: where it comes from, a line each.
        expects: what its folder must hold, in a few words; None where it needs no folder.
        tree: the same as a tree, a line each.
        marks: files or folders by which its folder is known: one of them must be there.
        counts: what each split or role should count.
        note: what else to know before downloading.
        confused: files or folders that are found instead of the marks -> what they are.
        judged: whether its queries come with a list of right answers, so that it is reported by mAP and mP@k.
    """

    name: str
    about: str
    read: Callable[[Path, Progress | None], Catalog]
    protocol: str
    k: tuple[int, ...]
    download: str
    expects: str | None
    tree: str = ""
    marks: tuple[str, ...] = ()
    counts: Mapping[str, Count] = field(default_factory=dict)
    note: str = ""
    confused: Mapping[str, str] = field(default_factory=dict)
    judged: bool = False

    def load(self, root: Path | None, on_missing: str = "error", progress: Progress | None = None) -> Catalog:
        """Its catalog, with splits; what it counts otherwise than it should is in `remarks`.

        Raises:
            DataError: no root where one is needed, it does not hold what is expected, or images are missing and
                `on_missing` is not "skip".
        """
        if self.expects is not None:
            root = self._look_at(root)
        catalog = self.read(cache_folder("") if root is None else root, progress)
        self._check_classes(catalog)
        remarks = (*catalog.remarks, *self._deviations(catalog))
        return self._present(dataclasses.replace(catalog, remarks=remarks), on_missing)

    @property
    def reported(self) -> tuple[str, ...]:
        """The metrics that papers report, such as r@1."""
        if self.protocol.endswith("only"):
            return ()
        return ("mAP", *(f"mP@{k}" for k in self.k)) if self.judged else tuple(f"r@{k}" for k in self.k)

    def facts(self) -> dict[str, Any]:
        """All that can be said of it, ready for JSON."""
        return {
            "name": self.name,
            "about": self.about,
            "protocol": self.protocol,
            "k": list(self.k),
            "counts": {part: dataclasses.asdict(count) for part, count in self.counts.items()},
            "reported": list(self.reported),
            "download": self.download.splitlines(),
            "expects": self.expects,
            "tree": self.tree.splitlines(),
            "note": self.note,
        }

    def description(self) -> str:
        """All that can be said of it, for a person."""
        lines = [f"{self.name}: {self.about}", "", f"protocol   {self.protocol}"]
        lines += [f"reported   {', '.join(self.reported)}"] if self.reported else []
        lines += [f"{part:10} {count}" for part, count in self.counts.items()]
        lines += [f"{'' if number else 'download':10} {each}" for number, each in enumerate(self.download.splitlines())]
        lines += ["", textwrap.fill(self.note, 100)] if self.note else []
        if self.expects is None:
            return "\n".join([*lines, "", f"use        shortlist data show {self.name}"])
        tree = ["", "data.root is the folder that holds", *(f"    {line}" for line in self.tree.splitlines())]
        return "\n".join([*lines, *tree, "", f"use        shortlist data show {self.name} --root FOLDER"])

    def _look_at(self, root: Path | None) -> Path:
        """Is this the folder? If not, say what was found instead and where it may be."""
        if root is None:
            raise DataError(f"{self.name} needs its folder: set `root` to the one that holds {self.expects}")
        if not root.is_dir():
            raise DataError(f"{self.name}: there is no folder {root}; `root` must hold {self.expects}")
        if any((root / mark).exists() for mark in self.marks):
            return root
        found = next((f"; {name} {what}" for name, what in self.confused.items() if (root / name).exists()), "")
        if not found and (folders := split_folders(root)):
            found = f"; its folders {folders} are a split for classification, which the retrieval benchmark is not"
        near = somewhere_near(root, self.marks)
        hint = f"; but {near} looks like it: set `root` to that" if near else ""
        raise DataError(
            f"{self.name}: {root} does not hold {self.expects}{found}{hint} (shortlist data about {self.name})"
        )

    def _present(self, catalog: Catalog, on_missing: str) -> Catalog:
        try:
            return without_missing(catalog, on_missing)
        except DataError as error:
            if first_with(catalog.root, [""], catalog.paths) is not None:  # some are where they should be
                raise
            above = catalog.root.absolute().parent
            if first_with(above, [""], catalog.paths) is not None:
                raise DataError(f"{error} {above} looks like it: set `root` to that") from error
            if (place := misplaced(catalog.root, str(catalog.paths[0]))) is not None:
                raise DataError(f"{error} {place} should be at {catalog.file(0)}") from error
            raise

    def _check_classes(self, catalog: Catalog) -> None:
        """No class both trains and tests: that is what these benchmarks are about."""
        train, test = (np.unique(catalog.labels[catalog.splits == split]) for split in ("train", "test"))
        shared = np.intersect1d(train, test)
        if len(shared):
            name = catalog.class_names[int(shared[0])]
            raise DataError(
                f"{self.name}: the class {name} both trains and tests ({len(shared)} such classes): these are not the "
                "lists of the retrieval benchmark"
            )

    def _deviations(self, catalog: Catalog) -> list[str]:
        found = []
        for part, expected in self.counts.items():
            rows = catalog.splits == part
            if catalog.roles is not None:
                rows |= catalog.roles == part
            classes = None if expected.classes is None else len(np.unique(catalog.labels[rows]))
            counted = Count(int(rows.sum()), classes)
            if counted != expected:
                found.append(f"{part}: lists {counted}, where {self.name} has {expected}")
        if not self.judged and (twice := len(catalog) - len(set(catalog.paths.tolist()))):
            found.append(f"images that are listed more than once: {twice:,}")
        return found

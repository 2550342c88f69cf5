"""Description of a benchmark, and the steps that open one: check the folder, read the lists, count, find the images."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shortlist.cache import cache_folder
from shortlist.data.benchmarks.folder_hints import find_misplaced, find_nearby, first_folder_with, split_folders
from shortlist.data.catalog import Catalog
from shortlist.data.missing_files import without_missing
from shortlist.errors import DataError
from shortlist.progress import Progress


@dataclass(frozen=True)
class ImageCount:
    """Number of images of a split or role, and its number of classes if the images are labelled."""

    images: int
    classes: int | None = None

    def __str__(self) -> str:
        return f"{self.images:,} images" + ("" if self.classes is None else f" of {self.classes:,} classes")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: how to obtain, open and report it.

    Args:
        name: Name that users open it by.
        about: Description in one sentence.
        read: Function of the benchmark's folder that returns the catalog of all listed images. A benchmark that needs
            no folder gets the cache folder unless the user gives one.
        protocol: Evaluation protocol; "training only" if there is no test split.
        k: Cut-offs that papers report.
        download: Download addresses, one per line.
        expects: Short description of the required content of the folder. None if no folder is needed.
        tree: The same as a directory tree, one entry per line.
        markers: Files or folders that identify the benchmark's folder; one of them must exist.
        counts: Expected counts per split or role.
        note: Further information to read before downloading.
        lookalikes: Files or folders that are easily confused with the markers -> explanation for the error message.
        judged: Whether queries have explicit lists of positives, so that mAP and mP@k are reported.
        writes: Whether `read` writes images on first use, and therefore also takes a callback `progress`.
    """

    name: str
    about: str
    read: Callable[..., Catalog]
    protocol: str
    k: tuple[int, ...]
    download: str
    expects: str | None
    tree: str = ""
    markers: tuple[str, ...] = ()
    counts: Mapping[str, ImageCount] = field(default_factory=dict)
    note: str = ""
    lookalikes: Mapping[str, str] = field(default_factory=dict)
    judged: bool = False
    writes: bool = False

    def load(self, root: Path | None, on_missing: str = "error", progress: Progress | None = None) -> Catalog:
        """Open the benchmark. Counts that differ from the expected ones are recorded in `Catalog.remarks`.

        Args:
            root: Folder that contains the benchmark.
            on_missing: "error", or "skip" to leave out images that do not exist.
            progress: Callback that is called with (done, total) while images are unpacked or rendered.

        Raises:
            DataError: If `root` is needed and not given, does not have the expected content, or images are missing and
                `on_missing` is "error".
        """
        root = self.check_root(root)
        folder = cache_folder("") if root is None else root
        catalog = self.read(folder, progress=progress) if self.writes else self.read(folder)
        self._check_classes(catalog)
        remarks = (*catalog.remarks, *self._deviations(catalog))
        return self._check_images(dataclasses.replace(catalog, remarks=remarks), on_missing)

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of the metrics that papers report, such as r@1."""
        if self.protocol.endswith("only"):
            return ()
        return ("mAP", *(f"mP@{k}" for k in self.k)) if self.judged else tuple(f"r@{k}" for k in self.k)

    def facts(self) -> dict[str, Any]:
        """Return the description as a dict that can be written as JSON."""
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
        """Return the description as text."""
        lines = [f"{self.name}: {self.about}", "", f"protocol   {self.protocol}"]
        lines += [f"reported   {', '.join(self.reported)}"] if self.reported else []
        lines += [f"{part:10} {count}" for part, count in self.counts.items()]
        lines += [f"{'' if number else 'download':10} {each}" for number, each in enumerate(self.download.splitlines())]
        lines += ["", textwrap.fill(self.note, 100)] if self.note else []
        if self.expects is None:
            return "\n".join([*lines, "", f"use        shortlist data show {self.name}"])
        tree = ["", "data.root is the folder that contains", *(f"    {line}" for line in self.tree.splitlines())]
        return "\n".join([*lines, *tree, "", f"use        shortlist data show {self.name} --root FOLDER"])

    def check_root(self, root: Path | None) -> Path | None:
        """Return the root if it is the benchmark's folder or not needed. Otherwise, the error suggests a folder."""
        if self.expects is None:
            return root
        if root is None:
            raise DataError(f"{self.name} needs its folder: set `root` to the folder that contains {self.expects}.")
        if not root.is_dir():
            raise DataError(f"{self.name}: the folder {root} does not exist; `root` must contain {self.expects}.")
        if any((root / marker).exists() for marker in self.markers):
            return root
        found = next((f"; {name} {what}" for name, what in self.lookalikes.items() if (root / name).exists()), "")
        if not found and (folders := split_folders(root)):
            found = f"; its folders {folders} are a classification split, not the retrieval benchmark"
        nearby = find_nearby(root, self.markers)
        hint = f"; {nearby} looks like the right folder: set `root` to it" if nearby else ""
        raise DataError(
            f"{self.name}: {root} does not contain {self.expects}{found}{hint} (shortlist data about {self.name})."
        )

    def _check_images(self, catalog: Catalog, on_missing: str) -> Catalog:
        """Handle images that do not exist. If none exists, the error suggests where they are."""
        try:
            return without_missing(catalog, on_missing)
        except DataError as error:
            if first_folder_with(catalog.root, [""], catalog.paths) is not None:  # the root is right
                raise
            parent = catalog.root.absolute().parent
            if first_folder_with(parent, [""], catalog.paths) is not None:
                raise DataError(f"{error} {parent} looks like the right folder: set `root` to it.") from error
            if (place := find_misplaced(catalog.root, str(catalog.paths[0]))) is not None:
                raise DataError(f"{error} {place} should be at {catalog.file(0)}.") from error
            raise

    def _check_classes(self, catalog: Catalog) -> None:
        """Check that no class is in both the training and the test split."""
        train, test = (np.unique(catalog.labels[catalog.splits == split]) for split in ("train", "test"))
        shared = np.intersect1d(train, test)
        if len(shared):
            name = catalog.class_names[int(shared[0])]
            raise DataError(
                f"{self.name}: {len(shared)} classes, such as {name}, are in both the training and the test list: "
                "these are not the lists of the retrieval benchmark."
            )

    def _deviations(self, catalog: Catalog) -> list[str]:
        """Describe counts that differ from the expected ones."""
        found = []
        for part, expected in self.counts.items():
            rows = catalog.splits == part
            if catalog.roles is not None:
                rows |= catalog.roles == part
            classes = None if expected.classes is None else len(np.unique(catalog.labels[rows]))
            counted = ImageCount(int(rows.sum()), classes)
            if counted != expected:
                found.append(f"{part}: the lists have {counted}, but {self.name} has {expected}")
        if not self.judged and (repeated := len(catalog) - len(set(catalog.paths.tolist()))):
            found.append(f"images that are listed more than once: {repeated:,}")
        return found

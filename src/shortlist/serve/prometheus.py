"""Counts and durations of requests in the text format of Prometheus, summed over all processes of a server."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

ROUTES = (  # measured separately; all other routes are measured together
    *("/api/search", "/api/items/{id}/similar", "/api/items/{id}/thumbnail", "/api/items/{id}/image"),
    *("/api/gallery", "/api/items", "/api/items/{id}", "/api/health", "/api/ready", "/metrics"),
    "other",
)
STATUSES = (*(200, 204, 304, 400, 401, 403, 404, 405, 408, 413, 415, 422, 500, 503), 0)  # 0: all others
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, inf)  # seconds
GAUGES = {
    "requests_in_progress": "Requests that have not been answered yet.",
    "requests_waiting": "Requests that wait for a thread.",
}
DESCRIPTIONS = {
    **GAUGES,
    "gallery_images": "Images of the gallery.",
    "gallery_info": "The gallery in use, with its identifier and the fingerprint of its model. Always 1.",
    "info": "The version of shortlist. Always 1.",
}
_SHAPE = (len(ROUTES), len(STATUSES), len(BUCKETS) + 1)  # requests by duration, and the sum of the durations
_SIZE = int(np.prod(_SHAPE))
Values = NDArray[np.float64]


class Metrics:
    """Counts and durations of the requests of a process. Only its event loop may change them.

    Args:
        folder: Folder that the processes of a server share, in which each has a file. None: this is the only process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._values: Values = np.zeros(_SIZE + len(GAUGES))
        if folder is not None:
            self._values = np.memmap(folder / str(os.getpid()), np.float64, "w+", shape=self._values.shape)
        self._durations = self._values[:_SIZE].reshape(_SHAPE)

    def record(self, route: str, status: int, seconds: float) -> None:
        """Count a request that has been answered."""
        at = self._durations[_index(ROUTES, route), _index(STATUSES, status)]
        at[bisect_left(BUCKETS, seconds)] += 1
        at[-1] += seconds

    def change(self, gauge: str, by: int) -> None:
        """Increase or decrease one of `GAUGES`."""
        self._values[_SIZE + list(GAUGES).index(gauge)] += by

    def text(self, gauges: Mapping[str, float], facts: Mapping[str, Mapping[str, str]]) -> str:
        """Return all metrics of all processes.

        Args:
            gauges: Further values, by name; the names are in `DESCRIPTIONS`.
            facts: Labels of metrics whose value is always 1, by name.
        """
        total, current = self._sums()
        lines = list(_histogram(total[:_SIZE].reshape(_SHAPE)))
        for name, number in {**dict(zip(GAUGES, current[_SIZE:], strict=True)), **gauges}.items():
            lines += [*_header(name, "gauge", DESCRIPTIONS[name]), f"shortlist_{name} {number:.15g}"]
        for name, labels in facts.items():
            lines += [*_header(name, "gauge", DESCRIPTIONS[name]), f"shortlist_{name}{_labels(**labels)} 1"]
        return "\n".join(lines) + "\n"

    def _sums(self) -> tuple[Values, Values]:
        """Return the sum over all processes, including those that have ended, and the sum over running processes."""
        total, current = np.zeros_like(self._values), np.zeros_like(self._values)
        if self.folder is None:
            return total + self._values, current + self._values
        for file in self.folder.iterdir():
            values: Values = np.fromfile(file)
            if values.shape == total.shape:  # otherwise, the process has just started
                total += values
                current += values if psutil.pid_exists(int(file.name)) else 0
        return total, current


def _histogram(durations: Values) -> Iterator[str]:
    name = "shortlist_request_seconds"
    meaning = "Duration of requests, from the first byte of the header to the last byte of the answer."
    yield from _header("request_seconds", "histogram", meaning)
    for i, j in zip(*np.nonzero(durations[..., :-1].any(-1)), strict=True):
        status = str(STATUSES[j] or "other")
        counts = durations[i, j, :-1].cumsum()
        for bound, count in zip(BUCKETS, counts, strict=True):
            at_most = "+Inf" if bound == inf else f"{bound:g}"
            yield f"{name}_bucket{_labels(route=ROUTES[i], status=status, le=at_most)} {count:.15g}"
        yield f"{name}_sum{_labels(route=ROUTES[i], status=status)} {durations[i, j, -1]:.15g}"
        yield f"{name}_count{_labels(route=ROUTES[i], status=status)} {counts[-1]:.15g}"


def _header(name: str, kind: str, meaning: str) -> tuple[str, str]:
    return f"# HELP shortlist_{name} {meaning}", f"# TYPE shortlist_{name} {kind}"


def _labels(**values: str) -> str:
    r"""Return labels in braces.

    >>> print(_labels(route="/a", name='the "b"'))
    {route="/a",name="the \"b\""}
    """
    escaped = (
        (name, each.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, each in values.items()
    )
    return "{" + ",".join(f'{name}="{each}"' for name, each in escaped) + "}"


def _index(known: tuple[object, ...], value: object) -> int:
    return known.index(value) if value in known else len(known) - 1

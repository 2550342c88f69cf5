"""Segments of a gallery's folder: the images added by one or more changes, and updates of earlier images.

The files of a segment never change. A change adds a segment, and merges it with others if there are many small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from shortlist.files import atomic_replace, file_digest, sample_digest
from shortlist.gallery.manifest import RECORDS, VECTORS, SegmentFacts
from shortlist.gallery.store import Floats, Ids, Row
from shortlist.search.vectors import StackedVectors, open_vectors

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("path", pa.string()),
        ("label", pa.string()),
        ("size", pa.int64()),
        ("modified", pa.int64()),
        ("fields", pa.string()),  # JSON object
        ("removed", pa.bool_()),  # the row is still in the vectors and in the index
    ]
)
MIN_MERGED = 8  # minimum number of segments to merge
_COPIED_VECTORS = 16_384  # number of vectors copied at a time


@dataclass(frozen=True, eq=False)
class Segment:
    """A segment, without the records of its images, which are in the table of the gallery.

    Args:
        number: Number of the change that wrote it, which is in the names of its files.
        vectors: Vectors of its images, (n, d), memory-mapped.
        updated: Ids of images of earlier segments that have newer records in this segment.
        facts: Its entry in the manifest; None if its files have not been written.
    """

    number: int
    vectors: Floats
    updated: Ids
    facts: SegmentFacts | None = None

    @property
    def size(self) -> int:
        """Number of records."""
        return len(self.vectors) + len(self.updated)


def first_to_merge(sizes: Sequence[int]) -> int:
    """Return the index of the first segment to merge; all segments from it to the last are merged into one.

    Segments are merged if there are at least `MIN_MERGED` of them, and the first is not larger than the others
    together. The number of segments, and how often a record is rewritten, therefore grow with the logarithm of the
    number of images.

    Args:
        sizes: Number of records of each segment; the new segment is the last.
    """
    for first in range(len(sizes) - MIN_MERGED + 1):
        if sizes[first] <= sum(sizes[first + 1 :]):
            return first
    return len(sizes) - 1


def new_rows(rows: Sequence[Row], ids: Sequence[int]) -> pa.Table:
    """Return a table of images to add, with these ids."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(Row._fields)
    values = [ids, *columns, [False] * len(rows)]
    return pa.table([pa.array(each, kind) for each, kind in zip(values, SCHEMA.types, strict=True)], schema=SCHEMA)


def with_updates(rows: pa.Table, updates: pa.Table) -> pa.Table:
    """Return records with the labels, fields and removal marks of newer records of the same images.

    Args:
        rows: Records in the order of their ids, in one chunk.
        updates: Newer records. The last record of an image applies.
    """
    if not len(updates):
        return rows
    at = np.searchsorted(rows["id"].to_numpy(), updates["id"].to_numpy())
    removed: NDArray[np.bool_] = rows["removed"].to_numpy().copy()
    removed[at] |= updates["removed"].to_numpy()
    rows = with_column(rows, "removed", pa.array(removed))
    changed = np.flatnonzero(~updates["removed"].to_numpy())[::-1]
    if not len(changed):
        return rows
    at, last = np.unique(at[changed], return_index=True)
    is_new = np.zeros(len(rows), dtype=np.bool_)
    is_new[at] = True
    for name in ("label", "fields"):
        values = updates[name].combine_chunks().take(pa.array(changed[last]))
        rows = with_column(rows, name, pc.replace_with_mask(rows[name].combine_chunks(), is_new, values))
    return rows


def with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """Return the table with new values in a column."""
    return table.set_column(table.schema.get_field_index(name), name, values)


def write_segment(
    folder: Path, number: int, rows: pa.Table, vectors: StackedVectors, at: Ids, updates: pa.Table
) -> Segment:
    """Write the files of a segment, and open them.

    Args:
        folder: The gallery's folder.
        number: Number of the change.
        rows: Records of the segment's images, (n,).
        vectors: Vectors, including those of the images.
        at: Positions of the images among the vectors, (n,).
        updates: Newer records of images of earlier segments.
    """
    file = folder / VECTORS.format(number)
    header = {"descr": "<f4", "fortran_order": False, "shape": (len(at), vectors.shape[1])}
    if len(at):
        with atomic_replace(file) as temporary, temporary.open("wb") as stream:
            np.lib.format.write_array_header_1_0(stream, header)
            for start in range(0, len(at), _COPIED_VECTORS):
                stream.write(vectors[at[start : start + _COPIED_VECTORS]].astype("<f4", copy=False).data)
    with atomic_replace(folder / RECORDS.format(number)) as temporary:
        pq.write_table(pa.concat_tables([rows, updates]), temporary)
    facts = SegmentFacts(
        number=number,
        rows=len(at),
        updates=len(updates),
        records_sha256=file_digest(folder / RECORDS.format(number)),
        **({"vectors_sha256": file_digest(file), "vectors_sample": sample_digest(file)} if len(at) else {}),
    )
    return Segment(number, _open_vectors(file, len(at), vectors.shape[1]), updates["id"].to_numpy(), facts)


def read_segment(folder: Path, facts: SegmentFacts, dim: int) -> tuple[Segment, pa.Table, pa.Table]:
    """Open a segment, and read the records of its images and the newer records of images of earlier segments.

    Raises:
        ValueError: Its files do not have the sizes or digests in the manifest.
    """
    file, vectors_file = folder / RECORDS.format(facts.number), folder / VECTORS.format(facts.number)
    check_digest(file, file_digest(file), facts.records_sha256)
    table = pq.read_table(file, schema=SCHEMA, memory_map=False)
    if len(table) != facts.rows + facts.updates:
        raise ValueError(f"{file.name} has {len(table):,} records, not {facts.rows + facts.updates:,}")
    vectors = _open_vectors(vectors_file, facts.rows, dim)
    if facts.rows:
        check_digest(vectors_file, sample_digest(vectors_file), facts.vectors_sample)
    rows, updates = table.slice(0, facts.rows), table.slice(facts.rows)
    return Segment(facts.number, vectors, updates["id"].to_numpy(), facts), rows, updates


def check_digest(file: Path, found: str, expected: str) -> None:
    """Raise a ValueError if the digest of a file differs from the one in the manifest."""
    if found != expected:
        raise ValueError(f"{file.name} differs from what was written")


def _open_vectors(file: Path, number: int, dim: int) -> Floats:
    vectors = open_vectors(file) if number else np.empty((0, dim), dtype=np.float32)
    if vectors.shape != (number, dim):
        raise ValueError(f"{file.name} has vectors of shape {vectors.shape}, not {(number, dim)}")
    return vectors

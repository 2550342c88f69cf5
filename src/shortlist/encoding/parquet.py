"""Embeddings in a Parquet file (path, label, vector), which vector databases and data frames can read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shortlist.data import Catalog
from shortlist.data.loader import decoding_workers
from shortlist.distributed import current_processes
from shortlist.encoding.embed import NoReadableImageError
from shortlist.encoding.encoder import Encoder
from shortlist.encoding.shards import Parts, encode_readable, existing_files
from shortlist.errors import DataError
from shortlist.extras import extra
from shortlist.files import (
    VERSION,
    atomic_replace,
    check_version,
    exclusive_write,
    parse_json,
    remove_unfinished,
    validated,
)
from shortlist.progress import Display, Progress, default_display

with extra("training", "A table of vectors"):
    import pyarrow as pa
    import pyarrow.parquet as pq

METADATA = b"shortlist"  # key in the metadata of the schema
_ROWS = 8_192  # rows per row group, and in memory at a time

Box = tuple[float, ...] | None
Key = tuple[str, Box]  # identifies an image, or a part of an image
Label = str | list[str] | None  # a list if images have several labels
Stamp = tuple[int, int]  # size and modification time


@dataclass
class EmbedResult:
    """Numbers of embedded, kept and dropped images, and the unreadable images.

    Args:
        embedded: New or changed images, which were embedded.
        kept: Unchanged images whose vectors were kept.
        dropped: Vectors that were removed, since their images are no longer in the catalog or have changed.
        unreadable: Paths of images that are missing or cannot be read, and the reasons.
    """

    embedded: int = 0
    kept: int = 0
    dropped: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Image:
    index: int  # in the catalog
    label: Label
    stamp: Stamp


def embed_to_table(
    encoder: Encoder,
    catalog: Catalog,
    path: Path | str,
    *,
    workers: int | None = None,
    parts: Path | str | None = None,
    display: Display | None = None,
) -> EmbedResult:
    """Write the embeddings of all readable images to a Parquet file, or update an existing file.

    The columns are path (absolute), label (a list if images have several), vector, size, modified, and box if the
    catalog has boxes. Images whose vectors the file already has are not embedded again. Only a part of the file is held
    in memory. If the process is killed, the existing file is unchanged, and the same call resumes.

    Args:
        encoder: Encoder that computes the vectors.
        catalog: The images. The class name "" means that an image has no label.
        path: Path of the file. Its folder is created.
        workers: Number of processes that decode images. Default: chosen by the number of cores and images.
        parts: Folder of the parts that shards have embedded (see `Parts.embed`), which are merged and then deleted.
        display: Shows the progress.

    Raises:
        DataError: No image can be read, or the existing file was not written by this function with the same model.
        IncompletePartsError: The parts do not contain every image.
        RunError: Another process is writing the file, or a later version of shortlist has written it.
    """
    path, display = Path(path), display or default_display()
    if workers is None:
        workers = decoding_workers(len(catalog), current_processes().on_this_machine)
    merged = None if parts is None else Parts(parts, encoder, catalog)
    with exclusive_write(path), display.task(f"embedding {catalog.name}", "images") as progress:
        remove_unfinished(path)
        result = _TableUpdate(encoder, catalog, path, merged).run(workers, progress)
    if merged is not None:
        merged.remove()
    return result


class _TableUpdate:
    def __init__(self, encoder: Encoder, catalog: Catalog, path: Path, parts: Parts | None) -> None:
        self.encoder, self.catalog, self.path, self.parts = encoder, catalog, path, parts
        self.work = path.with_name(f".{path.name}.embedding")
        self.result = EmbedResult()
        self.schema = _schema(encoder, catalog)
        self.images = dict(self._images())

    def run(self, workers: int, progress: Progress) -> EmbedResult:
        existing = self._existing_rows()
        kept = {key for key, (_, stamp) in existing.items() if key in self.images and self.images[key].stamp == stamp}
        new = {key: image for key, image in self.images.items() if key not in kept}
        unreadable, indices = self.result.unreadable, [image.index for image in new.values()]
        settings: dict[str, Any] = {"parts": self.parts, "workers": workers, "progress": progress}
        vectors = encode_readable(
            self.encoder, self.catalog, self.work / "vectors.npy", indices, unreadable, **settings
        )
        new = {key: image for key, image in new.items() if key[0] not in unreadable}
        if not new and not kept:
            raise NoReadableImageError(self.catalog.name, unreadable)
        if len(vectors) != len(new):
            raise DataError(f"{self.catalog.name}: an image with several boxes can be read for only some of them.")
        self.result.embedded, self.result.kept = len(new), len(kept)
        self.result.dropped = len(existing) - len(kept)
        relabelled = any(existing[key][0] != self.images[key].label for key in kept)
        if new or self.result.dropped or relabelled:
            with (
                atomic_replace(self.path) as temporary,
                pq.ParquetWriter(temporary, self.schema, write_page_checksum=True) as writer,
            ):
                for batch in self._kept_batches(kept):
                    writer.write_batch(batch)
                for batch in self._new_batches(list(new.items()), vectors):
                    writer.write_batch(batch)
        else:
            for _ in self._kept_batches(kept):
                pass  # their checksums are verified
        shutil.rmtree(self.work, ignore_errors=True)
        return self.result

    def _images(self) -> Iterator[tuple[Key, _Image]]:
        for index, path, stamp in existing_files(self.catalog, self.result.unreadable):
            box = self.catalog.box(index)
            yield (path, None if box is None else tuple(box)), _Image(index, _label(self.catalog, index), stamp)

    def _existing_rows(self) -> dict[Key, tuple[Label, Stamp]]:
        """Read the label and stamp of each row of the existing file."""
        if not self.path.exists():
            return {}
        schema = _read_schema(self.path)
        facts, ours = (_read_facts(each, self.path) for each in (schema, self.schema))
        if not facts:
            raise DataError(f"{self.path} exists and was not written by shortlist embed: choose another file.")
        check_version(facts.get("format"), self.path)
        if facts.get("fingerprint") != ours["fingerprint"]:
            raise DataError(f"{self.path} holds vectors of another model: choose another file, or delete it.")
        names = [name for name in schema.names if name != "vector"]
        with _reading(self.path):
            rows = pq.read_table(self.path, columns=names, page_checksum_verification=True).to_pylist()
            return {_key(row): (row["label"], (row["size"], row["modified"])) for row in rows}

    def _kept_batches(self, kept: set[Key]) -> Iterator[pa.RecordBatch]:
        """Yield the rows to keep of the existing file, with their current labels."""
        if not kept:
            return
        left = len(kept)
        with _reading(self.path), pq.ParquetFile(self.path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(_ROWS):
                keys = [_key(row) for row in batch.drop_columns("vector").to_pylist()]
                mask = [key in kept for key in keys]
                left -= sum(mask)
                labels = [self.images[key].label if key in kept else None for key in keys]
                values = {**{name: batch.column(name) for name in batch.schema.names}, "label": labels}
                columns = [
                    pa.array(values[each.name], each.type) if each.name in values else pa.nulls(len(keys), each.type)
                    for each in self.schema
                ]
                yield pa.record_batch(columns, schema=self.schema).filter(pa.array(mask))
        if left > 0:  # its footer, which has no checksum, describes the columns
            raise DataError(f"{self.path} is damaged ({left} vectors are missing): choose another file, or delete it.")

    def _new_batches(self, images: list[tuple[Key, _Image]], vectors: Any) -> Iterator[pa.RecordBatch]:
        for start in range(0, len(images), _ROWS):
            group = images[start : start + _ROWS]
            flat_vectors = pa.array(np.array(vectors[start : start + _ROWS]).ravel())
            columns = {
                "path": [key[0] for key, _ in group],
                "label": [image.label for _, image in group],
                "vector": pa.FixedSizeListArray.from_arrays(flat_vectors, self.encoder.dim),
                "size": [image.stamp[0] for _, image in group],
                "modified": [image.stamp[1] for _, image in group],
                "box": [key[1] for key, _ in group],
            }
            yield pa.record_batch([pa.array(columns[each.name], each.type) for each in self.schema], schema=self.schema)


def _label(catalog: Catalog, index: int) -> Label:
    """Return the label of an image, or the list of its labels if images have several; None if it has none."""
    names = [name for name in catalog.label_names(index) if name]
    return names if names and catalog.label_sets is not None else next(iter(names), None)


def _schema(encoder: Encoder, catalog: Catalog) -> pa.Schema:
    fields = [
        ("path", pa.string()),
        ("label", pa.string() if catalog.label_sets is None else pa.list_(pa.string())),
        ("vector", pa.list_(pa.float32(), encoder.dim)),
        ("size", pa.int64()),  # bytes
        ("modified", pa.int64()),  # nanoseconds
        *([] if catalog.boxes is None else [("box", pa.list_(pa.float64(), 4))]),  # left, top, right, bottom
    ]
    facts = {"format": VERSION, "fingerprint": encoder.fingerprint}
    return pa.schema(fields, metadata={METADATA: json.dumps(facts).encode()})


def _read_schema(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"{path} exists and is not a Parquet file: choose another file ({error}).") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert errors of pyarrow, and those caused by unexpected contents, to a DataError."""
    try:
        yield
    except (OSError, UnicodeDecodeError, KeyError, TypeError, pa.ArrowException) as error:
        raise DataError(f"{path} is damaged ({error}): choose another file, or delete it.") from error


def _read_facts(schema: pa.Schema, path: Path) -> dict[str, Any]:
    """Return the description of the vectors in a file's metadata; empty if shortlist has not written the file."""
    text = (schema.metadata or {}).get(METADATA, b"{}").decode(errors="replace")
    facts: dict[str, Any] = validated(parse_json(text, path), path, dict[str, Any])
    return facts


def _key(row: dict[str, Any]) -> Key:
    box = row.get("box")
    return row["path"], None if box is None else tuple(box)

"""Embeddings in a Parquet file: path, label, vector; what vector databases and data frames read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shortlist.data import Catalog
from shortlist.encoding.embed import NothingReadable, absolute, encode_to_file, stamp
from shortlist.encoding.encoder import Encoder
from shortlist.encoding.vector_file import left_out
from shortlist.errors import DataError
from shortlist.extras import extra
from shortlist.files import atomic_replace, exclusive_write, remove_unfinished
from shortlist.progress import Display, default_display
from shortlist.search.vectors import Progress, open_vectors

with extra("training", "A table of vectors"):
    import pyarrow as pa
    import pyarrow.parquet as pq

METADATA = b"shortlist"  # the key in the schema's metadata
_ROWS = 8_192  # of a row group: what is in memory

Box = tuple[float, ...] | None
Key = tuple[str, Box]  # an image, or a part of it
Stamp = tuple[int, int]  # size and time of the last change


@dataclass
class Embedded:
    """What became of the images."""

    embedded: int = 0
    kept: int = 0  # were there, and have not changed
    dropped: int = 0  # were there, and are not among the images any more
    unreadable: list[str] = field(default_factory=list)  # or not there


@dataclass(frozen=True)
class _Image:
    place: int  # in the catalog
    label: str | None
    stamp: Stamp


def embed_to_table(
    encoder: Encoder,
    catalog: Catalog,
    path: Path | str,
    *,
    workers: int = 0,
    display: Display | None = None,
) -> Embedded:
    """Write the embeddings of all images that can be read; those that the file has already are not embedded again.

    The file has the columns path (absolute), label, vector, size and modified, and box where the catalog has boxes.
    Only a part of it is in memory. Killed, the same call goes on, and the file that was there is as it was.

    Args:
        encoder: what gives an image its vector.
        catalog: the images; the class "" stands for no label.
        path: of the file; its folder is made.
        workers: processes that decode.
        display: for progress.

    Raises:
        DataError: no image can be read, or the file is none of ours, or of another model.
        RunError: another process is writing it.
    """
    path, display = Path(path), display or default_display()
    with exclusive_write(path), display.task(f"embedding {catalog.name}", "images") as progress:
        remove_unfinished(path)
        return _Writing(encoder, catalog, path).run(workers, progress)


class _Writing:
    def __init__(self, encoder: Encoder, catalog: Catalog, path: Path) -> None:
        self.encoder, self.catalog, self.path = encoder, catalog, path
        self.work = path.with_name(f".{path.name}.embedding")
        self.done = Embedded(unreadable=[absolute(catalog.root / each) for each in catalog.missing])
        self.schema = _schema(encoder, catalog)
        self.images = dict(self._images())

    def run(self, workers: int, progress: Progress) -> Embedded:
        there = self._there()
        kept = {key for key, (_, stamped) in there.items() if key in self.images and self.images[key].stamp == stamped}
        new = {key: image for key, image in self.images.items() if key not in kept}
        vectors = self._embed([image.place for image in new.values()], workers, progress)
        unreadable = set(self.done.unreadable)
        new = {key: image for key, image in new.items() if key[0] not in unreadable}
        if not new and not kept:
            raise DataError(f"{self.catalog.name}: none of its {len(unreadable):,} images can be read")
        if len(vectors) != len(new):
            raise DataError(f"{self.catalog.name}: of an image that is listed with several boxes, one cannot be read")
        self.done.embedded, self.done.kept, self.done.dropped = len(new), len(kept), len(there) - len(kept)
        relabelled = any(there[key][0] != self.images[key].label for key in kept)
        if new or self.done.dropped or relabelled:
            with atomic_replace(self.path) as temporary, pq.ParquetWriter(temporary, self.schema) as writer:
                for batch in self._old(kept):
                    writer.write_batch(batch)
                for batch in self._new(list(new.items()), vectors):
                    writer.write_batch(batch)
        shutil.rmtree(self.work, ignore_errors=True)
        return self.done

    def _images(self) -> Iterator[tuple[Key, _Image]]:
        catalog = self.catalog
        for place in range(len(catalog)):
            path = absolute(catalog.file(place))
            stamped = stamp(Path(path))
            if stamped is None:
                self.done.unreadable.append(path)
                continue
            box = None if catalog.boxes is None or np.isnan(catalog.boxes[place, 0]) else catalog.boxes[place]
            key = (path, None if box is None else tuple(box.tolist()))
            yield key, _Image(place, catalog.class_names[catalog.labels[place]] or None, stamped)

    def _there(self) -> dict[Key, tuple[str | None, Stamp]]:
        """Label and stamp of what the file has already."""
        if not self.path.exists():
            return {}
        schema = _read_schema(self.path)
        facts, ours = (json.loads((each.metadata or {}).get(METADATA, b"{}")) for each in (schema, self.schema))
        if not facts:
            raise DataError(
                f"{self.path} is there already, and was not written by shortlist embed: choose another file"
            )
        if facts["fingerprint"] != ours["fingerprint"]:
            raise DataError(f"{self.path} holds vectors of another model: choose another file, or delete it")
        names = [name for name in schema.names if name != "vector"]
        found = pq.read_table(self.path, columns=names).to_pylist()
        return {_key(each): (each["label"], (each["size"], each["modified"])) for each in found}

    def _embed(self, places: list[int], workers: int, progress: Progress) -> Any:
        file = self.work / "vectors.npy"
        if not places:
            return []
        try:
            encode_to_file(self.encoder, self.catalog.subset(places), file, workers=workers, progress=progress)
        except NothingReadable:
            self.done.unreadable += [absolute(self.catalog.file(place)) for place in places]
            return []
        self.done.unreadable += sorted({absolute(each) for each in left_out(file)})
        return open_vectors(file)

    def _old(self, kept: set[Key]) -> Iterator[pa.RecordBatch]:
        if not kept:
            return
        with pq.ParquetFile(self.path) as file:
            for batch in file.iter_batches(_ROWS):
                keys = [_key(each) for each in batch.drop_columns("vector").to_pylist()]
                mask = [key in kept for key in keys]
                labels = [self.images[key].label if key in kept else None for key in keys]
                whole = {**{name: batch.column(name) for name in batch.schema.names}, "label": labels}
                columns = [
                    pa.nulls(len(keys), each.type) if each.name not in whole else pa.array(whole[each.name], each.type)
                    for each in self.schema
                ]
                yield pa.record_batch(columns, schema=self.schema).filter(pa.array(mask))

    def _new(self, images: list[tuple[Key, _Image]], vectors: Any) -> Iterator[pa.RecordBatch]:
        for start in range(0, len(images), _ROWS):
            some = images[start : start + _ROWS]
            numbers = pa.array(np.array(vectors[start : start + _ROWS]).ravel())
            columns = {
                "path": [key[0] for key, _ in some],
                "label": [image.label for _, image in some],
                "vector": pa.FixedSizeListArray.from_arrays(numbers, self.encoder.dim),
                "size": [image.stamp[0] for _, image in some],
                "modified": [image.stamp[1] for _, image in some],
                "box": [key[1] for key, _ in some],
            }
            yield pa.record_batch([pa.array(columns[each.name], each.type) for each in self.schema], schema=self.schema)


def _schema(encoder: Encoder, catalog: Catalog) -> pa.Schema:
    fields = [
        ("path", pa.string()),
        ("label", pa.string()),
        ("vector", pa.list_(pa.float32(), encoder.dim)),
        ("size", pa.int64()),
        ("modified", pa.int64()),  # nanoseconds
        *([] if catalog.boxes is None else [("box", pa.list_(pa.float64(), 4))]),  # left, top, right, bottom
    ]
    facts = {"format": 1, "fingerprint": encoder.fingerprint}
    return pa.schema(fields, metadata={METADATA: json.dumps(facts).encode()})


def _read_schema(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is there already, and is no Parquet file: choose another file ({error})") from error


def _key(row: dict[str, Any]) -> Key:
    box = row.get("box")
    return row["path"], None if box is None else tuple(box)

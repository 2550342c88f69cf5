"""A gallery in a collection of Milvus: where one machine is not enough, or a vector database is there already."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shortlist.encoding.encoder import Encoder
from shortlist.errors import ConfigError
from shortlist.gallery.milvus_address import MilvusAddress, translate_errors
from shortlist.gallery.store import Floats, GalleryError, Hit, Item, Known, NoSuchItem, Row
from shortlist.progress import Progress
from shortlist.search.faiss_index import BYTES_PER_VECTOR, HNSW_CONSTRUCTION_CANDIDATES, HNSW_LINKS, check_kind

FORMAT = 1
FACTS, NEXT_ID = "shortlist.facts", "shortlist.next_id"  # properties of the collection
MOST = 16_384  # rows that Milvus gives at once
ROWS = 1_000  # to insert, or to ask for by path, at once: below the 64 MB of a message at 4,096 dimensions
INDEXES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # Milvus's name, how to build it, how to search it
    "flat": ("FLAT", {}, {}),
    "hnsw": ("HNSW", {"M": HNSW_LINKS, "efConstruction": HNSW_CONSTRUCTION_CANDIDATES}, {"ef": 128}),
    "ivfpq": ("IVF_PQ", {"nlist": 1024, "m": BYTES_PER_VECTOR, "nbits": 8}, {"nprobe": 64}),
}


class MilvusStore:
    """A collection, as `Store` says. One process at a time may change it."""

    at_once = 8 * ROWS  # what a kill may cost

    def __init__(self, place: MilvusAddress, client: Any = None) -> None:
        if place.lite and client is None and not Path(place.uri).exists():
            raise GalleryError(f"there is no {place.uri}. Make a gallery: shortlist index")
        self.place = place
        self.client = client or place.connect()
        try:
            with translate_errors(place):
                if not self.client.has_collection(place.collection):
                    there = ", ".join(sorted(self.client.list_collections())) or "none"
                    raise GalleryError(f"{place}: there is no such collection (collections that are there: {there})")
                self._properties = dict(self.client.describe_collection(place.collection)["properties"])
                if FACTS not in self._properties:
                    raise GalleryError(f"{place} is a collection, but no gallery of shortlist: choose another name")
                self._facts: dict[str, Any] = json.loads(self._properties[FACTS])
                if self._facts["format"] > FORMAT:
                    raise GalleryError(f"{place} was written by a later version of shortlist: update shortlist")
                self.client.load_collection(place.collection)
        except GalleryError:
            self.close()
            raise
        self._labels: dict[str, int] | None = None

    @classmethod
    def create(cls, place: MilvusAddress, encoder: Encoder, model: Path, kind: str = "auto") -> MilvusStore:
        """An empty gallery.

        Args:
            place: where.
            encoder: what gives its vectors.
            model: the folder with the encoder's embedder, which is not copied.
            kind: of the index; Milvus Lite's is always exact.

        Raises:
            ConfigError: there is no such kind, or Milvus Lite has not.
        """
        check_kind(kind)
        if place.lite and kind in ("hnsw", "ivfpq"):
            raise ConfigError(f"the index of a gallery in a file of Milvus Lite is flat, not {kind}: leave `kind` out")
        if kind == "auto":
            kind = "flat" if place.lite else "hnsw"  # who runs a server has many images
        facts = {
            "format": FORMAT,
            "fingerprint": encoder.fingerprint,
            "dim": encoder.dim,
            "kind": kind,
            "model": str(model.absolute()),
            "encoder": encoder.settings(),
        }
        client = place.connect()
        with translate_errors(place):
            schema, indexes = _schema(client, encoder.dim, kind)
            client.create_collection(place.collection, schema=schema, index_params=indexes, consistency_level="Strong")
            client.alter_collection_properties(place.collection, {FACTS: json.dumps(facts), NEXT_ID: "0"})
        return cls(place, client)

    def close(self) -> None:
        self.client.close()

    def refresh(self) -> None:
        self._labels = None

    @property
    def name(self) -> str:
        return self.place.collection

    @property
    def dim(self) -> int:
        return int(self._facts["dim"])

    @property
    def fingerprint(self) -> str:
        return str(self._facts["fingerprint"])

    @property
    def asked_kind(self) -> str:
        return str(self._facts["kind"])

    def encoder(self, model: Path | None) -> Encoder:
        folder = Path(self._facts["model"]) if model is None else model
        if not folder.is_dir():
            raise GalleryError(
                f"the run {folder}, whose model gave {self.place} its vectors, is not there: say where it is with "
                "`model`"
            )
        return Encoder.load(folder, self._facts["encoder"])

    def facts(self) -> dict[str, Any]:
        return {"place": str(self.place), "kind": self._facts["kind"], "recall": None}

    def __len__(self) -> int:
        with translate_errors(self.place):
            (found,) = self.client.query(self.place.collection, filter="", output_fields=["count(*)"])
        return int(found["count(*)"])

    def item(self, id: int) -> Item:  # noqa: A002
        return _item(self._get([id], ["path", "label"])[0])

    def items(self, label: str | None, offset: int, limit: int) -> list[Item]:
        found = self._scan(_labelled(label), ["path", "label"], batch=min(MOST, max(1, offset + limit)))
        return [_item(each) for each in islice(found, offset, offset + limit)]

    def labels(self) -> dict[str, int]:
        if self._labels is None:
            counts = Counter(each["label"] for each in self._scan("", ["label"]) if each["label"] is not None)
            self._labels = dict(sorted(counts.items()))
        return dict(self._labels)

    def vectors(self, ids: Sequence[int]) -> Floats:
        found = self._get(ids, ["vector"])
        return np.array([each["vector"] for each in found], dtype=np.float32).reshape(len(ids), self.dim)

    def search(self, vectors: Floats, k: int, label: str | None) -> list[list[Hit]]:
        with translate_errors(self.place):
            found = self.client.search(
                self.place.collection,
                list(vectors),
                filter=_labelled(label),
                limit=min(k, MOST),
                output_fields=["path", "label"],
                search_params={"metric_type": "IP", "params": INDEXES[self._facts["kind"]][2]},
            )
        hits = [[Hit(_item({"id": each["id"], **each["entity"]}), each["distance"]) for each in some] for some in found]
        return [sorted(each, key=lambda hit: (-hit.score, hit.item.id)) for each in hits]

    def known(self, paths: Sequence[str]) -> Mapping[str, list[Known]]:
        found: dict[str, list[Known]] = {}
        for start in range(0, len(paths), ROWS):
            some = f"path in {json.dumps(list(paths[start : start + ROWS]), ensure_ascii=False)}"
            for each in self._scan(some, list(Row._fields)):
                row = Row(*(each[name] for name in Row._fields))
                found.setdefault(row.path, []).append(Known(each["id"], row))
        return found

    def below(self, folder: str) -> list[int]:
        inside = folder.rstrip("/")
        ends = (_quoted(each) for each in (folder, f"{inside}/", f"{inside}0"))  # 0 comes after /
        return [each["id"] for each in self._scan("path == {} or (path >= {} and path < {})".format(*ends), [])]

    @contextmanager
    def changing(self) -> Iterator[Path]:
        """A file of Milvus Lite is open in one process only; on a server, nothing keeps others from changing it."""
        with tempfile.TemporaryDirectory() as work:
            yield Path(work)

    def change(
        self,
        rows: Sequence[Row] = (),
        vectors: Floats | None = None,
        *,
        removed: Sequence[int] = (),
        labels: Mapping[int, str | None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._labels = None
        if rows and vectors is not None:
            self._insert(rows, vectors, progress)
        for start in range(0, len(labels or {}), ROWS):
            some = dict(islice((labels or {}).items(), start, start + ROWS))
            whole = self._get(list(some), ["vector", *Row._fields])
            with translate_errors(self.place):
                self.client.upsert(self.place.collection, [{**each, "label": some[each["id"]]} for each in whole])
        for start in range(0, len(removed), ROWS):
            with translate_errors(self.place):
                self.client.delete(self.place.collection, ids=list(removed[start : start + ROWS]))

    def _insert(self, rows: Sequence[Row], vectors: Floats, progress: Progress | None) -> None:
        with translate_errors(self.place):
            properties = self.client.describe_collection(self.place.collection)["properties"]
            first = int(properties[NEXT_ID])
            # Before the rows: a kill may waste ids, but never lets one be used twice.
            self.client.alter_collection_properties(self.place.collection, {NEXT_ID: str(first + len(rows))})
            for start in range(0, len(rows), ROWS):
                some = enumerate(rows[start : start + ROWS], start)
                data = [{"id": first + at, "vector": vectors[at], **row._asdict()} for at, row in some]
                self.client.insert(self.place.collection, data)
                if progress is not None:
                    progress(start + len(data), len(rows))

    def _get(self, ids: Sequence[int], fields: list[str]) -> list[dict[str, Any]]:
        """Rows in the order of the ids."""
        found: dict[int, dict[str, Any]] = {}
        for start in range(0, len(ids), ROWS):
            some = list(ids[start : start + ROWS])
            with translate_errors(self.place):
                got = self.client.get(self.place.collection, ids=some, output_fields=["id", *fields])
            found.update({each["id"]: dict(each) for each in got})
        for each in ids:
            if each not in found:
                raise NoSuchItem(f"the gallery has no image {each}")
        return [found[each] for each in ids]

    def _scan(self, chosen: str, fields: list[str], batch: int = MOST) -> Iterator[dict[str, Any]]:
        """All rows that a filter lets through, in the order of ids."""
        with translate_errors(self.place):
            pages = self.client.query_iterator(
                self.place.collection, batch_size=batch, filter=chosen, output_fields=["id", *fields]
            )
            try:
                while page := pages.next():
                    yield from page
            finally:
                pages.close()


def exists(place: MilvusAddress) -> bool:
    """Whether there is such a collection."""
    if place.lite and not Path(place.uri).exists():
        return False
    client = place.connect()
    try:
        with translate_errors(place):
            return bool(client.has_collection(place.collection))
    finally:
        client.close()


def _schema(client: Any, dim: int, kind: str) -> tuple[Any, Any]:
    from pymilvus import DataType

    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
    schema.add_field("path", DataType.VARCHAR, max_length=4096)
    schema.add_field("label", DataType.VARCHAR, max_length=1024, nullable=True)
    schema.add_field("size", DataType.INT64)
    schema.add_field("modified", DataType.INT64)
    name, params, _ = INDEXES[kind]
    if "m" in params:
        params = {**params, "m": next(size for size in range(min(params["m"], dim), 0, -1) if dim % size == 0)}
    indexes = client.prepare_index_params()
    indexes.add_index("vector", index_type=name, metric_type="IP", params=params)
    return schema, indexes


def _labelled(label: str | None) -> str:
    return "" if label is None else f"label == {_quoted(label)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _item(found: Mapping[str, Any]) -> Item:
    return Item(int(found["id"]), Path(found["path"]), found["label"])

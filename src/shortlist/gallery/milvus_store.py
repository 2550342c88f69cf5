"""A gallery in a Milvus collection: for more images than fit one machine, or to use an existing vector database."""

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
from shortlist.encoding.pretrained import is_pretrained
from shortlist.errors import ConfigError
from shortlist.gallery.milvus_address import MilvusAddress, translate_errors
from shortlist.gallery.store import Floats, GalleryError, Hit, Item, NoSuchItem, Row, StoredRow
from shortlist.progress import Progress
from shortlist.search.faiss_index import BYTES_PER_VECTOR, HNSW_CONSTRUCTION_CANDIDATES, HNSW_LINKS, check_kind

FORMAT = 1
FACTS, NEXT_ID = "shortlist.facts", "shortlist.next_id"  # properties of the collection
MAX_ROWS_PER_QUERY = 16_384  # a limit of Milvus
ROWS_PER_REQUEST = 1_000  # stays below the 64 MB of a message with 4,096 dimensions
INDEXES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # name in Milvus, build and search parameters
    "flat": ("FLAT", {}, {}),
    "hnsw": ("HNSW", {"M": HNSW_LINKS, "efConstruction": HNSW_CONSTRUCTION_CANDIDATES}, {"ef": 128}),
    "ivfpq": ("IVF_PQ", {"nlist": 1024, "m": BYTES_PER_VECTOR, "nbits": 8}, {"nprobe": 64}),
}


class MilvusStore:
    """A Milvus collection; see `Store`. Only one process at a time may change it."""

    images_per_change = 8 * ROWS_PER_REQUEST  # the most work that a killed process loses

    def __init__(self, address: MilvusAddress, client: Any = None) -> None:
        if address.lite and client is None and not Path(address.uri).exists():
            raise GalleryError(f"there is no {address.uri}. Create a gallery with shortlist index")
        self.address = address
        self.client = client or address.connect()
        try:
            with translate_errors(address):
                if not self.client.has_collection(address.collection):
                    existing = ", ".join(sorted(self.client.list_collections())) or "none"
                    raise GalleryError(f"{address}: there is no such collection (existing collections: {existing})")
                properties = dict(self.client.describe_collection(address.collection)["properties"])
                if FACTS not in properties:
                    raise GalleryError(f"{address} was not created by shortlist: choose another name")
                self._facts: dict[str, Any] = json.loads(properties[FACTS])
                if self._facts["format"] > FORMAT:
                    raise GalleryError(f"{address} was written by a later version of shortlist: update shortlist")
                self.client.load_collection(address.collection)
        except GalleryError:
            self.close()
            raise
        self._labels: dict[str, int] | None = None

    @classmethod
    def create(cls, address: MilvusAddress, encoder: Encoder, model: Path, kind: str = "auto") -> MilvusStore:
        """Create an empty gallery.

        Args:
            address: Address of the collection.
            encoder: Encoder that computes the vectors.
            model: Folder with the encoder's embedder, which is not copied; or a name for `Encoder.from_pretrained`.
            kind: Kind of index. Milvus Lite supports exact search only.

        Raises:
            ConfigError: There is no such kind of index, or Milvus Lite does not support it.
        """
        check_kind(kind)
        if address.lite and kind in ("hnsw", "ivfpq"):
            raise ConfigError(f"the index of a Milvus Lite file is flat, not {kind}: omit `kind`")
        if kind == "auto":
            kind = "flat" if address.lite else "hnsw"  # a server is used for many images
        facts = {
            "format": FORMAT,
            "fingerprint": encoder.fingerprint,
            "dim": encoder.dim,
            "kind": kind,
            "model": str(model.absolute() if model.is_dir() else model),
            "encoder": encoder.settings(),
        }
        client, name = address.connect(), address.collection
        with translate_errors(address):
            schema, indexes = _schema(client, encoder.dim, kind)
            client.create_collection(name, schema=schema, index_params=indexes, consistency_level="Strong")
            client.alter_collection_properties(name, {FACTS: json.dumps(facts), NEXT_ID: "0"})
        return cls(address, client)

    @property
    def _collection(self) -> str:
        return self.address.collection

    def close(self) -> None:
        self.client.close()

    def refresh(self) -> None:
        self._labels = None

    @property
    def name(self) -> str:
        return self._collection

    @property
    def dim(self) -> int:
        return int(self._facts["dim"])

    @property
    def fingerprint(self) -> str:
        return str(self._facts["fingerprint"])

    @property
    def requested_kind(self) -> str:
        return str(self._facts["kind"])

    def encoder(self, model: Path | None) -> Encoder:
        folder = Path(self._facts["model"]) if model is None else model
        if is_pretrained(folder):
            return Encoder.from_pretrained(folder)
        if not folder.is_dir():
            raise GalleryError(
                f"the run {folder}, whose model computed the vectors of {self.address}, does not exist: if it was "
                "moved, give its folder with `model`"
            )
        return Encoder.load(folder, self._facts["encoder"])

    def facts(self) -> dict[str, Any]:
        return {"place": str(self.address), "kind": self._facts["kind"], "recall": None}

    def __len__(self) -> int:
        with translate_errors(self.address):
            (found,) = self.client.query(self._collection, filter="", output_fields=["count(*)"])
        return int(found["count(*)"])

    def item(self, id: int) -> Item:  # noqa: A002
        return _item(self._get([id], ["path", "label"])[0])

    def items(self, label: str | None, offset: int, limit: int) -> list[Item]:
        found = self._scan(
            _label_filter(label), ["path", "label"], batch=min(MAX_ROWS_PER_QUERY, max(1, offset + limit))
        )
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
        with translate_errors(self.address):
            found = self.client.search(
                self._collection,
                list(vectors),
                filter=_label_filter(label),
                limit=min(k, MAX_ROWS_PER_QUERY),
                output_fields=["path", "label"],
                search_params={"metric_type": "IP", "params": INDEXES[self._facts["kind"]][2]},
            )
        hits = [
            [Hit(_item({"id": each["id"], **each["entity"]}), each["distance"]) for each in results]
            for results in found
        ]
        return [sorted(each, key=lambda hit: (-hit.score, hit.item.id)) for each in hits]

    def stored_rows(self, paths: Sequence[str]) -> Mapping[str, list[StoredRow]]:
        found: dict[str, list[StoredRow]] = {}
        for start in range(0, len(paths), ROWS_PER_REQUEST):
            group = list(paths[start : start + ROWS_PER_REQUEST])
            for each in self._scan(f"path in {json.dumps(group, ensure_ascii=False)}", list(Row._fields)):
                row = Row(*(each[name] for name in Row._fields))
                found.setdefault(row.path, []).append(StoredRow(each["id"], row))
        return found

    def ids_under(self, path: str) -> list[int]:
        folder = path.rstrip("/")
        bounds = (_quoted(each) for each in (path, f"{folder}/", f"{folder}0"))  # "0" is the character after "/"
        return [each["id"] for each in self._scan("path == {} or (path >= {} and path < {})".format(*bounds), [])]

    @contextmanager
    def changing(self) -> Iterator[Path]:
        """Yield a folder for unfinished work, without a lock.

        Only one process can open a Milvus Lite file. On a server, other processes are not prevented from changes.
        """
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
        for start in range(0, len(labels or {}), ROWS_PER_REQUEST):
            group = dict(islice((labels or {}).items(), start, start + ROWS_PER_REQUEST))
            entities = self._get(list(group), ["vector", *Row._fields])
            with translate_errors(self.address):
                self.client.upsert(self._collection, [{**each, "label": group[each["id"]]} for each in entities])
        for start in range(0, len(removed), ROWS_PER_REQUEST):
            with translate_errors(self.address):
                self.client.delete(self._collection, ids=list(removed[start : start + ROWS_PER_REQUEST]))

    def _insert(self, rows: Sequence[Row], vectors: Floats, progress: Progress | None) -> None:
        with translate_errors(self.address):
            properties = self.client.describe_collection(self._collection)["properties"]
            first = int(properties[NEXT_ID])
            # Before the rows are inserted: a killed process may waste ids, but no id is ever used twice.
            self.client.alter_collection_properties(self._collection, {NEXT_ID: str(first + len(rows))})
            for start in range(0, len(rows), ROWS_PER_REQUEST):
                group = enumerate(rows[start : start + ROWS_PER_REQUEST], start)
                data = [{"id": first + i, "vector": vectors[i], **row._asdict()} for i, row in group]
                self.client.insert(self._collection, data)
                if progress is not None:
                    progress(start + len(data), len(rows))

    def _get(self, ids: Sequence[int], fields: list[str]) -> list[dict[str, Any]]:
        """Return rows in the order of the ids, or raise NoSuchItem."""
        found: dict[int, dict[str, Any]] = {}
        for start in range(0, len(ids), ROWS_PER_REQUEST):
            group = list(ids[start : start + ROWS_PER_REQUEST])
            with translate_errors(self.address):
                rows = self.client.get(self._collection, ids=group, output_fields=["id", *fields])
            found.update({each["id"]: dict(each) for each in rows})
        for each in ids:
            if each not in found:
                raise NoSuchItem(f"the gallery has no image {each}")
        return [found[each] for each in ids]

    def _scan(self, condition: str, fields: list[str], batch: int = MAX_ROWS_PER_QUERY) -> Iterator[dict[str, Any]]:
        """Yield all rows that satisfy a filter expression, in the order of their ids."""
        with translate_errors(self.address):
            pages = self.client.query_iterator(
                self._collection, batch_size=batch, filter=condition, output_fields=["id", *fields]
            )
            try:
                while page := pages.next():
                    yield from page
            finally:
                pages.close()


def exists(address: MilvusAddress) -> bool:
    """Return whether the collection exists."""
    if address.lite and not Path(address.uri).exists():
        return False
    client = address.connect()
    try:
        with translate_errors(address):
            return bool(client.has_collection(address.collection))
    finally:
        client.close()


def _schema(client: Any, dim: int, kind: str) -> tuple[Any, Any]:
    """Return the schema and the index parameters of a collection."""
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


def _label_filter(label: str | None) -> str:
    return "" if label is None else f"label == {_quoted(label)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _item(found: Mapping[str, Any]) -> Item:
    return Item(int(found["id"]), Path(found["path"]), found["label"])

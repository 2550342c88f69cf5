"""A gallery in a Milvus collection: for more images than fit on one machine, or to use an existing vector database."""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shortlist.encoding.encoder import Encoder
from shortlist.encoding.pretrained import is_pretrained
from shortlist.errors import ConfigError
from shortlist.gallery.milvus_address import MilvusAddress
from shortlist.gallery.milvus_connection import MilvusConnection
from shortlist.gallery.milvus_lock import SUFFIX, writer_lock
from shortlist.gallery.store import (
    Floats,
    GalleryError,
    Hit,
    Item,
    NoSuchItem,
    Row,
    StoredRow,
    count_labels,
    free_ids,
    labels_of,
)
from shortlist.progress import Progress
from shortlist.ranking.top_k import BLOCK_SIZE
from shortlist.search.exact import nearest
from shortlist.search.faiss_index import (
    BYTES_PER_VECTOR,
    HNSW_CONSTRUCTION_CANDIDATES,
    HNSW_LINKS,
    MAX_HNSW_CANDIDATES,
    MIN_RERANKED,
    RECALL_AT,
    RECALL_QUERIES,
    RERANK_FACTOR,
    check_kind,
    lowest_effort,
    merge_results,
)

FORMAT = 2
COLUMNS = ["path", "label", "fields"]  # of an item
FACTS, NEXT_ID, TUNING = "shortlist.facts", "shortlist.next_id", "shortlist.tuning"  # properties of the collection
MAX_ROWS_PER_QUERY = 16_384  # a limit of Milvus
ROWS_PER_REQUEST = 1_000  # stays below the 64 MB of a message with 4,096 dimensions
# The index is tuned again when more images than this, and than this share of the images at the last tuning, are added.
MIN_UNTUNED, MAX_UNTUNED_SHARE = 1_000, 0.25
BYTES_PER_RESPONSE = 32 << 20  # half of the maximum size of a message
INDEX_SECONDS = 3600.0  # maximum time to wait for the server's index


class _Index(NamedTuple):
    """A kind of index in Milvus. The effort is the number of candidates (HNSW) or lists (IVF-PQ) that are visited."""

    name: str
    build: dict[str, Any]
    parameter: str | None  # name of the effort
    effort: int  # default before tuning
    max_effort: int

    def search_parameters(self, effort: int | None, k: int) -> dict[str, int]:
        """Return the parameters of a search for k results; HNSW visits at least as many candidates."""
        if self.parameter is None:
            return {}
        effort = effort or self.effort
        return {self.parameter: max(effort, k) if self.parameter == "ef" else effort}


_HNSW = {"M": HNSW_LINKS, "efConstruction": HNSW_CONSTRUCTION_CANDIDATES}
_IVFPQ = {"nlist": 1024, "m": BYTES_PER_VECTOR, "nbits": 8}
INDEXES = {
    "flat": _Index("FLAT", {}, None, 0, 0),
    "hnsw": _Index("HNSW", _HNSW, "ef", 128, MAX_HNSW_CANDIDATES),
    "ivfpq": _Index("IVF_PQ", _IVFPQ, "nprobe", 64, 1024),
}


class MilvusStore:
    """A Milvus collection; see `Store`. Only one process at a time may change it."""

    images_per_change = 8 * ROWS_PER_REQUEST  # maximum work that a killed process loses

    def __init__(self, address: MilvusAddress, client: MilvusConnection | None = None) -> None:
        if address.lite and client is None and not Path(address.uri).exists():
            raise GalleryError(
                f"The file {address.uri} does not exist. Create a gallery: shortlist index MODEL IMAGES -o {address}"
            )
        self.address = address
        self.client = client or address.connect()
        self._check_lock: Callable[[], None] | None = None  # within `changing`, on a server
        try:
            if not self.client.has_collection(address.collection):
                found = sorted(each for each in self.client.list_collections() if not each.endswith(SUFFIX))
                existing = ", ".join(found) or "none"
                raise GalleryError(f"{address}: there is no such collection (existing collections: {existing}).")
            self._facts: dict[str, Any] = {}
            self._read_facts()
        except GalleryError:
            self.close()
            raise
        self._labels: dict[str, int] | None = None
        self._label_sets: set[str] | None = None  # those of images with several labels, as they are stored
        self._next_id = 0  # after the last image that this process has added

    @classmethod
    def create(cls, address: MilvusAddress, encoder: Encoder, model: Path, kind: str = "auto") -> MilvusStore:
        """Create an empty gallery.

        Args:
            address: Address of the collection.
            encoder: Encoder that computes the vectors.
            model: Folder with the encoder's embedder, or a name for `Encoder.from_pretrained`, which is not copied.
            kind: Kind of index. Milvus Lite has no ivfpq.

        Raises:
            ConfigError: The kind of index is unknown, or Milvus Lite does not support it.
        """
        check_kind(kind)
        if address.lite and kind == "ivfpq":
            raise ConfigError(f"Milvus Lite has no index of the kind {kind}: set `kind` to flat or hnsw.")
        if kind == "auto":
            kind = "flat" if address.lite else "hnsw"  # a server is used for many images
        facts = {
            "format": FORMAT,
            "created": uuid.uuid4().hex,  # distinguishes galleries of the same name
            "fingerprint": encoder.fingerprint,
            "dim": encoder.dim,
            "kind": kind,
            "model": str(model.absolute() if model.is_dir() else model),
            "encoder": encoder.settings(),
        }
        client, name = address.connect(), address.collection
        schema, indexes = _schema(client, encoder.dim, kind)
        client.create_collection(name, schema=schema, index_params=indexes, consistency_level="Strong")
        client.alter_collection_properties(name, {FACTS: json.dumps(facts), NEXT_ID: "0"})
        return cls(address, client)

    def _read_facts(self) -> None:
        """Read the facts of the collection, which may have been replaced by another one of the same name."""
        properties = self._properties()
        if FACTS not in properties:
            raise GalleryError(f"{self.address} was not created by shortlist: choose another name.")
        facts = json.loads(properties[FACTS])
        if facts["format"] != FORMAT:
            problem = "a later version of shortlist: update shortlist"
            if facts["format"] < FORMAT:
                problem = "an earlier version of shortlist: create the gallery again"
            raise GalleryError(f"{self.address} was written by {problem}.")
        if facts != self._facts:
            self.client.load_collection(self._collection)
            self._facts, self._tuning = facts, _tuning(properties)

    @property
    def _collection(self) -> str:
        return self.address.collection

    def close(self) -> None:
        self.client.close()

    def refresh(self) -> None:
        self._read_facts()
        self._labels = self._label_sets = None
        self._tuning = _tuning(self._properties())

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
    def identity(self) -> str:
        return str(self._facts["created"])

    @property
    def requested_kind(self) -> str:
        return str(self._facts["kind"])

    @property
    def min_score(self) -> float | None:
        score: float | None = self._facts.get("min_score")
        return score

    def set_min_score(self, score: float | None) -> None:
        with self.changing():
            self._write_min_score(score)

    def _write_min_score(self, score: float | None) -> None:
        self._facts = {**self._facts, "min_score": score}
        self.client.alter_collection_properties(self._collection, {FACTS: json.dumps(self._facts)})

    def encoder(self, model: Path | None) -> Encoder:
        folder = Path(self._facts["model"]) if model is None else model
        if is_pretrained(folder):
            return Encoder.from_pretrained(folder)
        if not folder.is_dir():
            raise GalleryError(
                f"The run {folder}, whose model computed the vectors of {self.address}, does not exist: if it was "
                "moved, give its folder with `model`."
            )
        return Encoder.load(folder, self._facts["encoder"])

    def facts(self) -> dict[str, Any]:
        return {"place": str(self.address), "kind": self._facts["kind"], "recall": self._tuning.get("recall")}

    def __len__(self) -> int:
        (found,) = self.client.query(self._collection, filter="", output_fields=["count(*)"])
        return int(found["count(*)"])

    def item(self, id: int) -> Item:  # noqa: A002
        return _item(self._get([id], COLUMNS)[0])

    def items(self, label: str | None, offset: int, limit: int) -> list[Item]:
        batch = min(MAX_ROWS_PER_QUERY, max(1, offset + limit))
        found = self._scan(self._label_filter(label), COLUMNS, batch=batch)
        return [_item(each) for each in islice(found, offset, offset + limit)]

    def labels(self) -> dict[str, int]:
        if self._labels is None:
            self._labels = count_labels(Counter(labels_of(each["label"]) for each in self._scan("", ["label"])))
        return dict(self._labels)

    def _label_filter(self, label: str | None) -> str:
        """Return the expression for images with a label. Servers of version 2.3 match only prefixes of texts."""
        if label is None:
            return ""
        if self._label_sets is None:
            several = self._scan(f"label like {_quoted(chr(10) + '%')}", ["label"])
            self._label_sets = {each["label"] for each in several}
        stored = [label, *sorted(each for each in self._label_sets if label in labels_of(each))]
        return f"label in [{', '.join(map(_quoted, stored))}]"

    def vectors(self, ids: Sequence[int]) -> Floats:
        found = self._get(ids, ["vector"])
        return np.array([each["vector"] for each in found], dtype=np.float32).reshape(len(ids), self.dim)

    def search(self, vectors: Floats, k: int, label: str | None) -> list[list[Hit]]:
        kind, limit = self._facts["kind"], min(k, MAX_ROWS_PER_QUERY)
        reranks = kind == "ivfpq"  # its codes give approximate scores
        candidates = min(max(RERANK_FACTOR * k, MIN_RERANKED), MAX_ROWS_PER_QUERY) if reranks else limit
        per_request = max(1, BYTES_PER_RESPONSE // (candidates * 4 * self.dim)) if reranks else ROWS_PER_REQUEST
        params = INDEXES[kind].search_parameters(self._tuning.get("effort"), limit)
        hits: list[list[Hit]] = []
        expression = self._label_filter(label)
        for start in range(0, len(vectors), per_request):
            found = self.client.search(
                self._collection,
                list(vectors[start : start + per_request]),
                filter=expression,
                limit=candidates,
                output_fields=[*COLUMNS, *(["vector"] if reranks else [])],
                search_params={"metric_type": "IP", "params": params},
            )
            hits += [_hits(query, each)[:limit] for query, each in zip(vectors[start:], found, strict=False)]
        self._read_facts()  # another identity means that the vectors were those of another gallery
        return hits

    def stored_rows(self, paths: Sequence[str]) -> Mapping[str, list[StoredRow]]:
        found: dict[str, list[StoredRow]] = {}
        for start in range(0, len(paths), ROWS_PER_REQUEST):
            group = list(paths[start : start + ROWS_PER_REQUEST])
            columns = [*COLUMNS, "size", "modified"]
            for each in self._scan(f"path in {json.dumps(group, ensure_ascii=False)}", columns):
                row = Row(each["path"], each["label"] or None, each["size"], each["modified"], each["fields"] or None)
                found.setdefault(row.path, []).append(StoredRow(each["id"], row))
        return found

    def ids_under(self, path: str) -> list[int]:
        folder = path.rstrip("/")
        bounds = (_quoted(each) for each in (path, f"{folder}/", f"{folder}0"))  # "0" is the character after "/"
        return [each["id"] for each in self._scan("path == {} or (path >= {} and path < {})".format(*bounds), [])]

    @contextmanager
    def changing(self) -> Iterator[Path]:
        """Lock the collection on a server, and yield a folder for unfinished work; see `Store.changing`.

        Only one process can open a Milvus Lite file, so it needs no lock. Requests wait for a restarting server.

        Raises:
            GalleryError: Another process is changing the collection.
        """
        with ExitStack() as stack:
            stack.enter_context(self.client.retrying())
            if not self.address.lite:
                lock = writer_lock(self.client, self._collection, str(self.address))
                self._check_lock = stack.enter_context(lock)
                stack.callback(setattr, self, "_check_lock", None)
            self.refresh()
            yield Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self._tune_if_due()

    def change(
        self,
        rows: Sequence[Row] = (),
        vectors: Floats | None = None,
        *,
        ids: Sequence[int] | None = None,
        removed: Sequence[int] = (),
        labels: Mapping[int, str | None] | None = None,
        fields: Mapping[int, str | None] | None = None,
        min_score: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._labels = self._label_sets = None
        if self._check_lock is not None:
            self._check_lock()
        if rows and vectors is not None:
            self._insert(rows, vectors, ids, progress)
        changes = {"label": labels or {}, "fields": fields or {}}
        changed = list(dict.fromkeys(each for values in changes.values() for each in values))
        for start in range(0, len(changed), ROWS_PER_REQUEST):
            group = self._get(changed[start : start + ROWS_PER_REQUEST], ["vector", *COLUMNS, "size", "modified"])
            for each in group:
                each |= {name: values[each["id"]] or "" for name, values in changes.items() if each["id"] in values}
            self.client.upsert(self._collection, group)
        for start in range(0, len(removed), ROWS_PER_REQUEST):
            self.client.delete(self._collection, ids=list(removed[start : start + ROWS_PER_REQUEST]))
        if min_score not in (None, self.min_score):
            self._write_min_score(min_score)

    def _insert(
        self, rows: Sequence[Row], vectors: Floats, wanted: Sequence[int] | None, progress: Progress | None
    ) -> None:
        ids = free_ids(len(rows), self._first_free_id(), wanted)
        # Before the rows are inserted: a killed process may waste ids, but no id is ever used twice.
        self._next_id = ids[-1] + 1
        self.client.alter_collection_properties(self._collection, {NEXT_ID: str(self._next_id)})
        for start in range(0, len(rows), ROWS_PER_REQUEST):
            group = enumerate(rows[start : start + ROWS_PER_REQUEST], start)
            data = [self._entity(ids[i], vectors[i], row) for i, row in group]
            # Unlike an insert, an upsert may be repeated if the server is restarted before it has answered.
            self.client.upsert(self._collection, data)
            if progress is not None:
                progress(start + len(data), len(rows))

    def _entity(self, id: int, vector: Floats, row: Row) -> dict[str, Any]:  # noqa: A002
        """Return a row as Milvus stores it. Missing values are empty strings, because old servers have no null."""
        return {"id": id, "vector": vector, **row._asdict(), "label": row.label or "", "fields": row.fields or ""}

    def _first_free_id(self) -> int:
        """Return the next id. For some time after a restart, a server may return an outdated property."""
        known = max(self._next_id, int(self._properties()[NEXT_ID]))
        return max((each["id"] + 1 for each in self._scan(f"id >= {known}", [])), default=known)

    def _properties(self) -> dict[str, str]:
        return dict(self.client.describe_collection(self._collection)["properties"])

    def _tune_if_due(self) -> None:
        """Measure the recall of the index, and choose how many candidates a search visits; see `faiss_index.tune`.

        This reads all vectors once, and is therefore done only when the collection has grown by a quarter.
        """
        if self.address.lite or self._facts["kind"] == "flat":
            return
        number, before = len(self), self._tuning.get("rows", 0)
        if number - before <= max(MIN_UNTUNED, MAX_UNTUNED_SHARE * before) or not self._wait_for_index(number):
            return
        # Removed ids are not replaced, so there may be fewer queries.
        drawn = np.random.default_rng(0).permutation(int(self._properties()[NEXT_ID]))[: 2 * RECALL_QUERIES]
        sample = self.client.get(self._collection, ids=drawn.tolist(), output_fields=["id", "vector"])[:RECALL_QUERIES]
        queries = np.array([each["vector"] for each in sample], dtype=np.float32)
        exact = self._search_exactly(queries, RECALL_AT + 1)
        expected = [set(each) - {own["id"]} for each, own in zip(exact.tolist(), sample, strict=True)]

        def found(effort: int) -> list[list[int]]:
            self._tuning = {"effort": effort}
            return [[hit.item.id for hit in each] for each in self.search(queries, RECALL_AT + 1, None)]

        effort, recall = lowest_effort(found, expected, INDEXES[self._facts["kind"]].max_effort)
        facts = {"recall": recall, "at": RECALL_AT, "queries": len(queries)}
        self._tuning = {"effort": effort, "rows": number, "recall": facts}
        self.client.alter_collection_properties(self._collection, {TUNING: json.dumps(self._tuning)})

    def _search_exactly(self, queries: Floats, k: int) -> NDArray[np.int64]:
        """Return the ids of the k nearest images of each query, (q, k), computed here from all vectors."""
        found = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
        rows = self._scan("", ["vector"], batch=min(MAX_ROWS_PER_QUERY, BYTES_PER_RESPONSE // (4 * self.dim)))
        while page := list(islice(rows, BLOCK_SIZE)):
            ids = np.array([each["id"] for each in page])
            scores, at = nearest(queries, np.array([each["vector"] for each in page], dtype=np.float32), k)
            found = merge_results([found, (scores.numpy(), ids[at.numpy()])], k)
        return found[1]

    def _wait_for_index(self, number: int) -> bool:
        """Wait until searches use the index for all vectors. Return False if that takes too long."""
        self.client.flush(self._collection)
        end = time.monotonic() + INDEX_SECONDS
        while time.monotonic() < end:
            if not self.client.describe_index(self._collection, "vector")["pending_index_rows"]:
                self.client.refresh_load(self._collection)
                loaded = self.client.list_loaded_segments(self._collection)
                if sum(each.num_rows for each in loaded if each.state.name == "Sealed") >= number:
                    return True
            time.sleep(0.5)
        return False

    def _get(self, ids: Sequence[int], fields: list[str]) -> list[dict[str, Any]]:
        """Return rows in the order of the ids, or raise NoSuchItem."""
        found: dict[int, dict[str, Any]] = {}
        for start in range(0, len(ids), ROWS_PER_REQUEST):
            group = list(ids[start : start + ROWS_PER_REQUEST])
            rows = self.client.get(self._collection, ids=group, output_fields=["id", *fields])
            found.update({each["id"]: dict(each) for each in rows})
        for each in ids:
            if each not in found:
                raise NoSuchItem(f"The gallery has no image {each}.")
        return [found[each] for each in ids]

    def _scan(self, condition: str, fields: list[str], batch: int = MAX_ROWS_PER_QUERY) -> Iterator[dict[str, Any]]:
        """Yield all rows that satisfy a filter expression, in the order of their ids."""
        last = -1
        while True:
            where = f"({condition}) and id > {last}" if condition else f"id > {last}"
            page = self.client.query(self._collection, filter=where, limit=batch, output_fields=["id", *fields])
            yield from page
            if len(page) < batch:
                return
            last = page[-1]["id"]


def exists(address: MilvusAddress) -> bool:
    """Return whether the collection exists."""
    if address.lite and not Path(address.uri).exists():
        return False
    client = address.connect()
    try:
        return bool(client.has_collection(address.collection))
    finally:
        client.close()


def _tuning(properties: Mapping[str, str]) -> dict[str, Any]:
    """Return the tuned effort of a search, its recall, and the number of images then; empty before the first tuning."""
    found: dict[str, Any] = json.loads(properties.get(TUNING, "{}"))
    return found


def _schema(client: MilvusConnection, dim: int, kind: str) -> tuple[Any, Any]:
    """Return the schema and the index parameters of a collection."""
    from pymilvus import DataType

    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
    schema.add_field("path", DataType.VARCHAR, max_length=4096)
    schema.add_field("label", DataType.VARCHAR, max_length=1024)
    schema.add_field("size", DataType.INT64)
    schema.add_field("modified", DataType.INT64)
    schema.add_field("fields", DataType.VARCHAR, max_length=65535)
    name, params = INDEXES[kind].name, INDEXES[kind].build
    if "m" in params:
        params = {**params, "m": next(size for size in range(min(params["m"], dim), 0, -1) if dim % size == 0)}
    indexes = client.prepare_index_params()
    indexes.add_index("vector", index_type=name, metric_type="IP", params=params)
    return schema, indexes


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _hits(query: Floats, results: Sequence[Mapping[str, Any]]) -> list[Hit]:
    """Return the results of a query, best first, with the scores of their vectors where these were requested."""
    hits = []
    for each in results:
        entity = each["entity"]
        score = float(query @ np.float32(entity["vector"])) if "vector" in entity else each["distance"]
        hits.append(Hit(_item({"id": each["id"], **entity}), score))
    return sorted(hits, key=lambda hit: (-hit.score, hit.item.id))


def _item(found: Mapping[str, Any]) -> Item:
    return Item.of(int(found["id"]), found["path"], found["label"], found["fields"])

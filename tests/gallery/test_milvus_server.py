"""Galleries on a Milvus server, which these tests start if SHORTLIST_MILVUS_SERVER names its program."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shortlist.data import Catalog
from shortlist.encoding import Encoder
from shortlist.errors import RunError
from shortlist.files import exclusive_lock
from shortlist.gallery import Gallery, GalleryError, milvus_connection, milvus_lock, milvus_store
from shortlist.gallery.milvus_address import MilvusAddress
from shortlist.gallery.milvus_store import MilvusStore
from shortlist.gallery.store import Row
from shortlist.search import faiss_index
from tests.gallery.galleries import NUMBER
from tests.processes import free_port

PROGRAM = os.environ.get("SHORTLIST_MILVUS_SERVER", "")
# Started first, so that pytest-xdist does not divide them among workers, which would wait for each other's server.
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PROGRAM, reason="SHORTLIST_MILVUS_SERVER does not name a Milvus server"),
]


class Server:
    """A server with its data in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.start([PROGRAM, "--data", str(self.folder), "--proxy-port", str(self.port)])

    def start(self, command: list[str], **options: Any) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, start_new_session=True, **quiet, **options)

    def restart(self) -> None:
        """Kill the server and start it again, until it runs, as a service manager does.

        The program, which starts the server, would choose other ports as long as connections of the killed server are
        in TIME_WAIT. The server itself keeps its ports.
        """
        (server,) = self.children()
        command, environment, folder = server.cmdline(), server.environ(), server.cwd()
        self.stop()
        self.start(["sh", "-c", 'until "$0" "$@"; do sleep 1; done', *command], env=environment, cwd=folder)

    def stop(self) -> None:
        """Kill the program and the server, and wait until they have closed their ports."""
        started = self.children()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        while not all(map(has_ended, started)):
            time.sleep(0.05)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def place(self, collection: str) -> str:
        return f"http://127.0.0.1:{self.port}/{collection}"

    def wait(self) -> None:
        """Wait until it answers, for as long as it runs."""
        while self.runs():
            try:
                Gallery.exists(self.place("none"))
            except GalleryError:
                time.sleep(0.2)
            else:
                return
        raise AssertionError(f"{PROGRAM} has ended. See {self.folder / 'logs'}")

    def runs(self) -> bool:
        """Whether the server runs. The program that has started it does not notice its end."""
        if self.process.poll() is not None:
            return False
        return not any(map(has_ended, self.children()))


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The only server of this machine: each would listen on port 2380, whatever its other ports are."""
    lock = Path(tempfile.gettempdir()) / "shortlist-milvus-server.lock"
    with exclusive_lock(lock, RunError("Other tests use the Milvus server."), timeout=600):
        running = Server(tmp_path_factory.mktemp("milvus"))
        try:
            running.wait()
            yield running
        finally:
            running.stop()


@pytest.fixture
def create(server: Server, encoder: Encoder, tmp_path: Path) -> Iterator[Callable[..., Gallery]]:
    opened: list[Gallery] = []

    def gallery(name: str, **options: str) -> Gallery:
        opened.append(Gallery.create(server.place(name), encoder, model=encoder.save(tmp_path / "run"), **options))
        return opened[-1]

    yield gallery
    for each in opened:
        each.close()


def test_like_a_folder(create: Callable[..., Gallery], encoder: Encoder, images: Catalog, tmp_path: Path) -> None:
    galleries = create("like_a_folder"), Gallery.create(tmp_path / "folder", encoder)
    paths = [str(images.file(index)) for index in range(NUMBER)]
    for gallery in galleries:
        assert gallery.add(images.subset(range(NUMBER - 1)), workers=0).added == NUMBER - 1
        vectors = gallery.store.vectors([0])
        with gallery.store.changing():
            gallery.store.change([Row(paths[-1], None, 1, 1)], vectors, labels={1: "new"}, removed=[2])
    on_server, in_folder = galleries
    assert on_server.items() == in_folder.items()
    assert on_server.items(label="new") == in_folder.items(label="new")
    assert on_server.labels() == in_folder.labels()
    assert on_server.store.stored_rows(paths) == in_folder.store.stored_rows(paths)
    assert on_server.store.ids_under(str(images.root)) == in_folder.store.ids_under(str(images.root))
    for label in (None, "bolt"):
        found, expected = (each.similar(3, 20, label=label) for each in galleries)
        assert [hit.item for hit in found] == [hit.item for hit in expected]
        assert [hit.score for hit in found] == pytest.approx([hit.score for hit in expected], abs=1e-5)


def test_recall_is_measured_and_the_search_is_tuned(
    create: Callable[..., Gallery], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(milvus_store, "RECALL_QUERIES", 200)
    monkeypatch.setattr(faiss_index, "MIN_EFFORT", 1)
    store = create("tuned", kind="ivfpq").store
    vectors = np.random.default_rng(0).normal(size=(1_500, store.dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    with store.changing():
        store.change([Row(f"/{index}.png", None, 1, 1) for index in range(len(vectors))], vectors)
    with closing(MilvusStore(store.address)) as again:
        recall = again.facts()["recall"]
        assert (recall["at"], recall["queries"]) == (10, 200)
        assert recall["recall"] >= 0.95
        assert again._tuning["effort"] > 1  # one list is not enough
        hits = again.search(vectors[:5], 10, None)
        assert [each[0].item.id for each in hits] == list(range(5))
        assert [hit.score for hit in hits[0]] == pytest.approx(np.sort(vectors @ vectors[0])[:-11:-1], abs=1e-5)


def test_a_second_writer(create: Callable[..., Gallery], server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milvus_lock, "BEAT_SECONDS", 0.05)
    store = create("locked").store
    other = MilvusAddress.parse(server.place("locked")).connect()
    name = f"locked{milvus_lock.SUFFIX}"
    with closing(MilvusStore(store.address)) as second:
        with store.changing():
            with pytest.raises(GalleryError, match=r"Another process is changing .*locked \(.*, process \d+\). Wait"):
                second.changing().__enter__()
            other.drop_collection(name)  # as a process that took this one for dead
            with pytest.raises(GalleryError, match="has taken over the lock"):
                store.change(removed=[0])
        assert milvus_lock._created(other, name, "a host, process 1 (killed)")
        monkeypatch.setattr(milvus_lock, "STALE_SECONDS", 0.3)
        with second.changing():
            assert milvus_lock._state(other, name)[0] != "a host, process 1 (killed)"
        assert not other.has_collection(name)
    with pytest.raises(GalleryError, match=r"existing collections: (?!.*_lock)"):
        Gallery.open(server.place("missing"))
    other.close()


def test_a_server_that_is_restarted(
    create: Callable[..., Gallery], server: Server, images: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(milvus_connection, "RESTART_SECONDS", 600)  # on a machine as busy as it may be
    monkeypatch.setattr(milvus_store, "ROWS_PER_REQUEST", 2)
    monkeypatch.setattr(MilvusStore, "images_per_change", 4)
    gallery = create("restarted")
    real, calls = gallery.store.client._client.upsert, []

    def upsert(*args: object, **options: object) -> object:
        calls.append(args)
        found = real(*args, **options)
        if len(calls) == 2:
            server.restart()  # the rows are stored, but the answer is lost
            return real(*args, **options)
        return found

    monkeypatch.setattr(gallery.store.client._client, "upsert", upsert)
    with pytest.warns(UserWarning, match="waiting for the server"):
        assert gallery.add(images, workers=0).added == NUMBER
    assert [item.id for item in gallery.items()] == list(range(NUMBER))
    assert len(gallery) == NUMBER  # none is stored twice
    assert gallery.add(images, workers=0).unchanged == NUMBER

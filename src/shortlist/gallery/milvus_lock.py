"""A lock on a collection of a Milvus server, so that only one process at a time changes it.

Creating a collection is atomic, and fails if a collection with the same name and a different description exists. The
lock is therefore an empty collection, whose description names the process that holds it. The process increments a
property of the collection every few seconds. A lock whose property does not change was left by a killed process, and is
removed.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from shortlist.gallery.milvus_connection import MilvusConnection
from shortlist.gallery.store import GalleryError

SUFFIX = "_shortlist_lock"
BEAT = "shortlist.beat"  # property of the lock
BEAT_SECONDS, STALE_SECONDS = 2.0, 60.0
_POLL_SECONDS = 0.2


@contextmanager
def writer_lock(client: MilvusConnection, collection: str, gallery: str) -> Iterator[Callable[[], None]]:
    """Hold the lock of a collection.

    Args:
        client: Connection to the server.
        collection: Name of the collection.
        gallery: Name of the gallery, for messages.

    Yields:
        Function that raises a GalleryError if another process has taken over the lock.

    Raises:
        GalleryError: Another process holds the lock.
    """
    name = f"{collection}{SUFFIX}"
    holder = f"{socket.gethostname()}, process {os.getpid()} ({uuid.uuid4().hex})"
    _acquire(client, name, holder, gallery)
    stopped = threading.Event()

    def check() -> None:
        state = _state(client, name)
        if state is None or state[0] != holder:
            raise GalleryError(f"Another process has taken over the lock of the gallery {gallery}. Repeat the command.")

    direct = client.without_retries()
    heartbeat = threading.Thread(target=_beat, args=(direct, name, stopped), daemon=True)
    heartbeat.start()
    try:
        yield check
    finally:
        stopped.set()
        heartbeat.join()
        with suppress(GalleryError):  # if the server is unavailable, the lock expires
            if (state := _state(direct, name)) is not None and state[0] == holder:
                direct.drop_collection(name)


def _acquire(client: MilvusConnection, name: str, holder: str, gallery: str) -> None:
    first: tuple[str, str] | None = None
    since = time.monotonic()
    while not _created(client, name, holder):
        state = _state(client, name)
        if first is None or state is None:
            first, since = state, time.monotonic()
        elif state != first:
            by = state[0].partition(" (")[0]
            raise GalleryError(f"Another process is changing the gallery {gallery} ({by}). Wait until it has finished.")
        elif time.monotonic() - since > STALE_SECONDS:
            client.drop_collection(name)
        time.sleep(_POLL_SECONDS)


def _created(client: MilvusConnection, name: str, holder: str) -> bool:
    from pymilvus import DataType

    schema = client.create_schema(auto_id=False, enable_dynamic_field=False, description=holder)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)  # a collection needs one
    try:
        client.create_collection(name, schema=schema)
    except GalleryError:
        if not client.has_collection(name):
            raise
        return False
    return True


def _state(client: MilvusConnection, name: str) -> tuple[str, str] | None:
    """Return the holder of the lock and its count, or None if it has been released."""
    if not client.has_collection(name):
        return None
    try:
        found = client.describe_collection(name)
    except GalleryError:
        if client.has_collection(name):
            raise
        return None
    return found["description"], dict(found["properties"]).get(BEAT, "0")


def _beat(client: MilvusConnection, name: str, stopped: threading.Event) -> None:
    count = 0
    while not stopped.wait(BEAT_SECONDS):
        count += 1
        with suppress(GalleryError):  # the next request of the change reports the error
            client.alter_collection_properties(name, {BEAT: str(count)})

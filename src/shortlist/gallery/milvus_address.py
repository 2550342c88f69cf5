"""A Milvus collection named by one argument: a file of Milvus Lite, or a server's address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shortlist.errors import ConfigError
from shortlist.extras import extra
from shortlist.gallery.store import GalleryError

COLLECTION = "shortlist"
TOKEN = "MILVUS_TOKEN"  # the environment variable; a secret has no place in an address
PATIENCE = 10.0  # seconds until a server has answered


@dataclass(frozen=True)
class MilvusAddress:
    """Where a collection is.

    Args:
        uri: of a server, or the path of a file that ends with .db.
        collection: its name there.
    """

    uri: str
    collection: str

    @property
    def lite(self) -> bool:
        return "://" not in self.uri

    def __str__(self) -> str:
        return f"milvus:{self.uri}#{self.collection}" if self.lite else f"{self.uri}/{self.collection}"

    @classmethod
    def parse(cls, place: str) -> MilvusAddress:
        """From `milvus:PATH.db`, `milvus:PATH.db#COLLECTION` or `http(s)://HOST:PORT/COLLECTION`.

        >>> MilvusAddress.parse("http://localhost:19530/parts")
        MilvusAddress(uri='http://localhost:19530', collection='parts')

        Raises:
            ConfigError: it is not written like that.
        """
        if place.startswith("milvus:"):
            path, _, collection = place.removeprefix("milvus:").partition("#")
            if not path.endswith(".db"):
                raise ConfigError(f"{place}: the file of a Milvus gallery ends with .db, as in milvus:parts.db")
            return cls(os.path.abspath(Path(path).expanduser()), _name(place, collection))  # noqa: PTH100
        try:
            parts = urlsplit(place)
            whole = bool(parts.hostname) and parts.port != 0 and not parts.query and not parts.fragment
        except ValueError:  # a port that is no number, a bracket that is not closed
            whole = False
        if not whole:
            raise ConfigError(f"{place} is not an address like http://HOST:19530/COLLECTION")
        if parts.username or parts.password:
            raise ConfigError(f"a password has no place in a gallery's address: put USER:PASSWORD into ${TOKEN}")
        return cls(f"{parts.scheme}://{parts.netloc}", _name(place, parts.path.strip("/")))

    def connect(self) -> Any:
        """A pymilvus client.

        Raises:
            MissingExtraError: pymilvus is not installed.
            GalleryError: there is no server, or another process has the file open.
        """
        with extra("milvus", f"The gallery {self}"):
            from pymilvus import MilvusClient
        if self.lite:
            Path(self.uri).parent.mkdir(parents=True, exist_ok=True)
        with translate_errors(self, " (one process at a time can have it open)" if self.lite else ""):
            return MilvusClient(self.uri, token=os.environ.get(TOKEN, ""), timeout=PATIENCE)


def is_milvus(place: Path | str) -> bool:
    return isinstance(place, str) and place.startswith(("milvus:", "http://", "https://"))


@contextmanager
def translate_errors(place: MilvusAddress, hint: str = "") -> Iterator[None]:
    """What goes wrong between here and Milvus becomes one sentence."""
    from pymilvus.exceptions import MilvusException

    try:
        yield
    except MilvusException as error:
        raise GalleryError(f"{place}: {' '.join(str(error.message).split())}{hint}") from error


def _name(place: str, collection: str) -> str:
    if collection and not (collection.isidentifier() and collection.isascii()):
        raise ConfigError(f"{place}: a collection's name has letters, digits and _, and begins with no digit")
    return collection or COLLECTION

"""The address of a Milvus collection: a Milvus Lite file or the URL of a server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shortlist.errors import ConfigError
from shortlist.extras import extra
from shortlist.gallery.milvus_connection import MilvusConnection, translate_errors
from shortlist.locations import absolute_path

DEFAULT_COLLECTION = "shortlist"
TOKEN_VARIABLE = "MILVUS_TOKEN"
CONNECTION_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True)
class MilvusAddress:
    """Address of a Milvus collection.

    Args:
        uri: URL of a server, or path of a Milvus Lite file, which ends with .db.
        collection: Name of the collection.
    """

    uri: str
    collection: str

    @property
    def lite(self) -> bool:
        """Whether the address is a Milvus Lite file."""
        return "://" not in self.uri

    def __str__(self) -> str:
        return f"milvus:{self.uri}#{self.collection}" if self.lite else f"{self.uri}/{self.collection}"

    @classmethod
    def parse(cls, text: str) -> MilvusAddress:
        """Parse `milvus:PATH.db`, `milvus:PATH.db#COLLECTION` or `http(s)://HOST:PORT/COLLECTION`.

        >>> MilvusAddress.parse("http://localhost:19530/parts")
        MilvusAddress(uri='http://localhost:19530', collection='parts')

        Raises:
            ConfigError: The text is not a valid address.
        """
        if text.startswith("milvus:"):
            path, _, collection = text.removeprefix("milvus:").partition("#")
            if not path.endswith(".db"):
                raise ConfigError(f"{text}: the file of a Milvus gallery ends with .db, as in milvus:parts.db.")
            return cls(absolute_path(path), _collection_name(text, collection))
        try:
            parts = urlsplit(text)
            valid = bool(parts.hostname) and parts.port != 0 and not parts.query and not parts.fragment
        except ValueError:  # an invalid port or an unclosed bracket
            valid = False
        if not valid:
            raise ConfigError(f"{text} is not an address like http://HOST:19530/COLLECTION.")
        if parts.username or parts.password:
            raise ConfigError(
                f"The address of a gallery must not contain a password: set {TOKEN_VARIABLE} to USER:PASSWORD."
            )
        return cls(f"{parts.scheme}://{parts.netloc}", _collection_name(text, parts.path.strip("/")))

    def connect(self) -> MilvusConnection:
        """Connect to the server, or open the file.

        Raises:
            MissingExtraError: pymilvus is not installed.
            GalleryError: The server does not answer, or another process has opened the file.
        """
        with extra("milvus", f"The gallery {self}"):
            from pymilvus import MilvusClient
        if self.lite:
            Path(self.uri).parent.mkdir(parents=True, exist_ok=True)
        with translate_errors(self, " (only one process at a time can open the file)" if self.lite else ""):
            client = MilvusClient(self.uri, token=os.environ.get(TOKEN_VARIABLE, ""), timeout=CONNECTION_TIMEOUT)
        return MilvusConnection(self, client)


def is_milvus(location: Path | str) -> bool:
    """Return whether the location of a gallery is a Milvus address rather than a folder."""
    return isinstance(location, str) and location.startswith(("milvus:", "http://", "https://"))


def _collection_name(text: str, name: str) -> str:
    if name and not (name.isidentifier() and name.isascii()):
        raise ConfigError(
            f"{text}: a collection's name consists of letters, digits and _, and does not start with a digit."
        )
    return name or DEFAULT_COLLECTION

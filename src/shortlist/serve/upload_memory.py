"""Memory for uploads, which is shared among clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class UploadMemory:
    """A number of bytes for the uploads of all clients, with a limit per client.

    An upload reserves its size before it is read. Therefore, many slow uploads of small files do not block others.

    Args:
        total: Number of bytes.
        per_client: Maximum number of bytes of one client.
    """

    def __init__(self, total: int, per_client: int) -> None:
        self.total, self.per_client = total, per_client
        self._used: Counter[str] = Counter()  # by client
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def reserve(self, client: str, size: int) -> AsyncIterator[None]:
        """Wait until there is memory for an upload, and keep it for the duration of the context."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._fits(client, size))
            self._used[client] += size
        try:
            yield
        finally:
            self._used[client] -= size
            self._used += Counter()  # deletes clients that use nothing
            async with self._changed:
                self._changed.notify_all()

    def _fits(self, client: str, size: int) -> bool:
        return self._used.total() + size <= self.total and self._used[client] + size <= self.per_client

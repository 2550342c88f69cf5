"""Memory for uploads, which is shared among clients: no upload waits for one that arrives more slowly."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from math import exp, inf
from time import monotonic
from weakref import WeakValueDictionary

from shortlist.serve.limits import Limits, busy

WINDOW = 5.0  # seconds; what an upload received earlier has little influence on its rate
HEAD_START = 2**12  # bytes that count as received at the beginning, so that a delay of the first bytes matters little


class Room:
    """A number of bytes, or of uploads, of which each upload takes a part.

    Without room, an upload waits for others that have arrived and are being searched. If all others are still arriving,
    the slowest upload is ended, except those of clients that take less than the average. Uploads take their parts in
    the order in which they ask.

    Args:
        size: The number. The largest upload must fit.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: Counter[Arrival] = Counter()
        self._turn, self._released = asyncio.Lock(), asyncio.Event()

    async def take(self, arrival: Arrival, amount: int) -> None:
        """Take a part for an upload, in addition to what it has."""
        async with self._turn:
            while self._parts.total() + amount > self.size:
                if all(each.is_arriving for each in self._parts):
                    self._slowest(arrival, amount).end()
                self._released.clear()
                await self._released.wait()
            self._parts[arrival] += amount

    def release(self, arrival: Arrival) -> None:
        """Release all that an upload has taken."""
        self._parts.pop(arrival, None)
        self._released.set()

    def _slowest(self, arrival: Arrival, amount: int) -> Arrival:
        """Return the slowest upload of the clients that take the average or more, including what `arrival` asks for."""
        parts = self._parts + Counter({arrival: amount})
        by_client: Counter[Client] = Counter()
        for each, part in parts.items():
            by_client[each.client] += part
        average = by_client.total() / len(by_client)
        return min((each for each in parts if by_client[each.client] >= average), key=lambda each: each.rate)


class Client:
    """Room for the uploads of one client."""

    def __init__(self, limits: Limits, max_bytes: int) -> None:
        self.number, self.memory = Room(limits.client_uploads), Room(max(1, limits.uploads // 2) * max_bytes)


class Arrival:
    """An upload: how fast it arrives, and the room that it takes.

    Args:
        limits: Limits of requests.
        client: Room of its client.
        memory: Room for the bytes of all clients.
    """

    def __init__(self, limits: Limits, client: Client, memory: Room) -> None:
        self.limits, self.client, self.memory = limits, client, memory
        self.received, self.seconds = 0, 0.0  # bytes, and the time that they took, without that of waiting for room
        self._recent_bytes, self._recent_seconds = float(HEAD_START), 0.0  # the same, with less weight for the past
        self._reading_since: float | None = None
        self._patience = limits.wait_seconds
        self._ending: asyncio.Timeout | None = None

    @property
    def rate(self) -> float:
        """Recent bytes per second."""
        received, seconds = self._recent()
        return received / seconds if seconds else inf

    @property
    def is_arriving(self) -> bool:
        """Whether the upload is being received, so that it can be ended."""
        return self._ending is not None

    @asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """Receive the upload in this context.

        Raises:
            RequestError: The upload was ended.
        """
        try:
            async with asyncio.timeout(None) as self._ending:
                yield
        except TimeoutError:
            raise busy("it receives too many uploads, and this was the slowest") from None
        finally:
            self._ending = None

    def end(self) -> None:
        """End the upload, to make room for others."""
        if self._ending is not None and self._ending.when() is None:
            self._ending.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wait for the next bytes in this context."""
        self._reading_since = monotonic()
        try:
            yield
        finally:
            self.seconds += monotonic() - self._reading_since
            self._recent_bytes, self._recent_seconds = self._recent()
            self._reading_since = None

    async def begin(self) -> None:
        """Take room for one more upload of the client.

        Raises:
            RequestError: There was none for too long.
        """
        await self._take(1, self.client.number)

    async def receive(self, size: int) -> None:
        """Take room for bytes that have arrived.

        Raises:
            RequestError: There was none for too long.
        """
        self.received += size
        self._recent_bytes += size
        await self._take(size, self.client.memory, self.memory)

    def release(self) -> None:
        """Release all room."""
        for room in (self.client.number, self.client.memory, self.memory):
            room.release(self)

    def _recent(self) -> tuple[float, float]:
        passed = 0.0 if self._reading_since is None else monotonic() - self._reading_since
        weight = exp(-passed / WINDOW)
        return self._recent_bytes * weight, self._recent_seconds * weight + passed

    async def _take(self, amount: int, *rooms: Room) -> None:
        started = monotonic()
        try:
            async with asyncio.timeout(self._patience):
                for room in rooms:
                    await room.take(self, amount)
        except TimeoutError:
            raise busy(f"the upload has waited for {self.limits.wait_seconds:g} seconds") from None
        self._patience -= monotonic() - started


class UploadMemory:
    """Memory for the uploads of all clients, of which one client may use half, and a number of uploads per client.

    Memory is taken for bytes that have arrived; the declared size of an upload has no influence.

    Args:
        limits: Limits of requests.
        max_bytes: Maximum size of an upload.
    """

    def __init__(self, limits: Limits, max_bytes: int) -> None:
        self.limits, self.max_bytes = limits, max_bytes
        self._memory = Room(limits.uploads * max_bytes)
        self._clients: WeakValueDictionary[str, Client] = WeakValueDictionary()  # those that upload

    @asynccontextmanager
    async def upload(self, host: str) -> AsyncIterator[Arrival]:
        """Begin an upload of the client with this address. It keeps the room that it takes until the context ends.

        Raises:
            RequestError: There was no room for too long.
        """
        client = self._clients.setdefault(client_of(host), Client(self.limits, self.max_bytes))
        arrival = Arrival(self.limits, client, self._memory)
        try:
            await arrival.begin()
            yield arrival
        finally:
            arrival.release()


def client_of(host: str) -> str:
    """Return the address of a client or, since one computer can use many addresses of IPv6, their first 64 bits.

    >>> client_of("192.0.2.7"), client_of("::ffff:192.0.2.7"), client_of("2001:db8::7")
    ('192.0.2.7', '192.0.2.7', '2001:db8::/64')
    """
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:  # IPv4, or not an address
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))

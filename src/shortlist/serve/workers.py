"""Threads for slow work, so that the event loop always answers."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from shortlist.serve.limits import RequestError, busy

MAX_STUCK = 32  # maximum number of threads that take too long and have been replaced
Args = ParamSpec("Args")
Result = TypeVar("Result")
Jobs = SimpleQueue[tuple["Future[Any]", Callable[[], Any]]]


class Workers:
    """A small thread pool. A thread that takes too long, for example on a broken network drive, is replaced.

    The threads are daemons, so that one which never ends does not keep the process from ending.

    Args:
        number: Number of jobs at a time; further jobs wait.
        seconds: Maximum duration of a job, from its start.
        wait_seconds: Maximum time that a job waits for a thread; None: no maximum.
        waiting: Called with 1 when a job starts to wait for a thread, and with -1 when it stops waiting.
    """

    def __init__(
        self,
        number: int,
        seconds: float,
        wait_seconds: float | None = None,
        waiting: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.number, self.seconds, self.wait_seconds, self.waiting = number, seconds, wait_seconds, waiting
        self._slots = asyncio.Semaphore(number)
        self._idle: list[Jobs] = []  # one queue per thread that waits for work
        self._threads = 0
        self._unfinished: set[Future[Any]] = set()

    async def run(self, function: Callable[Args, Result], *args: Args.args, **options: Args.kwargs) -> Result:
        """Run a function in a thread.

        Raises:
            RequestError: It takes too long, or there was no thread for too long.
        """
        async with self._slot():
            jobs, job = self._thread(), Future[Result]()
            self._unfinished.add(job)
            job.add_done_callback(self._unfinished.discard)
            job.add_done_callback(lambda _: self._idle.append(jobs))
            jobs.put((job, functools.partial(function, *args, **options)))
            if not await _finished([job], self.seconds):
                raise RequestError(503, f"This took longer than {self.seconds:g} seconds. Try again later.")
            return job.result()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        self.waiting(1)
        try:
            async with asyncio.timeout(self.wait_seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise busy(f"the request has waited for {self.wait_seconds:g} seconds") from None
        finally:
            self.waiting(-1)
        try:
            yield
        finally:
            self._slots.release()

    async def close(self, seconds: float) -> None:
        """Wait for the jobs in progress, for at most this number of seconds."""
        await _finished(list(self._unfinished), seconds)

    def _thread(self) -> Jobs:
        if self._idle:
            return self._idle.pop()
        if self._threads >= self.number + MAX_STUCK:
            raise RequestError(503, "The server is waiting for too many files that cannot be read. Try again later.")
        self._threads += 1
        jobs: Jobs = SimpleQueue()
        threading.Thread(target=_work, args=(jobs,), daemon=True, name="shortlist").start()
        return jobs


async def _finished(jobs: list[Future[Any]], seconds: float) -> bool:
    """Wait for jobs, which continue if they take longer or if the caller is cancelled."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for job in jobs:
        job.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(ended.set))
    try:
        async with asyncio.timeout(seconds):
            while not all(job.done() for job in jobs):
                await ended.wait()
                ended.clear()
    except TimeoutError:
        return False
    return True


def _work(jobs: Jobs) -> None:
    while True:
        job, function = jobs.get()
        try:
            result = function()
        except BaseException as error:
            job.set_exception(error)
        else:
            job.set_result(result)
        del job, function  # not kept in memory until the next job

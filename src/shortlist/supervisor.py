"""Several processes that do the same work, such as answering requests, and are replaced if they end."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from shortlist.errors import RunError, ShortlistError

Work = Callable[..., None]  # its first argument is a function that it calls when it is ready


@dataclass
class _Child:
    process: BaseProcess
    messages: Connection  # "" when it is ready, or an error


class _TerminationError(Exception):
    pass


def supervise(
    number: int,
    work: Work,
    arguments: tuple[Any, ...],
    ready: Callable[[], None],
    ending: Callable[[], None] = lambda: None,
) -> None:
    """Run a function in several processes until this one is interrupted or terminated, and then terminate them.

    A process that ends is replaced by another one.

    Args:
        number: Number of processes.
        work: Module-level function. Its first argument is a function that it calls when it is ready; then `arguments`.
        arguments: Arguments that can be pickled.
        ready: Called when all processes are ready.
        ending: Called before the processes are terminated, such as to close a socket that they share.

    Raises:
        RunError: A process ended before it was ready.
        KeyboardInterrupt: This process was interrupted.
    """
    context = multiprocessing.get_context("spawn")  # a forked process could not use the threads of torch

    def start() -> _Child:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(work, arguments, sending))
        process.start()
        sending.close()
        return _Child(process, receiving)

    children: list[_Child] = []
    with suppress(_TerminationError), _terminated_as_exception():
        try:
            children += [start() for _ in range(number)]
            for child in children:
                _wait_until_ready(child)
            ready()
            while True:
                wait([child.process.sentinel for child in children])
                for position, child in enumerate(children):
                    if not child.process.is_alive():
                        children[position] = start()
                        _wait_until_ready(children[position])
        finally:
            ending()
            for child in children:
                child.process.terminate()
            for child in children:
                child.process.join()


def _wait_until_ready(child: _Child) -> None:
    try:
        error = child.messages.recv()
    except EOFError:
        error = "a process ended while it was starting"
    if error:
        raise RunError(error)


def _work(work: Work, arguments: tuple[Any, ...], messages: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work(lambda: messages.send(""), *arguments)
    except KeyboardInterrupt:  # Ctrl-C reaches all processes of a terminal
        pass
    except ShortlistError as error:
        with suppress(OSError):  # read only until all processes are ready
            messages.send(str(error))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    signal.raise_signal(signal.SIGTERM)


@contextmanager
def _terminated_as_exception() -> Iterator[None]:
    def terminate(*_: object) -> None:
        raise _TerminationError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

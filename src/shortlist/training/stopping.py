"""Interrupting a run with Ctrl-C or SIGTERM, and telling the user how to resume it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from shortlist.distributed import ProcessLostError
from shortlist.errors import Interrupted, RunError, ShortlistError, in_all_processes, is_in_all_processes
from shortlist.progress import Display
from shortlist.training.folder import RunFolder


class StopRequest(AbstractContextManager["StopRequest"]):
    """Context that records Ctrl-C or SIGTERM instead of interrupting immediately. The second signal interrupts.

    Args:
        display: Display for the message to the user.
    """

    def __init__(self, display: Display) -> None:
        self.display, self.requested = display, False

    def __enter__(self) -> StopRequest:
        in_main = threading.current_thread() is threading.main_thread()  # only this thread can handle signals
        signals = (signal.SIGINT, signal.SIGTERM) if in_main else ()
        self._before = {each: signal.signal(each, self._request) for each in signals}
        return self

    def __exit__(self, *error: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self.display.message("Stopping after this step. Press Ctrl-C again to abort now; this step will be lost.")


@contextmanager
def report_resume_command(folder: RunFolder) -> Iterator[None]:
    """Convert interrupts and I/O errors to errors whose message says how to resume the run."""
    try:
        yield
    except (KeyboardInterrupt, OSError, ProcessLostError) as error:
        if not folder.config_file.exists():  # the run had not started
            raise
        failure = _with_resume_command(error, folder)
        if is_in_all_processes(error):
            in_all_processes(failure)
        raise failure from (None if isinstance(error, KeyboardInterrupt) else error)


def _with_resume_command(error: BaseException, folder: RunFolder) -> ShortlistError:
    command = folder.resume_command
    saved = folder.checkpoints.is_dir() and any(folder.checkpoints.iterdir())
    how = "Resume from the last checkpoint" if saved else "No checkpoint was saved yet. Start again from the first step"
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(f"Aborted. {how} with: {command}")
    if isinstance(error, ProcessLostError):
        return ProcessLostError(f"{error} {how}, with any number of processes: {command}")
    return RunError(f"The run in {folder.path} failed: {error}. Fix the cause, then resume it with: {command}")

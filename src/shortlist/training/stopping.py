"""How a run ends before its end, and what is said then."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from shortlist.errors import Interrupted, RunError
from shortlist.progress import Display
from shortlist.training.folder import RunFolder


class StopRequest(AbstractContextManager["StopRequest"]):
    """Whether someone pressed Ctrl-C (or sent SIGTERM) inside; a second time stops at once."""

    def __init__(self, display: Display) -> None:
        self.display, self.asked = display, False

    def __enter__(self) -> StopRequest:
        in_main = threading.current_thread() is threading.main_thread()  # the only one that signals come to
        signals = (signal.SIGINT, signal.SIGTERM) if in_main else ()
        self._before = {each: signal.signal(each, self._ask) for each in signals}
        return self

    def __exit__(self, *error: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.display.message("Stopping after this step. Again, to stop at once and lose it.")


@contextmanager
def report_resume_command(folder: RunFolder) -> Iterator[None]:
    """Whatever ends a run from outside leaves it as it was at its last checkpoint."""
    try:
        yield
    except (KeyboardInterrupt, OSError) as error:
        if not folder.config_file.exists():  # it had not begun
            raise
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(f"Stopped at once. To go on from the last checkpoint: {folder.resume_command}") from None
        raise RunError(
            f"The run in {folder.path} was stopped: {error}. Put that right, and go on: {folder.resume_command}"
        ) from error

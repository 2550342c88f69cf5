"""The command line: parses arguments, calls functions of the library and prints their results."""

from __future__ import annotations

import logging
import sys
import warnings

from shortlist.errors import Interrupted, ShortlistError, is_in_all_processes, rename_arguments
from shortlist.extras import extra
from shortlist.launch import is_main_process


def main() -> None:
    """Run the command line. Errors that a user can correct are printed as one message, without a traceback."""
    warnings.showwarning = lambda message, *_: print(f"Warning: {message}", file=sys.stderr)
    if not is_main_process():
        warnings.simplefilter("ignore")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    if "" not in sys.path:
        sys.path.append("")  # the current folder, for user modules; last, so that they do not hide other modules
    try:
        with extra("all", "The shortlist command"):  # each module registers its commands
            from shortlist.cli import (  # noqa: F401
                data,
                embedding,
                export,
                galleries,
                planning,
                recipes,
                reports,
                search,
                serving,
                sweeping,
                training,
            )
            from shortlist.cli.app import option_names, root_command
    except ShortlistError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    try:
        root_command()()
    except Exception as error:
        interrupted = isinstance(error, Interrupted)
        if is_main_process() or not is_in_all_processes(error):
            text = _message_of(error)
            if text is None:
                raise
            text = rename_arguments(text, option_names(), "{name} {value}")
            print(error if interrupted else f"Error: {text}", file=sys.stderr)
        raise SystemExit(130 if interrupted else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _message_of(error: Exception) -> str | None:
    """Return the message of an error that a user can correct, or None."""
    if isinstance(error, ShortlistError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    if isinstance(error, MemoryError | RuntimeError):
        from shortlist.batches.memory import is_out_of_memory

        if is_out_of_memory(error):
            reason, _, _ = str(error).partition("\n")
            return f"Not enough memory ({reason}). Use a smaller model, batch or image size."
    return None

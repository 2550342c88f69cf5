"""The command line: parses, calls, prints. No logic lives here."""

from __future__ import annotations

import logging
import sys
import warnings

from shortlist.errors import Interrupted, ShortlistError, rename_arguments
from shortlist.extras import extra


def main() -> None:
    """Run the command line; a user's mistake is one message, and no traceback."""
    warnings.showwarning = lambda message, *_: print(f"Warning: {message}", file=sys.stderr)
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    try:
        with extra("all", "The shortlist command"):  # each module adds its commands
            from shortlist.cli import data, export, recipes, reports, search, serving, training  # noqa: F401
            from shortlist.cli.app import app, option_names
    except ShortlistError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    try:
        app()
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        raise SystemExit(130) from None
    except ShortlistError as error:
        print(f"Error: {rename_arguments(str(error), option_names(), '{name} {value}')}", file=sys.stderr)
        raise SystemExit(1) from None
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"Error: {error.strerror or error}{where}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None

"""`shortlist serve` in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Server:
    address: str
    process: subprocess.Popen[str]


@contextmanager
def serving(gallery: Path, *options: str) -> Iterator[Server]:
    """A server on a free port; it must end without a traceback when it is interrupted."""
    command = [sys.executable, "-m", "shortlist", "serve", str(gallery), "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"http://\S+", said)
            if found is None:
                process.wait(60)
                errors.seek(0)
                raise AssertionError(f"it does not serve: {said}{errors.read()}")
            yield Server(found.group(), process)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            errors.seek(0)
            assert errors.read() == ""
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

"""The server under load, with slow clients among others: no request fails.

`make chaos` repeats the measurement in docs/serve.md: 20 minutes at full load. `make test` runs it for a second, with
few clients and a small gallery.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos import extent
from tests.processes import LONG, ROOT, Commands
from tests.serve.galleries import CLASSES, IMAGES, small_gallery
from tests.serve.servers import serving

SOAK = ROOT / "benchmarks" / "soak.py"
FEW = ("--at-once", "2", "--slow", "1", "--stalled", "1", "--megapixels", "0.02", "--images", str(CLASSES * IMAGES))


def test_load(commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory is flat only after a while, so that `growth` is not compared in the brief form."""
    seconds, found = extent.times(1, 1200), tmp_path / "soak.json"
    options = ["--seconds", str(seconds), "--out", str(found)]
    with ExitStack() as stack:
        if not extent.LONG:
            small_gallery(tmp_path)
            server = stack.enter_context(serving(commands, tmp_path / "gallery"))
            options += [*FEW, "--address", server.address, "--pid", str(server.pid)]
        running = commands.start(*options, cwd=tmp_path, script=SOAK)
        code = running.wait(seconds + LONG)
    assert found.exists(), running.err
    result = json.loads(found.read_text())
    assert result["failures"] == []
    assert result["answers"]["slow upload: 200"] > 0
    assert result["answers"]["search: 200"] > 0
    assert result["p99"] > 0
    if extent.LONG:
        assert code == 0, running.err
        with capsys.disabled():
            print(f"\n{running.out}")  # answers, response times and memory

"""The server under load, with slow clients among others: no request fails. `make chaos` runs it for 20 minutes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chaos.extent import times
from tests.processes import LONG, ROOT, Commands
from tests.serve.galleries import CLASSES, IMAGES, small_gallery
from tests.serve.servers import serving

SOAK = ROOT / "benchmarks" / "soak.py"
QUICK = ("--at-once", "2", "--slow", "1", "--stalled", "1", "--megapixels", "0.02", "--images", str(CLASSES * IMAGES))


def test_load(commands: Commands, tmp_path: Path) -> None:
    """Memory is flat only after a while, so that `growth` is not compared in the brief form."""
    small_gallery(tmp_path)
    found = tmp_path / "soak.json"
    with serving(commands, tmp_path / "gallery") as server:
        where = ("--address", server.address, "--pid", str(server.pid), "--out", found)
        seconds = times(1, 1200)
        running = commands.start("--seconds", str(seconds), *QUICK, *where, cwd=tmp_path, script=SOAK)
        code = running.wait(seconds + LONG)
    result = json.loads(found.read_text())
    assert result["failures"] == []
    assert result["answers"]["slow upload: 200"] > 0
    assert result["answers"]["search: 200"] > 0
    assert result["p99"] > 0
    if times(0, 1):
        assert code == 0, running.err

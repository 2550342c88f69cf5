"""Run a case in a separate process, so that its peak memory can be measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch


def run_alone(script: str, case: Any, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what `script --case CASE` prints as JSON in its last line, and where it was measured."""
    command = [sys.executable, script, "--case", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | dict(environment or {}))
    if done.returncode == -9:  # killed by the system for its memory
        return {"out_of_memory": True}
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr}")
    where = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
    return json.loads(done.stdout.splitlines()[-1]) | where

"""Commands and scripts in processes of their own, to be stopped and killed; all forked from one that has imported all.

Run as a script, this is that one: it reads orders from its input, one JSON object per line.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[1] / "src"
LONG = 120.0  # seconds; for a machine that has much else to do


@dataclass
class Running:
    """A command at work."""

    owner: Commands
    pid: int
    folder: Path  # of what it prints

    def wait(self) -> int:
        """Its exit code, or the number of the signal that ended it, negative."""
        return int(self.owner.ask({"wait": self.pid}))

    def kill(self, when: Callable[[], bool], by: int = signal.SIGKILL) -> int:
        """End it by a signal as soon as something is so."""
        self.until(when)
        os.kill(self.pid, by)
        return self.wait()

    def until(self, when: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG
        while not when():
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            assert state != "Z", f"it ended before that:\n{self.out}\n{self.err}"
            assert time.monotonic() < end, f"it takes too long:\n{self.out}\n{self.err}"
            time.sleep(0.002)

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(encoding="utf-8")


class Commands:
    """Starts commands.

    Args:
        folder: for what they print.
        threads: of torch in each of them.
    """

    def __init__(self, folder: Path, threads: int = 1) -> None:
        self.folder, self.number = folder, 0
        settings = {"PYTHONPATH": str(SOURCES), "COLUMNS": "120", "OMP_WAIT_POLICY": "passive"}  # waits without working
        self.parent = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings, "OMP_NUM_THREADS": str(threads)},
        )

    def start(self, *args: str | Path, cwd: Path, before: str = "", script: Path | None = None) -> Running:
        """`shortlist ARGS`, or `python SCRIPT ARGS`, in a folder; `before` is Python to run first."""
        self.number += 1
        printed = self.folder / f"command-{self.number}"
        printed.mkdir(parents=True)
        words = [script or "shortlist", *args]
        order = {"argv": [str(each) for each in words], "cwd": str(cwd), "printed": str(printed), "before": before}
        return Running(self, int(self.ask({**order, "is_script": script is not None})), printed)

    def run(self, *args: str | Path, cwd: Path, before: str = "", script: Path | None = None) -> tuple[int, str, str]:
        """The exit code, what went to the standard output, and what to the error output."""
        running = self.start(*args, cwd=cwd, before=before, script=script)
        return running.wait(), running.out, running.err

    def ask(self, order: dict[str, Any]) -> str:
        assert self.parent.stdin is not None
        assert self.parent.stdout is not None
        self.parent.stdin.write(json.dumps(order) + "\n")
        self.parent.stdin.flush()
        return self.parent.stdout.readline()

    def close(self) -> None:
        self.parent.kill()  # it has nothing to tidy up, and takes long over it
        self.parent.communicate()


@contextlib.contextmanager
def commands(folder: Path, threads: int = 1) -> Iterator[Commands]:
    opened = Commands(folder, threads)
    try:
        yield opened
    finally:
        opened.close()


def serve() -> None:
    import shortlist.report.demo
    import shortlist.training
    import shortlist.training.loop  # noqa: F401 - so that the forked ones have them

    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become(order)
        print(pid, flush=True)


def _become(order: dict[str, Any]) -> None:
    """Be the command, to the end."""
    code = 70
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(Path(order["printed"]) / name, os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(order["cwd"])
        sys.argv = order["argv"]
        exec(order["before"], {})
        if order["is_script"]:
            sys.path[0] = str(Path(sys.argv[0]).parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            from shortlist.cli import main

            main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()

"""Commands and scripts in processes of their own, to be stopped and killed; all forked from one that has imported all.

Run as a script, this is that one: it reads orders from its input, one JSON object per line.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, util
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
PRELOADED = (  # not shortlist.serve: what it says without its packages is tested
    *("faiss", "fastapi.staticfiles", "pandas", "torch.utils.tensorboard", "uvicorn"),  # pyarrow wants pandas
    *(f"shortlist.cli.{name}" for name in ("data", "export", "recipes", "reports", "search", "serving")),
    "shortlist.cli.sweeping",
    *("shortlist.report.run_report", "shortlist.gallery.folder_store", "shortlist.gallery.gallery"),
    *("shortlist.cli.training", "shortlist.training.loop", "shortlist.training.sweep_study"),
)
LONG = 300.0  # seconds; for a machine that has much else to do


@dataclass
class Running:
    """A command at work."""

    owner: Commands
    pid: int
    folder: Path  # of what it prints

    code: int | None = None  # when it has been waited for

    def wait(self) -> int:
        """Its exit code, or the number of the signal that ended it, negative."""
        self._poll(self._ended)
        if self.code is None:
            self.code = int(self.owner.ask({"wait": self.pid}))
        return self.code

    def kill(self, when: Callable[[], bool], by: int = signal.SIGKILL) -> int:
        """End it by a signal as soon as something is so."""
        self.until(when)
        os.kill(self.pid, by)
        return self.wait()

    def until(self, when: Callable[[], bool]) -> None:
        """Wait until something is so, which must be before the command ends."""
        self._poll(lambda: self._ended() or when())
        assert when(), f"it ended before that:\n{self.out}\n{self.err}"

    def _poll(self, when: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG
        while not when():
            assert time.monotonic() < end, f"it takes too long:\n{self.out}\n{self.err}"
            time.sleep(0.002)

    def _ended(self) -> bool:
        """It is a zombie until it is waited for."""
        return self.code is not None or Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

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
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        settings = {
            "PYTHONPATH": os.pathsep.join((str(SOURCES), str(ROOT))),
            "COLUMNS": "120",
        }
        self.parent = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings},
        )

    def start(self, *args: str | Path, cwd: Path, before: str = "", script: Path | None = None) -> Running:
        """`shortlist ARGS`, or `python SCRIPT ARGS`, in a folder; `before` is Python to run first."""
        self.number += 1
        printed = self.folder / f"command-{self.number}"
        printed.mkdir(parents=True)
        for name in ("out", "err"):
            (printed / name).touch()
        words = [script or "shortlist", *args]
        order = {"argv": [str(each) for each in words], "cwd": str(cwd), "printed": str(printed), "before": before}
        return Running(self, int(self.ask({**order, "is_script": script is not None})), printed)

    @contextlib.contextmanager
    def started(self, *args: str | Path, cwd: Path) -> Iterator[Running]:
        """A command that is killed in the end, if it has not ended by then."""
        running = self.start(*args, cwd=cwd)
        try:
            yield running
        finally:
            if running.code is None:
                os.kill(running.pid, signal.SIGKILL)
                running.wait()

    def run(self, *args: str | Path, cwd: Path, before: str = "", script: Path | None = None) -> tuple[int, str, str]:
        """The exit code, what went to the standard output, and what to the error output."""
        running = self.start(*args, cwd=cwd, before=before, script=script)
        return running.wait(), running.out, running.err

    def python(self, code: str) -> str:
        """What Python code prints."""
        status, out, err = self.run(cwd=ROOT, before=f"{code}\nraise SystemExit")
        assert status == 0, err
        return out

    def ask(self, order: dict[str, Any]) -> str:
        assert self.parent.stdin is not None
        assert self.parent.stdout is not None
        self.parent.stdin.write(json.dumps(order) + "\n")
        self.parent.stdin.flush()
        return self.parent.stdout.readline()

    def close(self) -> None:
        self.parent.kill()  # it has nothing to tidy up, and takes long over it
        self.parent.communicate()


def serve() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    Image.init()  # imports a module for each kind of file
    gc.collect()
    gc.freeze()  # what has been imported is shared, and stays: collections in the commands need not look at it
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


def fork_the_fork_server() -> None:
    """Let multiprocessing fork its fork server from this process, which has imported torch, instead of starting it."""
    start = util.spawnv_passfds

    def fork_or_start(path: bytes, args: Sequence[str], descriptors: Sequence[int]) -> int:
        if "forkserver" not in args[-1]:
            return start(path, args, descriptors)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _run_alone(args[-1], descriptors)
        return pid

    util.spawnv_passfds = fork_or_start


def _run_alone(code: str, descriptors: Sequence[int]) -> None:
    """Run code as in `python -c`, with no other files open than these, and exit."""
    try:
        for opened in {int(file.name) for file in Path("/proc/self/fd").iterdir()} - {0, 1, 2, *descriptors}:
            with contextlib.suppress(OSError):
                os.close(opened)
        forkserver._forkserver.__init__()  # its lock was held during the fork
        sys.modules["__main__"] = ModuleType("__main__")
        exec(code, vars(sys.modules["__main__"]))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


if __name__ == "__main__":
    serve()

"""Commands and scripts in processes of their own, which tests can stop and kill.

All are forked from one process, the fork server, which has imported what they need. It is this file, run as a script.
The processes of pytest share it: each sends it requests over a Unix socket, one JSON object per line.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import secrets
import select
import selectors
import signal
import socket
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

import filelock
from PIL import Image

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
PRELOADED = (  # not shortlist.serve: what it says without its packages is tested
    *("faiss", "fastapi.staticfiles", "matplotlib.backends.backend_agg", "matplotlib.figure"),
    *("pandas", "torch.utils.tensorboard", "uvicorn"),  # pyarrow wants pandas
    *("pytorch_metric_learning.losses", "torch.distributed.run"),
    *(f"shortlist.cli.{name}" for name in ("data", "export", "recipes", "reports", "search", "serving")),
    "shortlist.cli.sweeping",
    *("shortlist.report.run_report", "shortlist.gallery.folder_store", "shortlist.gallery.gallery"),
    *("shortlist.cli.training", "shortlist.training.loop", "shortlist.training.sweep_study"),
)
LONG = 300.0  # seconds; for a machine that has much else to do


def free_port() -> int:
    """Return a port that a server can use.

    It is below the range that systems usually choose from for outgoing connections, so that none of these takes it
    before the server does.
    """
    while True:
        port = secrets.choice(range(20_000, 32_000))  # not the random numbers of tests, which are the same everywhere
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


@dataclass
class Running:
    """A command that has been started."""

    owner: Commands
    pid: int
    folder: Path  # with its output

    code: int | None = None  # once it has been waited for

    def wait(self, seconds: float = LONG) -> int:
        """Return its exit code, or the negative number of the signal that ended it."""
        if self.code is None:
            process = os.pidfd_open(self.pid)  # its end is an event: polling would take time from the process
            try:
                ended, _, _ = select.select([process], [], [], seconds)
            finally:
                os.close(process)
            assert ended, f"it takes too long:\n{self.out}\n{self.err}"
            self.code = int(self.owner.ask({"wait": self.pid}))
        return self.code

    def kill(self, when: Callable[[], bool], by: int = signal.SIGKILL) -> int:
        """Send it a signal as soon as a condition holds, and wait for its end."""
        self.until(when)
        os.kill(self.pid, by)
        return self.wait()

    def until(self, when: Callable[[], bool]) -> None:
        """Wait until a condition holds, which must be before the command ends."""
        self._poll(lambda: self.ended() or when())
        assert when(), f"it ended before that:\n{self.out}\n{self.err}"

    def _poll(self, when: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG
        while not when():
            assert time.monotonic() < end, f"it takes too long:\n{self.out}\n{self.err}"
            time.sleep(0.002)

    def ended(self) -> bool:
        """Whether the process has ended; it is a zombie until it is waited for."""
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
        folder: for their output.
        address: file of the socket of the fork server, which is started if there is none.
        owner: process that the fork server ends with.
    """

    def __init__(self, folder: Path, address: Path, owner: int) -> None:
        self.folder, self.address, self.number = folder, address, 0
        self.connection = self._connect(address, owner)
        self.replies = self.connection.makefile(encoding="utf-8")

    def _connect(self, address: Path, owner: int) -> socket.socket:
        settings = {"PYTHONPATH": os.pathsep.join((str(SOURCES), str(ROOT))), "COLUMNS": "120"}
        with filelock.FileLock(f"{address}.lock"):
            if not address.exists():
                command = [sys.executable, __file__, str(address), str(owner)]
                subprocess.run(command, stdin=subprocess.DEVNULL, check=True, env={**os.environ, **settings})
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(address))
        return connection

    def start(self, *args: str | Path, cwd: Path, before: str = "", script: Path | None = None) -> Running:
        """Start `shortlist ARGS`, or `python SCRIPT ARGS`, in a folder; `before` is Python code that is run first."""
        self.number += 1
        printed = self.folder / f"command-{self.number}"
        printed.mkdir(parents=True)
        for name in ("out", "err"):
            (printed / name).touch()
        words = [script or "shortlist", *args]
        order = {"argv": [str(each) for each in words], "cwd": str(cwd), "printed": str(printed), "before": before}
        return Running(self, int(self.ask({**order, "is_script": script is not None})), printed)

    @contextlib.contextmanager
    def started(self, *args: str | Path, cwd: Path, before: str = "") -> Iterator[Running]:
        """Start a command that is killed at the end of the block, unless it has ended."""
        running = self.start(*args, cwd=cwd, before=before)
        try:
            yield running
        finally:
            if running.code is None:
                os.kill(running.pid, signal.SIGKILL)
                running.wait()

    def run(self, *args: str | Path, cwd: Path, before: str = "", script: Path | None = None) -> tuple[int, str, str]:
        """Return the exit code, the standard output and the error output."""
        running = self.start(*args, cwd=cwd, before=before, script=script)
        return running.wait(), running.out, running.err

    def python(self, code: str) -> str:
        """Return what Python code prints."""
        status, out, err = self.run(cwd=ROOT, before=f"{code}\nraise SystemExit")
        assert status == 0, err
        return out

    def ask(self, order: dict[str, Any]) -> str:
        self.connection.sendall(json.dumps(order).encode() + b"\n")
        return self.replies.readline()

    def close(self) -> None:
        self.replies.close()
        self.connection.close()


def main(address: str, owner: int) -> None:
    """Start the fork server in the background.

    Args:
        address: file of its socket.
        owner: process that it ends with.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()  # clients that connect before the imports are done wait for their first reply
    if os.fork() == 0:
        serve(listener, os.pidfd_open(owner))


def serve(listener: socket.socket, owner: int) -> None:
    """Fork commands for all clients; `owner` is the file descriptor of a process, whose end ends this one."""
    os.fsync = os.fstat  # as in conftest.py
    gc.disable()
    for module in PRELOADED:
        importlib.import_module(module)
    Image.init()  # imports a module for each kind of file
    pages = importlib.import_module("shortlist.report.pages")._environment()
    for template in pages.list_templates(extensions=["html"]):
        pages.get_template(template)
    fork_processes_of_multiprocessing()
    gc.enable()
    gc.collect()
    gc.freeze()  # what has been imported is shared, and stays: collections in the commands need not look at it
    with selectors.DefaultSelector() as selector:
        selector.register(owner, selectors.EVENT_READ, data="owner")
        selector.register(listener, selectors.EVENT_READ, data="listener")
        while True:
            for key, _ in selector.select():
                if key.data == "owner":
                    os._exit(0)  # without the tidying up of the imported libraries, which takes long
                if key.data == "listener":
                    client, _ = listener.accept()
                    selector.register(client, selectors.EVENT_READ, data=client.makefile())
                elif order := key.data.readline():
                    key.fileobj.sendall(b"%d\n" % _carry_out(json.loads(order)))
                else:
                    selector.unregister(key.fileobj)


def _carry_out(order: dict[str, Any]) -> int:
    """Return the exit code of the command to wait for, or the process of a command that is started."""
    if "wait" in order:
        return os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
    pid = os.fork()
    if pid == 0:
        _become(order)
    return pid


def _become(order: dict[str, Any]) -> None:
    """Run the command in this process, and end it."""
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


def fork_processes_of_multiprocessing() -> None:
    """Let multiprocessing fork its fork server, and what it spawns, from a command, which has imported torch.

    Tests of the processes that decode images, and of the supervisor, start real ones, from the process of pytest.
    """
    start = util.spawnv_passfds

    def fork_or_start(path: bytes, args: Sequence[str], descriptors: Sequence[int]) -> int:
        code, *others = args[args.index("-c") + 1 :]
        if "forkserver" not in code and "spawn_main" not in code:
            return start(path, args, descriptors)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            sys.argv = ["-c", *others]
            _run_alone(code, descriptors)
        return pid

    util.spawnv_passfds = fork_or_start


def _run_alone(code: str, descriptors: Sequence[int]) -> None:
    """Run code as in `python -c`, with no other files open than these, and exit."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
    main(sys.argv[1], int(sys.argv[2]))

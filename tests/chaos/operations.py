"""Commands that write files, and ways to disturb them."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import yaml

from shortlist.files import file_digest
from shortlist.gallery import Gallery
from shortlist.progress import Display
from shortlist.training import train_run
from tests.processes import Commands, Running
from tests.training.runs import FASTEST_MODEL, class_folders, config, records

# Everything that a checkpoint holds besides the weights: a moving average, a memory, and the state of mixed precision.
TRAININGS = {
    "simix": ["loss.simix=true", "training.ema=0.7", "training.checkpoint_every=2"],
    "memory": ["loss.memory={size: 12}", "training.precision=bfloat16", "training.checkpoint_every=1"],
}
FEW = ["training.epochs=null", "training.steps=3", "optimizer.name=sgd"]
SPACE = "optimizer.lr: [1e-3, 2e-3]\n"


@dataclass(frozen=True)
class Operation:
    """A command that changes files.

    Args:
        name: Its name.
        command: Its arguments.
        result: Computes what the files contain, from the folder in which the command runs; None: nothing yet.
        resumes: Whether a command that was disturbed may leave a part of its work, which the next one continues.
        resume: Arguments that continue it, if the file that is named exists.
    """

    name: str
    command: tuple[str, ...]
    result: Callable[[Path], object]
    resumes: bool = False
    resume: tuple[str, tuple[str, ...]] | None = None

    def next_command(self, home: Path) -> tuple[str, ...]:
        """Return the command that does or continues the work."""
        if self.resume is not None and (home / self.resume[0]).exists():
            return self.resume[1]
        return self.command


def run_result(name: str) -> Callable[[Path], object]:
    def result(home: Path) -> object:
        run = home / name
        if not (run / "evaluation.json").exists():
            return None
        files = {each.name: file_digest(each) for each in (run / "embedder.safetensors", run / "evaluation.json")}
        return files, [records(run, kind) for kind in ("step", "validation", "test")]

    return result


def table_result(home: Path) -> object:
    file = home / "vectors.parquet"
    return pq.read_table(file).to_pylist() if file.exists() else None


def gallery_result(name: str) -> Callable[[Path], object]:
    def result(home: Path) -> object:
        if not (home / name / "gallery.json").exists():
            return None
        assert Gallery.check(home / name, display=Display()).problems == ()
        opened = Gallery.open(home / name)
        items = opened.items(limit=1000)
        vectors = opened.store.vectors([each.id for each in items]).tolist() if items else []
        return [(str(each.path), each.label, vector) for each, vector in zip(items, vectors, strict=True)] or None

    return result


def sweep_result(home: Path) -> object:
    file = home / "study" / "results.json"
    trials = json.loads(file.read_text())["trials"] if file.exists() else []
    done = [{**each, "seconds": 0} for each in trials]
    return done if len(done) == 2 and all(each["state"] == "complete" for each in done) else None


def files_result(*names: str) -> Callable[[Path], object]:
    def result(home: Path) -> object:
        files = [file for name in names for file in ([home / name, *(home / name).glob("*")])]
        contents = {file.name: file.read_bytes() for file in files if file.is_file()}
        return {name: content.replace(home.name.encode(), b"home") for name, content in contents.items()} or None

    return result


def train(name: str) -> Operation:
    run = f"run-{name}"
    command = ("train", f"{name}.yaml", "--run", run)
    resume = (f"{run}/config.yaml", ("train", "--resume", run))
    return Operation(f"train {name}", command, run_result(run), resumes=True, resume=resume)


def operations(images: Path) -> dict[str, Operation]:
    one_class, few = str(images / "class 00"), str(images / "class 01")
    sweep = ("sweep", "sweep.yaml", "--space", "space.yaml", "--out", "study")
    found = [
        *map(train, TRAININGS),
        Operation("embed", ("embed", "run", few, "--out", "vectors.parquet"), table_result),
        Operation("index", ("index", "run", few, "--out", "new"), gallery_result("new")),
        Operation("gallery add", ("gallery", "add", "gallery", few), gallery_result("gallery")),
        Operation("gallery remove", ("gallery", "remove", "gallery", f"{one_class}/0.png"), gallery_result("gallery")),
        Operation("sweep", sweep, sweep_result, resumes=True),
        Operation("report", ("report", "run"), files_result("run/report.html")),
        Operation("export", ("export", "run", "--package", "package"), files_result("package")),
        Operation("export to a file", ("export", "run", "--torchscript", "it.pt"), files_result("it.pt")),
    ]
    return {each.name: each for each in found}


@dataclass(frozen=True)
class Whole:
    """What an operation does that is not disturbed: its result, all files, the number of their changes, the time."""

    result: object
    names: Counter[str]
    events: int
    seconds: float


class World:
    """A folder with images, a run and a gallery, of which every operation gets a copy.

    Args:
        root: An empty folder.
        commands: Starts processes.
    """

    def __init__(self, root: Path, commands: Commands) -> None:
        self.root, self.commands, self.copies = root, commands, 0
        images, self.template = class_folders(root / "images"), root / "template"
        train_run(config(images, FASTEST_MODEL, *FEW), self.template / "run", Display())
        (self.template / "run" / "report.html").write_text("an old report")
        for name, settings in (*TRAININGS.items(), ("sweep", [])):
            recipe = config(images, FASTEST_MODEL, *FEW, *settings)
            (self.template / f"{name}.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        (self.template / "space.yaml").write_text(SPACE)
        self.operations = operations(images)
        self._run("index", "run", str(images / "class 00"), "--out", "gallery", cwd=self.template)
        self._whole: dict[str, Whole] = {}

    def copy(self) -> Path:
        self.copies += 1
        return Path(shutil.copytree(self.template, self.root / f"copy-{self.copies}"))

    def whole(self, name: str) -> Whole:
        """Return what an operation does that is not disturbed."""
        if name not in self._whole:
            home, operation = self.copy(), self.operations[name]
            log = self.root / "events"
            started = time.monotonic()
            self._run(*operation.command, cwd=home, before=disturbance(home, "nothing", 0, log))
            seconds = time.monotonic() - started
            result = operation.result(home)
            assert result not in (None, operation.result(self.template))
            self._whole[name] = Whole(result, file_names(home), log.stat().st_size, seconds)
            shutil.rmtree(home)
        return self._whole[name]

    def _run(self, *command: str, cwd: Path, before: str = "") -> None:
        code, _, error = self.commands.run(*command, cwd=cwd, before=before)
        assert code == 0, error

    def disturb(self, operation: Operation, home: Path, how: str, event: int) -> tuple[int, str, str]:
        """Run an operation that is disturbed at an event, and return its exit code, standard output and error output.

        It writes to pipes, because it cannot write to files on a full disk.
        """
        pipes = [home.with_name(f"{home.name}-{name}") for name in ("out", "err")]
        for pipe in pipes:
            os.mkfifo(pipe)
        readers = [os.open(pipe, os.O_RDWR | os.O_NONBLOCK) for pipe in pipes]
        code = self.start(operation, home, how, event, pipes).wait()
        out, err = (
            os.read(reader, 2**16).decode() if select.select([reader], [], [], 0)[0] else "" for reader in readers
        )
        for reader in readers:
            os.close(reader)
        return code, out, err

    def start(
        self, operation: Operation, home: Path, how: str = "nothing", event: int = 0, pipes: Sequence[Path] = ()
    ) -> Running:
        """Start an operation that is disturbed at an event, and writes its output to pipes."""
        before = disturbance(home, how, event)
        for number, pipe in enumerate(pipes, 1):
            before += f"os.dup2(os.open({str(pipe)!r}, os.O_WRONLY), {number})\n"
        return self.commands.start(*operation.command, cwd=home, before=before)

    def check(self, operation: Operation, home: Path, leaves: bool = True) -> None:
        """Check that a disturbed operation has done nothing or all, and that it does the rest now.

        Args:
            operation: The operation.
            home: The folder in which it ran.
            leaves: Whether hidden files may be left behind, since a process that was killed cannot delete them.
        """
        whole, found = self.whole(operation.name), operation.result(home)
        if not operation.resumes:
            assert found in (whole.result, operation.result(self.template))
        if found != whole.result:
            self._run(*operation.next_command(home), cwd=home)
            assert operation.result(home) == whole.result
            now = Counter({name: n for name, n in file_names(home).items() if not leaves or "/." not in f"/{name}"})
            assert now == whole.names, f"left behind: {now - whole.names}, missing: {whole.names - now}"
        shutil.rmtree(home)


def file_names(home: Path) -> Counter[str]:
    """Count all files by their names, in which the random numbers of the changes of a gallery are left out."""
    names = [str(file.relative_to(home)) for file in home.rglob("*") if not file.name.endswith("lock")]
    return Counter(re.sub(r"-\d+\.(npy|parquet|faiss)", r".\1", name) for name in names)


def disturbance(home: Path, how: str, event: int, log: Path | None = None) -> str:
    """Return Python code that does something at the n-th time that a process changes a file.

    Args:
        home: Folder whose files count.
        how: kill; error: this change fails because the disk is full, but later ones do not; full: nothing can be
            written from then on; read-only: no change succeeds; nothing.
        event: The number n, from 1.
        log: File that gets a byte per event.
    """
    return f"""
import errno, os, resource, signal, sys
home, how, left = {str(home)!r}, {how!r}, [{event}]
watched = {{"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime", "os.chmod"}}
log = os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if {log is not None} else None

def happens(path):
    if log is not None:
        os.write(log, b"x")
    left[0] -= 1
    if how == "read-only":
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
    if left[0] == 0:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "error":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if how == "full":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

def watch(event, args):
    if event not in watched:
        return
    path = args[0]
    if not isinstance(path, (str, os.PathLike)) or not os.path.abspath(path).startswith(home + os.sep):
        return
    if event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR):
        happens(os.fspath(path))

real = os.fsync
def fsync(file):
    if how != "read-only":  # of any file
        happens(None)
    real(file)

os.fsync = fsync
sys.addaudithook(watch)
"""

"""Commands that write files, and ways to disturb them."""

from __future__ import annotations

import hashlib
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
from typing import Any

import pyarrow.parquet as pq
import yaml

from shortlist.gallery import Gallery
from shortlist.progress import Display
from shortlist.training import train_run
from tests.processes import Commands, Running
from tests.training.runs import FASTEST_MODEL, class_folders, config, records

# Everything that a checkpoint holds besides the weights: a moving average, a memory, and the state of mixed precision.
TRAININGS = {
    "simix": ["loss.simix=true", "training.ema=0.7", "training.checkpoint_every=2"],
    "memory": [
        "loss={name: pml.ContrastiveLoss, memory: {size: 12}}",
        "training.precision=bfloat16",
        "training.checkpoint_every=1",
    ],
}
FEW = ["training.epochs=null", "training.steps=3", "optimizer.name=sgd"]
SPACE = "optimizer.lr: [1e-3, 2e-3]\n"
OLD_MIN_SCORE = 0.5
# Reports recommend a minimum score even if few queries find anything with it, as in these runs.
RECOMMENDS = "from shortlist.report import thresholds\nthresholds.MIN_FOUND = 0\n"


@dataclass(frozen=True)
class Operation:
    """A command that changes files.

    Args:
        name: Its name.
        command: Its arguments.
        result: Computes what the files contain, from the folder in which the command runs; None: nothing yet.
        resumes: Whether a command that was disturbed may leave a part of its work, which the next one continues.
        resume: Arguments that continue it, if the file that is named exists.
        one_by_one: Whether the result is a dictionary of files, which are replaced one after the other.
        repeat: Arguments that change no result once it is done. Default: the command itself.
    """

    name: str
    command: tuple[str, ...]
    result: Callable[[Path], Any]
    resumes: bool = False
    resume: tuple[str, tuple[str, ...]] | None = None
    one_by_one: bool = False
    repeat: tuple[str, ...] | None = None

    def next_command(self, home: Path, done: bool) -> tuple[str, ...]:
        """Return the command that does or continues the work or, if it is done, only deletes what was left behind."""
        if done and self.repeat is not None:
            return self.repeat
        if self.resume is not None and (home / self.resume[0]).exists():
            return self.resume[1]
        return self.command

    def may_leave(self, found: Any, before: Any, after: Any) -> bool:
        """Return whether a disturbed command may have this result: that of before, or of a command that is done."""
        if self.one_by_one:
            return all(found.get(name) in (before.get(name), after.get(name)) for name in {*found, *before, *after})
        return self.resumes or found in (before, after)


def digests(home: Path, *names: str) -> dict[str, str]:
    """Return the digests of files, and of all files in folders, by name; the name of the home does not count."""
    files = [file for name in names for file in ([home / name, *(home / name).glob("*")]) if file.is_file()]
    contents = {file.name: file.read_bytes().replace(home.name.encode(), b"home") for file in files}
    return {name: hashlib.sha256(VARYING.sub(b"", content)).hexdigest() for name, content in contents.items()}


VARYING = re.compile(  # what a report says about the speed and the command of the training
    rb'<figure class="plot">\n<figcaption><span class="title">images per second<.*?</figure>'
    rb"|<dt>(?:time|command)</dt><dd>.*?</dd>",
    re.DOTALL,
)
RUN_FILES = ("embedder.safetensors", "evaluation.json", "min-score.json", "report.html")


def run_result(name: str) -> Callable[[Path], object]:
    def result(home: Path) -> object:
        run = home / name
        if not (run / "evaluation.json").exists():
            return None
        files = digests(home, *(f"{name}/{each}" for each in RUN_FILES))
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
        found = [(str(each.path), each.label, vector) for each, vector in zip(items, vectors, strict=True)]
        return (found, opened.min_score) if found else None

    return result


def sweep_result(home: Path) -> object:
    file = home / "study" / "results.json"
    trials = json.loads(file.read_text())["trials"] if file.exists() else []
    done = [{**each, "seconds": 0} for each in trials]
    return done if len(done) == 2 and all(each["state"] == "complete" for each in done) else None


def files_result(*names: str) -> Callable[[Path], object]:
    return lambda home: digests(home, *names) or None


def train(name: str) -> Operation:
    run = f"run-{name}"
    command = ("train", f"{name}.yaml", "--run", run)
    resume = (f"{run}/config.yaml", ("train", "--resume", run))
    return Operation(f"train {name}", command, run_result(run), resumes=True, resume=resume)


def remove(image: str) -> Operation:
    """An image that was removed cannot be removed again, but any other change deletes unused files."""
    repeat = ("gallery", "set", "gallery", "--min-score", str(OLD_MIN_SCORE))
    command = ("gallery", "remove", "gallery", image)
    return Operation("gallery remove", command, gallery_result("gallery"), repeat=repeat)


def operations(images: Path) -> dict[str, Operation]:
    one_class, few = str(images / "class 00"), str(images / "class 01")
    sweep = ("sweep", "sweep.yaml", "--space", "space.yaml", "--out", "study")
    report = files_result("run/min-score.json", "run/report.html")
    found = [
        *map(train, TRAININGS),
        Operation("embed", ("embed", "run", few, "--out", "vectors.parquet"), table_result),
        Operation("index", ("index", "run", few, "--out", "new"), gallery_result("new")),
        Operation("gallery add", ("gallery", "add", "gallery", few), gallery_result("gallery")),
        remove(f"{one_class}/0.png"),
        Operation("sweep", sweep, sweep_result, resumes=True),
        Operation("report", ("report", "run"), report, one_by_one=True),
        Operation("export", ("export", "run", "--package", "package"), files_result("package")),
        Operation("export to a file", ("export", "run", "--torchscript", "it.pt"), files_result("it.pt")),
    ]
    return {each.name: each for each in found}


@dataclass(frozen=True)
class Whole:
    """What an operation does that is not disturbed.

    Args:
        result: Its result.
        names: The names of all files.
        largest: The size of the largest of them, in bytes.
        events: The number of changes of files.
        seconds: The time.
    """

    result: Any
    names: Counter[str]
    largest: int
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
        run = train_run(config(images, FASTEST_MODEL, *FEW), self.template / "run", Display())
        run.recommend_min_score((OLD_MIN_SCORE, 0.01))
        (run.path / "report.html").write_text("an old report")
        for name, settings in (*TRAININGS.items(), ("sweep", [])):
            recipe = config(images, FASTEST_MODEL, *FEW, *settings)
            (self.template / f"{name}.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        (self.template / "space.yaml").write_text(SPACE)
        self.operations = operations(images)
        self._succeed("index", "run", str(images / "class 00"), "--out", "gallery", cwd=self.template)
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
            self._succeed(*operation.command, cwd=home, before=disturbance(home, "nothing", 0, log))
            seconds = time.monotonic() - started
            result = operation.result(home)
            assert result not in (None, operation.result(self.template))
            largest = max(file.stat().st_size for file in home.rglob("*"))
            self._whole[name] = Whole(result, file_names(home), largest, log.stat().st_size, seconds)
            shutil.rmtree(home)
        return self._whole[name]

    def begin(self, *command: str, cwd: Path, before: str = "") -> Running:
        """Start a command."""
        return self.commands.start(*command, cwd=cwd, before=RECOMMENDS + before)

    def run(self, *command: str, cwd: Path, before: str = "") -> tuple[int, str, str]:
        """Run a command, and return its exit code, standard output and error output."""
        running = self.begin(*command, cwd=cwd, before=before)
        return running.wait(), running.out, running.err

    def _succeed(self, *command: str, cwd: Path, before: str = "") -> None:
        code, _, error = self.run(*command, cwd=cwd, before=before)
        assert code == 0, error

    def disturb(self, operation: Operation, home: Path, how: str, event: int, room: int = 0) -> tuple[int, str, str]:
        """Run an operation that is disturbed at an event, and return its exit code, standard output and error output.

        It writes to pipes, because it cannot write to files on a full disk.
        """
        pipes = [home.with_name(f"{home.name}-{name}") for name in ("out", "err")]
        for pipe in pipes:
            os.mkfifo(pipe)
        readers = [os.open(pipe, os.O_RDWR | os.O_NONBLOCK) for pipe in pipes]
        code = self.start(operation, home, how, event, room, pipes).wait()
        out, err = (
            os.read(reader, 2**16).decode() if select.select([reader], [], [], 0)[0] else "" for reader in readers
        )
        for reader in readers:
            os.close(reader)
        return code, out, err

    def start(
        self,
        operation: Operation,
        home: Path,
        how: str = "nothing",
        event: int = 0,
        room: int = 0,
        pipes: Sequence[Path] = (),
    ) -> Running:
        """Start an operation that is disturbed at an event, and writes its output to pipes."""
        before = disturbance(home, how, event, room=room)
        for number, pipe in enumerate(pipes, 1):
            before += f"os.dup2(os.open({str(pipe)!r}, os.O_WRONLY), {number})\n"
        return self.begin(*operation.command, cwd=home, before=before)

    def check(self, operation: Operation, home: Path, leaves: bool = True) -> None:
        """Check that a disturbed operation has done nothing or all, and that the next command does the rest.

        Args:
            operation: The operation.
            home: The folder in which it ran.
            leaves: Whether hidden files may be left behind, since a process that was killed cannot delete them.
        """
        whole, found = self.whole(operation.name), operation.result(home)
        assert operation.may_leave(found, operation.result(self.template), whole.result)
        self._succeed(*operation.next_command(home, found == whole.result), cwd=home)
        assert operation.result(home) == whole.result
        now = Counter({name: n for name, n in file_names(home).items() if not leaves or "/." not in f"/{name}"})
        assert now == whole.names, f"left behind: {now - whole.names}, missing: {whole.names - now}"
        shutil.rmtree(home)


def file_names(home: Path) -> Counter[str]:
    """Count all files by their names, in which the random numbers of the changes of a gallery are left out."""
    names = [str(file.relative_to(home)) for file in home.rglob("*") if not file.name.endswith("lock")]
    return Counter(re.sub(r"-\d+\.(npy|parquet|faiss)", r".\1", name) for name in names)


def disturbance(home: Path, how: str, event: int, log: Path | None = None, room: int = 0) -> str:
    """Return Python code that does something at the n-th time that a process changes a file.

    Args:
        home: Folder whose files count.
        how: kill; error: this change fails because the disk is full, but later ones do not; full: from then on, no file
            can become larger than `room`; read-only: no change succeeds; nothing.
        event: The number n, from 1.
        log: File that gets a byte per event.
        room: Number of bytes. A write that needs more of them stops halfway.
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
            resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, resource.RLIM_INFINITY))

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

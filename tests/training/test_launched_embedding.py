"""embed, index and evaluate with several processes give the results of one process, and only one of them prints."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from shortlist.encoding.vector_file import left_out_images
from tests.processes import Commands
from tests.training.runs import FASTEST_MODEL, class_folders, config
from tests.training.test_launched_runs import launch

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked")

# Python that counts the batches that a process embeds, in the file batches-RANK
COUNTING = """
import os, pathlib, shortlist.encoding.embed as embed
real = embed._iterate_embeddings
def counting(*args):
    for vectors in real(*args):
        with open(f"batches-{os.environ['RANK']}", "a") as file:
            file.write(f"{len(vectors)} ")
        yield vectors
embed._iterate_embeddings = counting
"""
# Python that waits to be killed in the second batch
WAITING = """
import pathlib, time, shortlist.encoding.embed as embed
real = embed._iterate_embeddings
def waiting(*args):
    for number, vectors in enumerate(real(*args)):
        if number == 1:
            pathlib.Path("here").touch()
            time.sleep(1000)
        yield vectors
embed._iterate_embeddings = waiting
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`images`, of which two cannot be read, and `run`, trained on others."""
    from shortlist.training import train_run

    path = tmp_path_factory.mktemp("embedded")
    settings = ["training.epochs=1", "data.validation=none", "batch.chunk_size=3"]
    train_run(config(class_folders(path / "own"), FASTEST_MODEL, *settings), path / "run")
    shutil.copytree(path / "own", path / "images")
    for name in ("class 00/1.png", "class 07/3.png"):
        (path / "images" / name).write_text("words")
    return path


def launched(commands: Commands, number: int, *args: str | Path, cwd: Path) -> tuple[str, str]:
    """Return what the first of several processes prints. Each must embed, and the others print nothing."""
    for file in cwd.glob("batches-*"):
        file.unlink()
    main, *others = launch(commands, number, *args, cwd=cwd, before=dict.fromkeys(range(number), COUNTING))
    assert main.wait() == 0, main.err
    for each in others:
        assert (each.wait(), each.out, each.err) == (0, "", "")
    shares = [(cwd / f"batches-{rank}").read_text().split() for rank in range(number)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 4  # even shares
    return main.out, main.err


def test_a_table(home: Path, commands: Commands) -> None:
    code, _, err = commands.run("embed", "run", "images", "-o", "one.parquet", cwd=home)
    assert code == 0, err
    _, messages = launched(commands, 3, "embed", "run", "images", "-o", "three.parquet", cwd=home)
    assert messages.replace("three.parquet", "one.parquet").splitlines()[-3:] == err.splitlines()[-3:]
    one, three = (parquet.read_table(home / f"{name}.parquet") for name in ("one", "three"))
    assert three.equals(one)
    assert len(one) == 70


def test_a_gallery(home: Path, commands: Commands) -> None:
    assert commands.run("index", "run", "images", "-o", "one", cwd=home)[0] == 0
    launched(commands, 2, "index", "run", "images", "-o", "two", cwd=home)
    one, two = (np.load(next((home / name).glob("vectors-*.npy"))) for name in ("one", "two"))
    assert np.array_equal(one, two)


def test_an_evaluation(home: Path, commands: Commands) -> None:
    shutil.rmtree(home / "run" / "vectors")
    code, want, err = commands.run("evaluate", "run", "--json", cwd=home)
    assert code == 0, err
    shutil.rmtree(home / "run" / "vectors")
    out, _ = launched(commands, 2, "evaluate", "run", "--json", cwd=home)
    assert json.loads(out) == json.loads(want)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed(victim: int, home: Path, commands: Commands) -> None:
    """The other process ends, and a single process resumes."""
    name = f"killed-{victim}.parquet"
    running = launch(commands, 2, "embed", "run", "images", "-o", name, cwd=home, before={victim: WAITING})
    assert running[victim].kill((home / "here").exists) == -signal.SIGKILL
    (home / "here").unlink()
    assert running[1 - victim].wait() == 1
    assert running[1 - victim].err.splitlines()[-1].startswith("Error: One of the processes has ended")
    code, _, err = commands.run("embed", "run", "images", "-o", name, cwd=home)
    assert code == 0, err
    assert "images embedded: 70" in err


def test_errors_are_printed_once(home: Path, commands: Commands) -> None:
    """Errors about an option, and about an image that another process cannot read."""
    shutil.copytree(home / "run", home / "other", ignore=shutil.ignore_patterns("vectors"))
    cases = {
        "--shard is I/N": ["embed", "run", "images", "-o", "wrong.parquet", "--shard", "2/2"],
        "words.png: it is not an image": ["evaluate", "other", "words"],
    }
    shutil.copytree(home / "own" / "class 00", home / "words" / "class 00")
    (home / "words" / "class 00" / "words.png").write_text("words")  # the last of three batches
    for message, command in cases.items():
        main, other = launch(commands, 2, *command, cwd=home)
        assert (main.wait(), other.wait()) == (1, 1)
        assert message in main.err.splitlines()[-1]
        assert main.err.count("Error: ") == 1
        assert (other.out, other.err) == ("", "")


def test_a_shard_of_several_processes(home: Path, commands: Commands) -> None:
    """Its part equals that of a single process."""
    for number, folder in ((1, "parts-1"), (2, "parts-2")):
        command = ["embed", "run", "images", "-o", "out.parquet", "--shard", "0/2", "--parts", folder]
        assert [each.wait() for each in launch(commands, number, *command, cwd=home)] == [0] * number
    one, two = (home / folder / "images.0-of-2.npy" for folder in ("parts-1", "parts-2"))
    assert one.read_bytes() == two.read_bytes()
    assert left_out_images(one) == left_out_images(two) != {}

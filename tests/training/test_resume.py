"""Runs that were killed, interrupted, damaged or out of disk space are resumed, and end with identical weights."""

from __future__ import annotations

import errno
import os
import random
import shlex
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml
from safetensors import SafetensorError
from torch import Tensor

from shortlist.errors import Interrupted, RunError
from shortlist.training import Display, RunFolder, loop, run_evaluation
from shortlist.training import resume_run as resume
from shortlist.training import train_run as train
from shortlist.training.checkpoint import TrainingState, latest_state, save_state
from shortlist.training.stopping import StopRequest
from tests.processes import Commands
from tests.training.runs import (
    FASTEST_MODEL,
    STEP_BEGINS,
    class_folders,
    config,
    interrupt_where,
    kill_where,
    records,
    same_weights,
    wait_where,
    weights,
    write_config,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the killed processes are forked")

# Everything that is random in a step, a moving average, and checkpoints at the ends of epochs: after steps 3, 6 and 9.
RANDOM = [
    "model.backbone=test_vit",
    "model.backbone_args={depth: 2, drop_path_rate: 0.2, proj_drop_rate: 0.1, attn_drop_rate: 0.1}",
    "loss.simix=true",
    "training.ema=0.7",
    "schedule.name=cosine",
    "schedule.warmup=1",
    "batch.keep_graphs=false",
]
# A checkpoint after every step.
OFTEN = [FASTEST_MODEL, "training.checkpoint_every=1", "optimizer.name=sgd", "optimizer.lr=0.1"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which commands run, with images and two recipes."""
    path = tmp_path_factory.mktemp("resume")
    images = class_folders(path / "images")
    for name, settings in (("random", RANDOM), ("often", OFTEN)):
        text = yaml.safe_dump(config(images, *settings).model_dump(mode="json"))
        (path / f"{name}.yaml").write_text(text)
    return path


@pytest.fixture(scope="module")
def whole(home: Path) -> dict[str, Path]:
    """Uninterrupted runs."""
    settings = {"random": RANDOM, "often": OFTEN}
    return {name: train(config(home / "images", *settings[name]), home / f"{name}-whole").path for name in settings}


@pytest.fixture(scope="module")
def killed(home: Path, commands: Commands) -> Path:
    """A run that was killed in its third epoch, with checkpoints of steps 3 and 6. Tests change a `copy` of it."""
    kill_where(wait_after(7), commands, home, "train", "random.yaml", "--run", "killed")
    assert checkpoints(home / "killed") == [6, 3]
    assert steps_of(home / "killed") == 7
    return home / "killed"


@pytest.fixture
def copy(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "run"))


def steps_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count('"kind": "step"') if file.exists() else 0


def checkpoints(run: Path) -> list[int]:
    return sorted((int(file.stem[5:]) for file in (run / "checkpoints").glob("step-*")), reverse=True)


def assert_same(run: Path, whole: Path) -> None:
    """Assert that weights are equal bit for bit, and that histories are equal."""
    assert same_weights(weights(run), weights(whole))
    for kind in ("step", "validation", "test"):
        assert records(run, kind) == records(whole, kind)
    assert (run / "evaluation.json").read_text() == (whole / "evaluation.json").read_text()


def wait_after(steps: int) -> str:
    """Return Python code that makes a run wait at the beginning of the step after this number of steps."""
    return wait_where(f"args[1] == {steps}", *STEP_BEGINS)


class TestKilled:
    def test_another_seed_gives_another_run(self, home: Path, whole: dict[str, Path], tmp_path: Path) -> None:
        """Negative control: the comparison can fail."""
        other = train(config(home / "images", *OFTEN, "training.seed=1"), tmp_path / "other")
        assert not same_weights(weights(other), weights(whole["often"]))
        assert records(other) != records(whole["often"])

    def test_in_the_middle_of_an_epoch(self, copy: Path, whole: dict[str, Path]) -> None:
        assert not (copy / "embedder.safetensors").exists()
        resume(copy)
        assert_same(copy, whole["random"])

    def test_before_the_first_checkpoint(self, home: Path, commands: Commands, whole: dict[str, Path]) -> None:
        run = home / "early"
        kill_where(wait_after(1), commands, home, "train", "often.yaml", "training.checkpoint_every=null", "--run", run)
        assert checkpoints(run) == []
        assert steps_of(run) == 1
        resume(run)
        assert_same(run, whole["often"])

    def test_while_a_checkpoint_is_written(self, home: Path, commands: Commands, whole: dict[str, Path]) -> None:
        """The run is killed when half of the bytes have been written."""
        run = home / "writing"
        half = """
import pathlib, time
import safetensors.torch
real = safetensors.torch.save_file
def half(tensors, path, metadata):
    real(tensors, path, metadata=metadata)
    if "00000008" in path.name:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        pathlib.Path("here").touch()
        time.sleep(1000)
safetensors.torch.save_file = half
"""
        kill_where(half, commands, home, "train", "often.yaml", "--run", run)
        assert checkpoints(run) == [7, 6]
        assert list((run / "checkpoints").glob(".step-00000008*"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resume(run)
        assert not list((run / "checkpoints").glob(".*"))  # the incomplete file is deleted
        assert_same(run, whole["often"])

    def test_during_the_test(self, home: Path, commands: Commands, whole: dict[str, Path]) -> None:
        """The test is recorded, but evaluation.json is not written yet."""
        run = home / "testing"
        waits = wait_where('args[0].name == "evaluation.json"', "shortlist.training.loop", "write_json")
        kill_where(waits, commands, home, "train", "often.yaml", "--run", run)
        assert len(records(run, "test")) == 1
        resume(run)
        assert_same(run, whole["often"])

    def test_several_times_at_random_moments(self, home: Path, commands: Commands, whole: dict[str, Path]) -> None:
        chance = random.Random(0)
        run, kills = home / "again", 0
        order = ["train", "often.yaml", "--run", run]
        for _ in range(4):
            running = commands.start(*order, cwd=home)
            running.until(lambda: (run / "config.yaml").exists())
            steps = steps_of(run) + chance.randrange(3)
            running.until(lambda steps=steps: steps_of(run) >= steps or ended(run))
            moment = time.monotonic() + 0.1 * chance.random()
            kills += running.kill(lambda moment=moment: time.monotonic() > moment or ended(run)) == -signal.SIGKILL
            if ended(run):
                break
            order = ["train", "--resume", run]
        assert kills
        resume(run)
        assert_same(run, whole["often"])

    def test_with_two_threads(self, home: Path, commands: Commands) -> None:
        settings = ("training.threads=2", "training.epochs=null", "training.steps=5")
        two = train(config(home / "images", *RANDOM, *settings), home / "two-whole")
        kill_where(wait_after(4), commands, home, "train", "random.yaml", *settings, "--run", "two")
        resume(home / "two")
        assert_same(home / "two", two.path)


def ended(run: Path) -> bool:
    return (run / "evaluation.json").exists()


class TestInterrupted:
    def test_ctrl_c_saves_a_checkpoint_and_prints_the_command_to_resume(
        self, home: Path, commands: Commands, whole: dict[str, Path]
    ) -> None:
        run = home / "a run with spaces"
        running = interrupt_where(wait_after(4), commands, home, "train", "random.yaml", "--run", run)
        assert running.wait() == 130
        (saved, *_) = checkpoints(run)
        assert saved == steps_of(run) == 5  # the step that had begun was finished
        message, _, command = running.err.partition(" Resume with: ")
        assert message == "Stopped after step 5."
        assert "Stopping after this step" in running.out
        program, *args = shlex.split(command)
        assert program == "shortlist"
        code, out, error = commands.run(*args, cwd=home)
        assert (code, error) == (0, "")
        assert "Resuming after step 5 of 9." in out
        assert_same(run, whole["random"])

    def test_ctrl_c_twice_stops_at_once(self, home: Path, commands: Commands, whole: dict[str, Path]) -> None:
        """The current step is lost."""
        run = home / "twice"
        running = commands.start("train", "often.yaml", "--run", run, cwd=home, before=wait_after(5))
        running.until((home / "here").exists)
        os.kill(running.pid, signal.SIGINT)
        running.until(lambda: "Stopping after this step" in running.out)
        assert running.kill(lambda: True, by=signal.SIGINT) == 130
        (home / "here").unlink()
        assert running.err.startswith("Aborted. Resume from the last checkpoint with: shortlist train --resume")
        assert checkpoints(run) == [5, 4]
        resume(run)
        assert_same(run, whole["often"])

    def test_signal_handlers_are_restored(self) -> None:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        with StopRequest(Display()) as stop:
            assert not stop.requested
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert before == {number: signal.getsignal(number) for number in before}

    def test_ctrl_c_before_the_first_step(self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def press(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(loop, "make_plan", press)
        with pytest.raises(KeyboardInterrupt):
            train(config(home / "images"), tmp_path / "run")
        assert not (tmp_path / "run").exists()
        monkeypatch.undo()
        monkeypatch.setattr(run_evaluation, "embed_images", press)
        with pytest.raises(Interrupted, match="Aborted"):
            train(config(home / "images", "evaluation.before=true"), tmp_path / "run")
        assert (tmp_path / "run" / "config.yaml").exists()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def flip_a_bit_of_the_facts(file: Path) -> None:
    content = file.read_bytes()
    assert content.count(b'\\"chunk_size\\": 4') == 1
    file.write_bytes(content.replace(b'\\"chunk_size\\": 4', b'\\"chunk_size\\": 5'))


class TestDamaged:
    @pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit, flip_a_bit_of_the_facts])
    def test_the_previous_checkpoint_is_used(
        self, damage: Callable[[Path], None], copy: Path, whole: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        damage(copy / "checkpoints" / "step-00000006.safetensors")
        if damage is flip_a_bit:  # one resumed run is enough
            with pytest.warns(UserWarning, match=r"step-00000006.safetensors is damaged .*; using the previous one"):
                resume(copy)
            assert_same(copy, whole["random"])
            return
        with pytest.warns(UserWarning, match=r"step-00000006.safetensors is damaged .*; using the previous one"):
            state = latest_state(copy / "checkpoints")
        assert state is not None
        assert state.step == 3

    def test_all_damaged(self, copy: Path) -> None:
        for file in (copy / "checkpoints").iterdir():
            truncate(file)
        with pytest.warns(UserWarning, match="is damaged"), pytest.raises(RunError, match="All checkpoints in"):
            resume(copy)

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("dim: 8", "dim: 9"),
            ("backbone: test_vit", "backbone: test_vit2"),
            ("layer_norm: true", "layer_norm: false"),
        ],
    )
    def test_another_architecture(self, old: str, new: str, copy: Path) -> None:
        text = (copy / "config.yaml").read_text()
        assert text.count(old) == 1
        write_config(RunFolder(copy), text.replace(old, new))
        with pytest.raises(RunError, match="checkpoint of step 6 does not fit the architecture test_vit") as error:
            resume(copy)
        assert "\n" not in str(error.value)


class TestDiskFull:
    @pytest.mark.parametrize(
        "problem",
        [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")],
    )
    def test_a_checkpoint_that_cannot_be_written(
        self, problem: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = TrainingState(1, {"a": torch.arange(5.0)}, {"best": None})
        save_state(tmp_path, first)

        def full(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
            path.write_bytes(b"half")
            raise problem

        monkeypatch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(RunError, match=r"checkpoint of step 2 .*No space left.*unchanged.*--resume"):
            save_state(tmp_path, TrainingState(2, {}, {}))
        assert [file.name for file in tmp_path.iterdir()] == ["step-00000001.safetensors"]
        state = latest_state(tmp_path)
        assert state is not None
        assert state.facts == {"best": None}
        assert torch.equal(state.tensors["a"], torch.arange(5.0))

    @pytest.mark.parametrize("what", ["checkpoint", "metrics"])
    def test_a_disk_that_fills_up(self, what: str, home: Path, commands: Commands, whole: dict[str, Path]) -> None:
        """The operating system refuses larger files from the fifth step on."""
        run = home / f"full-{what}"
        largest = 50_000 if what == "checkpoint" else 1000
        fill = f"""
import resource, signal
from shortlist.training import loop
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
real = loop.learning_rate_factor
def filling(schedule, step, *rest):
    if step == 4:
        resource.setrlimit(resource.RLIMIT_FSIZE, ({largest}, resource.RLIM_INFINITY))
    return real(schedule, step, *rest)
loop.learning_rate_factor = filling
"""
        code, _, error = commands.run("train", "often.yaml", "--run", run, cwd=home, before=fill)
        assert code == 1
        assert error.startswith("Error: The ")
        assert error.count("\n") == 1
        assert "File too large" in error
        assert "--resume" in error
        assert checkpoints(run) == [4, 3]
        assert not list((run / "checkpoints").glob(".*"))
        resume(run)
        assert_same(run, whole["often"])


class TestStates:
    def test_layouts_and_types_are_restored(self, tmp_path: Path) -> None:
        tensors = {
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "half": torch.randn(3).bfloat16(),
            "number": torch.tensor(7),
            "nothing": torch.empty(0, 3),
            "nan": torch.tensor([torch.nan, -0.0]),
        }
        tensors["shared"] = tensors["channels_last"]
        save_state(tmp_path, TrainingState(12, tensors, {"scaler": None, "best": 0.25}))
        state = latest_state(tmp_path)
        assert state is not None
        assert (state.step, state.facts) == (12, {"scaler": None, "best": 0.25})
        assert same_weights(state.tensors, {name: each.contiguous() for name, each in tensors.items()})

    def test_the_last_two_are_kept(self, tmp_path: Path) -> None:
        assert latest_state(tmp_path / "nothing yet") is None
        for step in (1, 9, 10, 100):
            save_state(tmp_path, TrainingState(step, {"step": torch.tensor(step)}, {}))
        assert sorted(file.name for file in tmp_path.iterdir()) == [
            "step-00000010.safetensors",
            "step-00000100.safetensors",
        ]
        state = latest_state(tmp_path)
        assert state is not None
        assert state.tensors["step"] == 100

    def test_names_under_a_prefix(self) -> None:
        state = TrainingState(0, {"model.a.b": torch.ones(1), "modela": torch.ones(1)}, {})
        assert list(state.with_prefix("model.")) == ["a.b"]


def test_old_checkpoints_that_could_not_be_deleted_are_deleted_later(whole: dict[str, Path], tmp_path: Path) -> None:
    """They are deleted even by a run that takes no further step, and thus saves no further checkpoint."""
    run = Path(shutil.copytree(whole["often"], tmp_path / "run"))
    (run / "evaluation.json").unlink()
    shutil.copy(run / "checkpoints" / "step-00000009.safetensors", run / "checkpoints" / "step-00000001.safetensors")
    resume(run)
    assert checkpoints(run) == [9, 8]
    assert (run / "evaluation.json").exists()


def test_a_finished_run_keeps_two_checkpoints(whole: dict[str, Path]) -> None:
    assert checkpoints(whole["often"]) == [9, 8]
    assert checkpoints(whole["random"]) == [9, 6]
    assert RunFolder.open(whole["often"]).config().training.checkpoint_every == 1

"""The command line: commands, their output, and error messages."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import filelock
import pytest
import yaml
from PIL import Image

from shortlist.cli import app, main
from shortlist.data import open_catalog
from shortlist.data.inspection import split_as_training
from shortlist.errors import RunError
from shortlist.training import RunFolder, durations
from tests.miniatures import miniature
from tests.processes import SOURCES
from tests.report.runs import change_config
from tests.training.runs import RECIPE, class_folders, write_config

Call = Callable[..., tuple[int, str, str]]
FAST = ("training.epochs=1", "data.validation=none")
TINY = RECIPE.replace("backbone: test_efficientnet", "backbone: test_vit, backbone_args: {depth: 1}")  # trains faster


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Run commands in an empty folder; each call returns the exit code, the output and the error output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() has its own
    monkeypatch.setattr(logging.getLogger("accelerate"), "level", logging.WARNING)
    monkeypatch.setattr(durations, "MEASURED_SECONDS", 0.01)
    (tmp_path / "tiny.yaml").write_text(TINY)

    def run(*args: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shortlist", *map(str, args)])
        capsys.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            with pytest.raises(SystemExit) as end:
                main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def assert_error(found: tuple[int, str, str], *messages: str) -> None:
    """The exit code is 1, and the error output is one message without a traceback, after any lines of progress."""
    code, _, err = found
    assert code == 1, err
    *before, error = err.splitlines()
    assert quiet("\n".join(before))
    assert error.startswith("Error: ")
    for each in messages:
        assert each in error


def quiet(err: str) -> bool:
    """Whether an error output has only lines about the start and the end of tasks."""
    return all(re.search(r': (started|done.*)$|^{"progress": ', line) for line in err.splitlines())


class TestHelp:
    @pytest.mark.parametrize(
        ("command", "word"),
        [
            ([], "train"),
            (["train"], "--resume"),
            (["evaluate"], "IMAGES"),
            (["demo"], "glyphs"),
            (["data"], "check"),
            (["data", "show"], "--root"),
            (["data", "check"], "duplicates"),
            (["data", "list"], "--json"),
            (["data", "about"], "download"),
        ],
    )
    @pytest.mark.parametrize("option", ["--help", "-h"])
    def test_every_command_has_help(self, command: list[str], word: str, option: str, call: Call) -> None:
        code, out, err = call(*command, option)
        assert (code, err) == (0, "")
        assert word in out

    def test_commands_are_listed_in_the_order_of_use(self, call: Call) -> None:
        lines = call("--help")[1].partition("Commands")[2].splitlines()
        commands = [line.split()[1] for line in lines if re.match(r"│ \w", line)]
        first = ["demo", "plan", "train", "evaluate", "report", "compare", "embed", "index", "search", "serve"]
        assert commands == [*first, "export", "data", "recipes", "gallery", "sweep", "ablate"]

    def test_version(self, call: Call) -> None:
        assert call("--version") == (0, f"shortlist {metadata.version('shortlist')}\n", "")

    def test_a_command_that_does_not_exist(self, call: Call) -> None:
        code, _, err = call("trian")
        assert code == 2
        assert "train" in err
        assert "Traceback" not in err

    def test_python_m_shortlist(self, tmp_path: Path) -> None:
        (tmp_path / "tiny.yaml").write_text(TINY)
        done = subprocess.run(
            [sys.executable, "-m", "shortlist", "train", "tiny.yaml", "optimizer.lrr=1"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
            check=False,
        )
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr == (
            "Error: tiny.yaml is not a valid configuration:\n  optimizer.lrr: unknown key; did you mean 'lr'?\n"
        )


class TestTrain:
    def test_a_path_with_spaces_and_umlauts(self, call: Call, tmp_path: Path) -> None:
        class_folders(tmp_path / "Bücher & Käse")
        settings = ("data.source=Bücher & Käse", "--run", "erster Lauf ß", *FAST)
        code, out, err = call("train", "tiny.yaml", *settings, "--json")
        assert (code, err) == (0, "")
        messages = [json.loads(line) for line in out.splitlines()]  # a program can read all of it
        assert messages[-1]["run"] == "erster Lauf ß"
        assert any(message.get("evaluation") == "test" for message in messages)
        assert (tmp_path / "erster Lauf ß" / "evaluation.json").is_file()
        code, out, _ = call("train", "--resume", "erster Lauf ß")
        assert code == 0
        assert "already finished" in out

    def test_runs_are_named_after_the_recipe(self, call: Call, folders: Path, tmp_path: Path) -> None:
        for name in ("tiny", "tiny-2"):
            code, out, _ = call("train", "tiny.yaml", f"data.source={folders / 'images'}", *FAST)
            assert code == 0
            assert re.search(r"(?m)^epoch 1: loss ", out)
            assert (tmp_path / "runs" / name / "evaluation.json").is_file()

    def test_dry_run(self, call: Call, folders: Path, tmp_path: Path) -> None:
        code, out, err = call(
            "train", "tiny.yaml", f"data.source={folders / 'images'}", "optimizer.lr=1e-5", "--dry-run"
        )
        assert (code, quiet(err)) == (0, True)
        printed = yaml.safe_load(out)
        assert printed["config"]["optimizer"]["lr"] == 1e-5
        plan = printed["plan"]
        assert plan["data"]["train"] == "18 images of 3 classes"
        assert plan["data"]["validation"] == "18 images of 3 classes"
        assert plan["data"]["test"] == "36 images of 6 classes"
        assert plan["batches"].startswith("3 batches per epoch, each of 2 classes x 3 images")
        assert plan["classes left out"] == []
        assert plan["steps"] == 9
        assert "until the end" in plan["time"]
        assert re.search(r"\n  estimated time: 'about .*: 9 steps about .*, evaluations about .*'\n\Z", out)
        assert plan["parameters"]["all"] == sum(plan["parameters"][part] for part in ("backbone", "pooling", "head"))
        assert set(plan["memory"]) >= {"pixels of a batch", "activations of a chunk of 4", "peak"}
        assert sorted(file.name for file in tmp_path.iterdir()) == ["tiny.yaml"]  # nothing was begun

    def test_plan(self, call: Call, folders: Path, tmp_path: Path) -> None:
        source = f"data.source={folders / 'images'}"
        code, out, _ = call("plan", "tiny.yaml", source, "--devices", "2", "--device-memory", "24GB")
        plan = yaml.safe_load(out)
        assert (code, plan["processes"]) == (0, 2)
        assert "time" not in plan  # nothing is known of that GPU
        code, out, _ = call("plan", "tiny.yaml", source, "--no-measure", "--json")
        assert (code, json.loads(out)["steps"]) == (0, 9)
        assert_error(call("plan", "tiny.yaml", source, "--devices", "2"), "--devices needs --device-memory")
        assert sorted(file.name for file in tmp_path.iterdir()) == ["tiny.yaml"]  # nothing was begun

    def test_dry_run_checks_the_weights(self, call: Call, folders: Path) -> None:
        arguments = ("tiny.yaml", f"data.source={folders / 'images'}", "model.weights=nothing.pth")
        assert_error(call("train", *arguments, "--dry-run"), "The weights file nothing.pth does not exist")

    def test_dry_run_lists_images_and_classes_that_are_left_out(self, call: Call, tmp_path: Path) -> None:
        images = class_folders(tmp_path / "images")
        for number in range(4):
            (images / "class 01" / f"{number}.png").unlink()
        (images / "class 00" / "0.png").write_text("broken")
        code, out, _ = call("train", "tiny.yaml", *FAST, "data.on_missing=skip", "--dry-run")
        assert code == 0
        plan = yaml.safe_load(out)["plan"]
        assert plan["classes left out"] == ["class 01"]
        assert (plan["data"]["missing"], plan["data"]["unreadable"]) == (0, 1)


class TestEvaluate:
    def test_json(self, call: Call, folders: Path) -> None:
        code, out, _ = call("evaluate", folders / "run", "--json")
        assert code == 0
        assert json.loads(out) == json.loads((folders / "run" / "evaluation.json").read_text())

    def test_table(self, call: Call, folders: Path) -> None:
        code, out, _ = call("evaluate", folders / "run", folders / "images")
        assert code == 0
        (measured,) = json.loads(call("evaluate", folders / "run", folders / "images", "--json")[1])
        rows = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
        for name, estimate in measured["metrics"].items():
            assert f"{100 * estimate['value']:.1f}" in rows[name]
            assert f"[{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]" in rows[name]
        assert "36 queries, each against 35 images" in out  # of its own images, only the test classes
        assert "paper" not in out

    def test_differences_to_the_paper(self, call: Call, folders: Path, tmp_path: Path) -> None:
        run = Path(shutil.copytree(folders / "run", tmp_path / "run"))
        text = (run / "config.yaml").read_text()
        write_config(RunFolder(run), text.replace("paper: {}", "paper: {images: {r@1: 12.3}, elsewhere: {r@1: 1}}"))
        (measured,) = json.loads(call("evaluate", "run", "--json")[1])
        assert measured["paper"] == {"r@1": 12.3}
        difference = 100 * measured["metrics"]["r@1"]["value"] - 12.3
        assert measured["difference"] == {"r@1": pytest.approx(difference)}
        out = call("evaluate", "run")[1]
        (row,) = [line for line in out.splitlines() if line.startswith("│ r@1 ")]
        assert row.split("│")[-3:-1] == [f"{'12.3':>6} ", f"{f'{difference:+.1f}':>11} "]
        assert "The paper also reports results on elsewhere" in out

    def test_shards(self, call: Call, folders: Path, tmp_path: Path) -> None:
        """Evaluating merged shards gives the result of one process, from their vectors."""
        shutil.copytree(folders / "run", tmp_path / "run")
        want = call("evaluate", "run", "--json")[1]
        vectors = (tmp_path / "run" / "vectors" / "images.npy").read_bytes()
        shutil.rmtree(tmp_path / "run" / "vectors")
        for shard in ("0/2", "1/2"):
            assert_error(call("evaluate", "run", "--merge"), "run/vectors/parts ", "shard")
            code, out, _ = call("evaluate", "run", "--shard", shard)
            assert (code, out) == (0, "")
        parts = sorted((tmp_path / "run" / "vectors" / "parts").glob("*.npy"))
        assert [each.name for each in parts] == ["images.0-of-2.npy", "images.1-of-2.npy"]
        code, out, _ = call("evaluate", "run", "--merge", "--json")
        assert (code, out) == (0, want)
        assert (tmp_path / "run" / "vectors" / "images.npy").read_bytes() == vectors
        assert not parts[0].parent.exists()

    def test_errors(self, call: Call, folders: Path, tmp_path: Path) -> None:
        assert_error(call("evaluate", tmp_path), "No run found in")
        assert_error(call("evaluate", folders / "run", "glyps"), "did you mean 'glyphs'")
        assert_error(call("evaluate", folders / "run", "--root", "x"), "--root", "IMAGES")
        assert_error(call("evaluate", folders / "run", "--distractors", "x"), "--distractors", "IMAGES")
        shutil.copytree(folders / "run", tmp_path / "run")
        for name in ("embedder.json", "evaluation.json"):
            (tmp_path / "run" / name).unlink()
        assert_error(call("evaluate", "run"), "is not finished", "shortlist train --resume run")


class TestData:
    def test_show(self, call: Call, folders: Path) -> None:
        code, out, err = call("data", "show", folders / "images")
        assert (code, err) == (0, "")
        rows = {line.split()[1]: line.split() for line in out.splitlines() if line.startswith("│")}
        assert rows["train"][3:6:2] == rows["validation"][3:6:2] == ["18", "3"]
        assert rows["test"][3:6:2] == ["36", "6"]
        assert rows["all"][3:6:2] == ["72", "12"]
        assert "width: 36, 36, 36; height: 36, 36, 36" in out
        facts = json.loads(call("data", "show", folders / "images", "--json")[1])
        assert (facts["images"], facts["classes"]) == (72, 12)

    def test_show_counts_queries_and_gallery(self, call: Call, tmp_path: Path) -> None:
        root = miniature("vehicleid-small-reid", tmp_path / "cars", classes=3, images=4)
        code, out, _ = call("data", "show", "vehicleid-small-reid", "--root", root)
        assert code == 0
        assert "query: 9 images; gallery: 3 images" in out
        facts = json.loads(call("data", "show", "vehicleid-small-reid", "--root", root, "--json")[1])
        assert facts["roles"] == {"query": 9, "gallery": 3}

    def test_list(self, call: Call) -> None:
        code, out, err = call("data", "list")
        assert (code, err) == (0, "")
        rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
        facts = json.loads(call("data", "list", "--json")[1])
        assert len(facts) == 19
        for each in facts:
            assert each["protocol"].partition(":")[0].split()[0] in rows[each["name"]]

    def test_about(self, call: Call) -> None:
        code, out, err = call("data", "about", "sop")
        assert (code, err) == (0, "")
        for text in ("59,551 images of 11,318 classes", "r@1000", "https://", "    Ebay_train.txt\n", "leave-one-out"):
            assert text in out
        facts = json.loads(call("data", "about", "sop", "--json")[1])
        assert facts["counts"]["test"] == {"images": 60502, "classes": 11316}
        assert_error(call("data", "about", "spo"), "Unknown benchmark 'spo'; did you mean 'sop'?")

    def test_show_reports_unexpected_counts(self, call: Call, tmp_path: Path) -> None:
        root = miniature("vehicleid-small", tmp_path / "vehicles", 2, 2)
        code, out, err = call("data", "show", "vehicleid-small-reid", "--root", root)
        assert (code, err) == (0, "")
        assert "note: train: the lists have 4 images of 2 classes, but vehicleid-small-reid has 113,346 images" in out
        facts = json.loads(call("data", "show", "vehicleid-small", "--root", root, "--json")[1])
        assert len(facts["remarks"]) == 2
        assert_error(call("data", "show", "vehicleid-small", "--root", tmp_path), f"{root} looks like the right folder")

    def test_check(self, call: Call, folders: Path, tmp_path: Path) -> None:
        code, out, err = call("data", "check", folders / "images")
        assert (code, quiet(err)) == (0, True)
        assert out.startswith("72 images checked: 0 missing, 0 unreadable, 0 duplicates across classes")
        images = Path(shutil.copytree(folders / "images", tmp_path / "images"))
        (images / "class 00" / "0.png").write_text("text")
        shutil.copy(images / "class 01" / "1.png", images / "class 02" / "copy.png")
        code, out, _ = call("data", "check", "images")
        assert code == 1
        assert "unreadable: class 00/0.png: it is not an image" in out
        assert "the same image in two classes: class 01/1.png and class 02/copy.png" in out
        assert "1 unreadable, 1 duplicate across classes, 0 duplicates within a class, 0 pairs of images" in out
        code, out, _ = call("data", "check", "images", "--json")
        assert code == 1
        report = json.loads(out)
        assert report["ok"] is False
        assert report["unreadable"][0][0] == "class 00/0.png"
        assert (
            "unreadable: 1 of these images; shortlist data check gives the reasons" in call("data", "show", "images")[1]
        )

    def test_check_lists_copies_within_a_class(
        self, call: Call, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images = tmp_path / "images" / "class 00"
        for name in ("class 00", "class 01"):
            shutil.copytree(folders / "images" / name, tmp_path / "images" / name)
        for number in range(2):
            shutil.copy(images / "0.png", images / f"copy {number}.png")
        copies = [["class 00/0.png", f"class 00/copy {number}.png"] for number in range(2)]
        code, out, _ = call("data", "check", "images", "--json")
        assert (code, json.loads(out)["copies"]) == (0, copies)
        monkeypatch.setattr("shortlist.cli.data.SHOWN_PAIRS", 1)
        _, out, _ = call("data", "check", "images")
        first, rest, last = out.splitlines()
        assert first == "the same image twice in a class: class 00/0.png and class 00/copy 0.png"
        assert rest == "1 more pair (the same image twice in a class): --json lists all"
        assert "0 duplicates across classes, 2 duplicates within a class" in last

    def test_check_with_the_split_of_the_training(self, call: Call, folders: Path, tmp_path: Path) -> None:
        images = Path(shutil.copytree(folders / "images", tmp_path / "images"))
        with Image.open(images / "class 01" / "1.png") as image:
            image.save(images / "class 02" / "copy.bmp")
        for seed in range(4):
            catalog = split_as_training(open_catalog(images, split_seed=seed))
            split_of = dict(zip(catalog.paths.tolist(), (catalog.splits == "train").tolist(), strict=True))
            leak = split_of["class 01/1.png"] != split_of["class 02/copy.bmp"]
            message = "one is a training image, the other is not" if leak else "they are in two classes"
            _, out, _ = call("data", "check", "images", "--split-seed", seed)
            assert f"looks the same; {message}: class 01/1.png and class 02/copy.bmp" in out
            assert out.endswith("1 pair of images that look the same\n")


class TestNames:
    """Error messages name options of the command, or keys of the configuration."""

    def test_options(self, call: Call, folders: Path, tmp_path: Path) -> None:
        run, images = folders / "run", folders / "images"
        assert_error(call("data", "show", "sop"), "sop needs its folder: set --root to the folder that contains")
        assert_error(call("data", "check", "sop", "--root", tmp_path), f"sop: {tmp_path} does not contain")
        assert_error(call("embed", run, images, "-o", "x.parquet", "--root", images), "--root has no effect for")
        assert_error(call("index", run, images, "-o", "milvus:x.db", "--kind", "ivfpq"), "set --kind to flat or hnsw")
        assert_error(call("export", run), "give a path for --onnx, --torchscript, --torch-export or --package.")
        assert_error(
            call("export", run, "--onnx", "x", "--license", "y"), "--license is written to", "use it with --package."
        )
        assert_error(call("evaluate", run, "--root", "x"), "--root requires IMAGES: it applies to images other than")
        assert_error(call("evaluate", run, "sop"), "sop needs its folder: set --root to the folder")
        assert_error(call("evaluate", run, "--on-missing", "skp"), "--on-missing skp: did you mean 'skip'?")
        gone = ("evaluate", run, images, "--distractors", "gone")
        assert_error(call(*gone), "does not exist", "; --distractors must contain")

    def test_keys(self, call: Call, tmp_path: Path) -> None:
        (class_folders(tmp_path / "images") / "empty").mkdir()
        train = ("train", "tiny.yaml", *FAST)
        assert_error(call(*train, "data.source=sop"), "sop needs its folder: set data.root to the folder that contains")
        assert_error(call(*train), "leave them out with data.on_missing=skip")
        skip = "data.on_missing=skip"
        assert_error(call(*train, skip, "batch.size=600"), "A batch of batch.size=600 images cannot be filled.")
        assert_error(call(*train, skip, "model.weights=x.pth"), "file x.pth does not exist; model.weights can be")
        assert_error(call(*train, skip, "--dry-run", "data.source=sop"), "set data.root to the folder that contains")


class TestMilvus:
    def test_its_client_logs_no_tracebacks(self, call: Call) -> None:
        pytest.importorskip("pymilvus")
        logger = logging.getLogger("pymilvus")
        before = logger.level
        try:
            assert_error(call("search", "milvus:nothing.db", "x.png"), "nothing.db does not exist. Create a gallery")
            assert logger.level == logging.CRITICAL
        finally:
            logger.setLevel(before)


class TestAllocator:
    """Only the command line sets the allocator of glibc; see also tests/test_process_state.py."""

    def test_a_training_keeps_freed_memory(self, call: Call, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        monkeypatch.setattr("shortlist.batches.memory.reuse_freed_memory", lambda: calls.append("kept"))
        monkeypatch.setattr(
            "shortlist.training.resume_run", lambda path, *_, **__: calls.append("trained") or RunFolder(path)
        )
        shutil.copytree(folders / "run", "run")
        call("train", "--resume", "run")
        assert calls[:2] == ["kept", "trained"]

    @pytest.mark.parametrize(
        "command",
        [
            "embed run images -o vectors.parquet",
            "index run images -o gallery",
            "evaluate run",
            "report run",
            "compare run run",
        ],
    )
    def test_commands_that_embed_keep_it(
        self, command: str, call: Call, folders: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def keep() -> None:
            raise RunError("kept")

        monkeypatch.setattr("shortlist.batches.memory.reuse_freed_memory", keep)
        monkeypatch.chdir(folders)
        assert call(*command.split()) == (1, "", "Error: kept\n")

    @pytest.mark.parametrize(("gpu", "expected"), [(False, ["kept"]), (True, [])])
    def test_only_on_a_cpu(self, monkeypatch: pytest.MonkeyPatch, gpu: bool, expected: list[str]) -> None:
        calls: list[str] = []
        monkeypatch.setattr("shortlist.batches.memory.reuse_freed_memory", lambda: calls.append("kept"))
        monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
        app.keep_freed_memory()
        assert calls == expected


class TestErrors:
    """Frequent mistakes."""

    def train(self, call: Call, *args: str | Path) -> tuple[int, str, str]:
        return call("train", "tiny.yaml", *FAST, *args)

    def test_an_empty_folder(self, call: Call, tmp_path: Path) -> None:
        (tmp_path / "images").mkdir()
        assert_error(self.train(call), "No class folders in", "it is empty", "one sub-folder per class")
        assert_error(call("data", "show", "images"), "it is empty")
        assert_error(call("data", "check", "images"), "it is empty")
        assert not (tmp_path / "runs" / "tiny").exists()

    def test_one_class(self, call: Call, tmp_path: Path) -> None:
        class_folders(tmp_path / "images", classes=1)
        assert_error(self.train(call), "images has 1 class", "at least two")

    def test_classes_of_one_image(self, call: Call, tmp_path: Path) -> None:
        class_folders(tmp_path / "images", images=1)
        assert_error(self.train(call), "No class has 3 images")

    def test_a_text_file_named_jpg(self, call: Call, tmp_path: Path) -> None:
        images = class_folders(tmp_path / "images")
        for number in range(6):
            (images / "class 00" / f"{number}.png").rename(images / "class 00" / f"{number}.jpg")
            (images / "class 00" / f"{number}.jpg").write_text("text")
        assert_error(self.train(call), "Cannot read the image", "images/class 00/", "it is not an image")

    def test_a_truncated_jpeg(self, call: Call, tmp_path: Path) -> None:
        images = class_folders(tmp_path / "images")
        file = images / "class 11" / "0.jpg"  # of a test class
        Image.effect_noise((200, 200), 99).save(file)
        file.write_bytes(file.read_bytes()[:2000])
        remedy = ("evaluate", "runs/tiny", "--on-missing", "skip")  # it is trained, and need not be trained again
        found = self.train(call)
        assert_error(
            found, "Cannot read the image", "images/class 11/0.jpg", "truncated", f"shortlist {' '.join(remedy)}"
        )
        assert call(*remedy)[0] == 0

    def test_a_run_folder_that_cannot_be_written_to(self, call: Call, folders: Path) -> None:
        found = self.train(call, f"data.source={folders / 'images'}", "--run", "/dev/null/run")
        assert_error(found, "The folder /dev/null/run cannot be written to")

    def test_a_misspelt_setting(self, call: Call) -> None:
        code, _, err = self.train(call, "optimiser.lr=1")
        assert code == 1
        assert (
            err
            == "Error: tiny.yaml is not a valid configuration:\n  optimiser: unknown key; did you mean 'optimizer'?\n"
        )

    def test_a_recipe_that_does_not_exist(self, call: Call) -> None:
        assert_error(call("train", "cars196-lite"), "did you mean 'cars196-lite0-cpu'")
        assert_error(call("train"), "No recipe was given")

    def test_a_checkpoint_from_another_architecture(self, call: Call, folders: Path, tmp_path: Path) -> None:
        run = Path(shutil.copytree(folders / "run", tmp_path / "run"))
        (run / "evaluation.json").unlink()
        change_config(RunFolder(run), "model.backbone", "test_resnet")
        change_config(RunFolder(run), "model.backbone_args", {})
        assert_error(call("train", "--resume", "run"), "does not fit the architecture test_resnet")

    def test_two_trainings_in_one_folder(self, call: Call, folders: Path, tmp_path: Path) -> None:
        run = Path(shutil.copytree(folders / "run", tmp_path / "run"))
        with filelock.FileLock(run / ".lock"):
            assert_error(call("train", "--resume", "run"), "Another process is training in run")
            assert_error(self.train(call, "--run", "run"), "Another process is training in run")
        assert_error(self.train(call, "--run", "run"), "run already contains a run", "shortlist train --resume run")

    def test_resuming_a_folder_without_a_run(self, call: Call, folders: Path, tmp_path: Path) -> None:
        assert_error(call("train", "--resume", tmp_path), "No run found in", "config.yaml")
        assert_error(call("train", "--resume", folders / "run", "--run", "x"), "--resume takes only the folder")
        assert_error(call("train", "optimizer.lr=1", "--resume", folders / "run"), "--resume takes only the folder")

    def test_a_damaged_checkpoint_is_a_warning(self, call: Call, folders: Path, tmp_path: Path) -> None:
        run = Path(shutil.copytree(folders / "run", tmp_path / "run"))
        (run / "evaluation.json").unlink()
        (last,) = (run / "checkpoints").iterdir()
        shutil.copy(last, last.with_name("step-00000099.safetensors"))
        last.with_name("step-00000099.safetensors").write_bytes(b"short")
        code, _, err = call("train", "--resume", "run")
        assert code == 0
        assert err.startswith("Warning: The checkpoint run/checkpoints/step-00000099.safetensors is damaged")
        assert err.count("\n") == 1


class TestRecipes:
    def test_the_list(self, call: Call) -> None:
        code, out, _ = call("recipes", "list", "--json")
        listed = {each["name"]: each for each in json.loads(out)}
        assert code == 0
        assert listed["sop-resnet50-rsk"]["paper"]["sop"]["r@1"] == 82.8
        assert not listed["sop-resnet50-rsk"]["measured"]
        code, out, _ = call("recipes", "list")
        assert code == 0
        assert "not yet" in out
        assert all(name in out for name in ("gldv1-resnet101-ap", "cars196-vit-b16-rsk"))

    def test_a_recipe_in_full(self, call: Call) -> None:
        code, out, _ = call("recipes", "show", "cars196-resnet50-rsk-simix", "optimizer.lr=0.5")
        shown = yaml.safe_load(out)
        assert code == 0
        assert (shown["loss"]["simix"], shown["batch"]["size"], shown["optimizer"]["lr"]) == (True, 392, 0.5)
        Path("whole.yaml").write_text(out)
        assert call("recipes", "show", "whole.yaml")[1] == out

    def test_a_recipe_that_does_not_exist(self, call: Call) -> None:
        code, _, err = call("recipes", "show", "cars196-resnet50-rks")
        assert code == 1
        assert "did you mean 'cars196-resnet50-rsk'?" in err


class TestSweep:
    def test_a_sweep_its_report_and_the_best_recipe(self, call: Call, folders: Path) -> None:
        Path("space.yaml").write_text("optimizer.lr: [1e-3, 1e-2]\nmodel.pooling: [gem]\n")
        command = ("sweep", "tiny.yaml", f"data.source={json.dumps(str(folders / 'images'))}", *FAST)
        code, out, err = call(*command, "--space", "space.yaml")
        assert (code, err) == (0, "")
        assert "validation r@1, %" in out
        assert re.search(r"(?m)^1 of 2 trials; best r@1 [\d.]+ % in trial 0; .+ left$", out)
        study = Path("sweeps") / "tiny"
        assert out.splitlines()[-1] == f"The report is {study / 'report.html'}."
        best = json.loads((study / "results.json").read_text())["best"]
        assert f"Trial {best} is the best" in (study / "report.html").read_text()
        code, out, _ = call("sweep", "best", study)
        assert code == 0
        assert out.startswith("The best of 2 trials of a sweep over optimizer.lr, model.pooling: validation r@1 ")
        advice = f"The recipe is {study / 'best.yaml'}. Train and test it with: shortlist train {study / 'best.yaml'}\n"
        assert out.endswith(f" % in trial {best}. {advice}")
        code, out, _ = call("train", study / "best.yaml", "--run", "final")
        assert code == 0
        assert "test, images: r@1" in out

    def test_help(self, call: Call) -> None:
        for command in (["sweep", "-h"], ["sweep", "--help"]):
            assert "sweep RECIPE --space SPACE.yaml" in " ".join(call(*command)[1].replace("│", "").split())
        assert "--take-over" in call("sweep", "tiny.yaml", "--help")[1]

    def test_mistakes(self, call: Call, folders: Path) -> None:
        images = f"data.source={json.dumps(str(folders / 'images'))}"
        Path("space.yaml").write_text("optimizer.lr: [1e-3, oops]\n")
        assert_error(call("sweep", "tiny.yaml", images, "--space", "nothing.yaml"), "File not found: nothing.yaml")
        assert_error(call("sweep", "tiny.yaml", images, "--space", "space.yaml"), 'optimizer.lr="oops"')
        assert_error(call("sweep", "nothing", "--space", "space.yaml"), "No recipe")
        assert_error(call("sweep", "best", "nothing"), "No sweep found in nothing")
        Path("space.yaml").write_text("optimizer.lr: [1e-3]\n")
        command = ("sweep", "tiny.yaml", images, "--space", "space.yaml")
        assert_error(call(*command, "--storage", "somewhere"), "--storage is not the URL of a database")
        assert_error(call(*command, "--pruner", "mean"), "Unknown pruner 'mean'; did you mean 'median'?")
        assert call("sweep", "tiny.yaml")[0] == 2
        assert call(*command, "--trials", "0")[0] == 2
        assert not Path("sweeps").exists()


class TestAblate:
    SMALL = ("data.validation=none", "training.epochs=1", "evaluation.bootstrap=0", "batch.per_class=2", "batch.size=4")

    def test_a_study_its_table_and_its_plot(self, call: Call, folders: Path) -> None:
        images = f"data.source={json.dumps(str(folders / 'images'))}"
        cases = ("--values", "[1] [1, 2]", "--methods", "RS@k", "--seeds", "1")
        command = ("ablate", "k", "tiny.yaml", images, *self.SMALL, *cases)
        code, out, err = call(*command)
        assert (code, err) == (0, "")
        assert "values of k in the loss" in out
        assert (Path("ablations") / "k-tiny" / "plot.png").is_file()
        results = json.loads((Path("ablations") / "k-tiny" / "results.json").read_text())
        assert len(results["cases"]) == 2
        assert call(*command)[0] == 0  # done already

    def test_mistakes(self, call: Call) -> None:
        assert "did you mean 'batch-size'" in call("ablate", "batchsize", "tiny.yaml", *self.SMALL)[2]
        assert "No recipe" in call("ablate", "k", "nothing")[2]
        assert call("ablate", "k", "tiny.yaml", "--seeds", "0")[0] == 2

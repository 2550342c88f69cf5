"""Error messages name what the user gave: a Python argument, an option or a configuration key."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shortlist.config import CONFIG_KEYS, RunConfig
from shortlist.config.reading import _dotted_keys
from shortlist.data import open_catalog, open_collection
from shortlist.data.images import ImageError
from shortlist.errors import ConfigError, DataError, RunError, rename_arguments, translate_arguments
from shortlist.export import export
from shortlist.progress import Display
from shortlist.search import nearest
from shortlist.training import EvalImages, evaluate_run, make_plan
from shortlist.training import train_run as train
from tests.processes import SOURCES
from tests.training.runs import class_folders, config

CONFIGURED = ("cli", "config", "recipes", "training", "report")  # packages that take whole configurations or options
KEYS = "data|images|model|loss|batch|optimizer|schedule|training|evaluation"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Set `root`.", "Set data.root."),
        ('Use `on_missing="skip"`, or `workers=0`.', "Use data.on_missing=skip, or data.workers=0."),
        ("Use `keep_graphs=True`.", "Use batch.keep_graphs=true."),
        ("Use `other=True` or `other`.", "Use `other=True` or `other`."),
        ("root and `if __name__ == '__main__':` are no arguments", None),
    ],
)
def test_arguments_get_the_names_of_keys(message: str, expected: str | None) -> None:
    assert rename_arguments(message, CONFIG_KEYS) == (expected or message)


def test_the_innermost_translation_applies() -> None:
    outer, inner = translate_arguments({"root": "c", "other": "d"}), translate_arguments({"root": "b"})
    with pytest.raises(DataError, match=r"^Set b, or d\.$"), outer, inner:
        raise DataError("Set `root`, or `other`.")


def test_the_error_itself_is_raised_again() -> None:
    error = ImageError("a `root`.png", "it is damaged")
    with pytest.raises(ImageError) as caught, translate_arguments({"root": "data.root"}):
        raise error
    assert caught.value is error
    assert str(error) == str(ImageError("a `root`.png", "it is damaged"))
    with pytest.raises(KeyError, match="`root`"), translate_arguments({"root": "data.root"}):
        raise KeyError("`root`")


def test_every_argument_that_a_configuration_sets_has_a_key() -> None:
    assert set(CONFIG_KEYS.values()) <= set(_dotted_keys(RunConfig))


def messages(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield every literal text of an error in the sources, with its location."""
    for file in sorted(folder.rglob("*.py")):
        where = file.relative_to(folder)
        if where.parts[0] in CONFIGURED:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            called = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if called.endswith("Error"):
                for text in ast.walk(node):
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        yield f"{where}:{text.lineno}", text.value


def test_no_message_of_the_library_names_an_option_or_a_key() -> None:
    found = list(messages(SOURCES / "shortlist"))
    assert len(found) > 300
    foreign = re.compile(rf"(?<![\w-])--[a-z]|\b({KEYS})\.[a-z]")
    assert [each for each in found if foreign.search(each[1])] == []
    assert foreign.search("set data.root to that")  # negative control
    assert foreign.search("leave --kind out")


class TestInPython:
    """Invalid arguments raise a ValueError that names the argument."""

    def test_images(self, tmp_path: Path) -> None:
        folder = class_folders(tmp_path / "images", classes=2, images=1)
        with pytest.raises(ValueError, match=r"^`root` has no effect for"):
            open_catalog(folder, root=tmp_path)
        with pytest.raises(ValueError, match=r"^`root` has no effect for"):
            open_collection(folder, root=tmp_path)
        with pytest.raises(ValueError, match=r"^sop needs its folder: set `root` to"):
            open_catalog("sop")
        with pytest.raises(ValueError, match=r"^`on_missing=\"ignore\"`: known: error, skip"):
            open_catalog(folder, on_missing="ignore")
        with pytest.raises(ValueError, match=r"^`train_share` is the share"):
            open_catalog(folder, train_share=1.5)

    def test_stages(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"^Nothing to write: give a path for `onnx`, `torchscript`"):
            export(tmp_path)
        with pytest.raises(ValueError, match=r"^`license` is written to the model card: use it with `package`"):
            export(tmp_path, onnx=tmp_path / "x.onnx", license="MIT")
        for argument in ("root", "distractors", "label_separator"):
            with pytest.raises(ValueError, match=f"^`{argument}` requires `data`"):
                evaluate_run(tmp_path, EvalImages(**{argument: tmp_path}))
        with pytest.raises(ValueError, match=r"^`k`, the number of results, must be an integer of at least 1, not 0"):
            nearest(torch.ones(1, 2), torch.ones(3, 2), 0)
        with pytest.raises(RuntimeError, match="No run found in"):
            evaluate_run(tmp_path)


class TestOfAConfiguration:
    """Messages about a configuration name its keys."""

    def refused(self, source: Path | str, message: str, *overrides: str, kind: type[Exception] = ValueError) -> None:
        for use in (lambda each: make_plan(each, Display()), lambda each: train(each, Path("nowhere"))):
            with pytest.raises(kind, match=message):
                use(config(Path(source), *overrides))

    def test_images(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        self.refused("sop", "^sop needs its folder: set data.root to the folder that contains")
        self.refused(
            "sop",
            f"sop: the folder {tmp_path / 'x'} does not exist; data.root must contain",
            f"data.root={tmp_path / 'x'}",
        )
        one = class_folders(tmp_path / "one", classes=1)
        self.refused(one, "train on all of them with data.train_share=1")
        (class_folders(tmp_path / "images") / "empty").mkdir()
        self.refused(tmp_path / "images", "leave them out with data.on_missing=skip")
        assert not (tmp_path / "nowhere").exists()

    def test_batches(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        images = class_folders(tmp_path / "images")
        self.refused(images, "^A batch of batch.size=600 images cannot be filled", "batch.size=600", kind=ConfigError)
        self.refused(images, "Set a smaller batch.per_class", "batch.per_class=100", "batch.size=200", kind=ConfigError)

    def test_tests(self, tmp_path: Path) -> None:
        images = class_folders(tmp_path / "images")
        for test, message in (
            ("{source: roxford5k}", "roxford5k needs its folder: set the root in evaluation.tests to the folder"),
            (
                f"{{source: {images}, distractors: nowhere}}",
                "the folder .* does not exist; the distractors in evaluation.tests",
            ),
        ):
            with pytest.raises(DataError, match=message):
                make_plan(config(images, f"evaluation.tests=[{test}]"), Display())
        with pytest.raises(DataError, match=r"set data.validation_source.root to"):
            make_plan(config(images, "data.validation=none", "data.validation_source={source: roxford5k}"), Display())

    def test_weights(self, tmp_path: Path) -> None:
        images = class_folders(tmp_path / "images")
        with pytest.raises(ValueError, match=r"The weights file .* does not exist; model.weights can be a file"):
            train(config(images, "model.weights=no/such.pth"), tmp_path / "run")

    def test_the_first_run_error_is_a_runtime_error(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.yaml").write_text("{}")
        with pytest.raises(RunError, match="already contains a run"):
            train(config(class_folders(tmp_path / "images")), tmp_path / "run")

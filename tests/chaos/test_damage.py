"""Damage to every file of a run, a gallery, a package or a cache.

A command that reads the file fails with one error message that names the file or its folder, warns about the file, or
gives the same result as before. It never ends with a traceback, and never silently gives another result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from shortlist import Encoder
from shortlist.bfloat16 import _read_result, _write_result
from shortlist.encoding.feature_cache import FeatureCache, Views
from shortlist.errors import ShortlistError
from shortlist.export.exporter import export
from shortlist.gallery import Gallery
from shortlist.model import serialization
from shortlist.progress import Display
from shortlist.report.plots import training_curves
from shortlist.training import RunFolder, open_encoder, train_run
from shortlist.training.checkpoint import latest_state
from shortlist.training.datasets import open_run_images
from shortlist.training.run_evaluation import embed_test
from tests.training.runs import class_folders, fast_config, same_weights

Answer = Callable[[], object]
TEXT = (".json", ".jsonl", ".yaml")
UNREADABLE = Path("/proc/self/mem")  # on Linux, a regular file that can be opened, and fails with EIO when it is read
WITHOUT_DIGEST = {"config.yaml", "facts.json"}  # whether another valid number is right is not known


def damages(file: Path) -> Iterator[tuple[str, bytes | Path | None]]:
    """Yield the name and the result of every kind of damage; None: the file is missing; a path: a link to it."""
    content = file.read_bytes()
    yield "missing", None
    yield "empty", b""
    if UNREADABLE.exists():
        yield "an I/O error", UNREADABLE
    yield "truncated", content[: len(content) * 2 // 3]
    for place, position in (("middle", len(content) // 2), ("end", len(content) - 3)):
        flipped = bytearray(content)
        flipped[position] ^= 2
        yield f"a bit flipped at the {place}", bytes(flipped)
    if file.suffix in TEXT:
        nested = b"[\n" if file.suffix == ".yaml" else b"["  # in one line, YAML looks for a key at each of them
        yield "brackets", nested * 100_000 + b"\n"
        yield "an empty object", b"{}\n"
        yield "an empty list", b"[]\n"


@contextmanager
def damaged(file: Path, content: bytes | Path | None) -> Iterator[None]:
    before = file.read_bytes()
    try:
        file.unlink()
        if isinstance(content, Path):
            file.symlink_to(content)
        elif content is not None:
            file.write_bytes(content)
        yield
    finally:
        file.unlink(missing_ok=True)
        file.write_bytes(before)


def problems(folder: Path, file: Path, answer: Answer) -> Iterator[str]:
    """Damage a file in every way, and yield what is wrong with what its reader does."""
    expected = answer()
    for how, content in damages(file):
        with damaged(file, content), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                found = answer()
            except (ShortlistError, OSError) as error:
                if folder.name not in str(error) and file.name not in str(error):
                    yield f"{file.name}, {how}: the error does not name it: {error}"
                continue
            except Exception as error:
                yield f"{file.name}, {how}: {type(error).__name__}: {error}"
                continue
        undetectable = file.name in WITHOUT_DIGEST and how.startswith("a bit flipped")
        if found != expected and not undetectable and not any(file.name in str(each.message) for each in warned):
            yield f"{file.name}, {how}: another answer: {found}"
    assert answer() == expected  # undamaged again


def check_all(folder: Path, answers: dict[str, Answer], not_read: set[str]) -> None:
    """Damage all files of a folder, one after the other.

    Args:
        folder: The folder.
        answers: What is computed from the files, by the pattern of their paths.
        not_read: Names of files that nothing reads.
    """
    found: list[str] = []
    left = {file for file in folder.rglob("*") if file.is_file() and not file.name.startswith(".")}
    for pattern, answer in answers.items():
        for file in sorted(left & set(folder.glob(pattern))):
            found += problems(folder, file, answer)
            left.remove(file)
    assert not found, "\n".join(found)
    assert {file.name for file in left} == not_read


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with an unreadable image and an evaluation before training."""
    home = tmp_path_factory.mktemp("damage")
    images = class_folders(home / "images")
    (images / "class 00" / "bad.png").write_bytes(b"not an image")
    config = fast_config(images, "evaluation.before=true", "data.on_missing=skip", "training.epochs=2")
    return train_run(config, home / "run", Display())


@pytest.fixture(scope="module")
def image(run: RunFolder) -> Path:
    return Path(run.config().data.source) / "class 00" / "0.png"


@pytest.fixture(scope="module")
def encoder(run: RunFolder) -> Encoder:
    return open_encoder(run.path)


def test_a_run(run: RunFolder, image: Path) -> None:
    encoder, images = open_encoder(run.path), open_run_images(run.config(), Display(), run).catalog
    states = {checkpoint.name: load_file(checkpoint) for checkpoint in run.checkpoints.iterdir()}

    def is_as_written() -> object:
        found = latest_state(run.checkpoints)
        return found is not None and same_weights(found.tensors, states[f"step-{found.step:08}.safetensors"])

    answers: dict[str, Answer] = {
        "config.yaml": lambda: RunFolder.open(run.path).config(),
        "facts.json": run.facts,
        "evaluation.json": run.evaluations,
        "evaluation-before.json": lambda: run.evaluations(before=True),
        "metrics.jsonl": lambda: training_curves(run.metrics()) is None,  # curves of fewer or other steps are no answer
        "unreadable.json": lambda: open_run_images(run.config(), Display(), run).catalog.fingerprint(),
        "e*er.*": lambda: open_encoder(run.path).encode(image).tolist(),
        "best/*": lambda: serialization.read(run.best).sha256,
        "vectors/*": lambda: embed_test(encoder, images.split("test"), 0, run, lambda *_, **__: None).tolist(),
        "checkpoints/*": is_as_written,
    }
    check_all(run.path, answers, not_read=set())


def test_a_gallery(run: RunFolder, encoder: Encoder, image: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gallery"
    Gallery.build(encoder, run.config().data.source, folder, kind="hnsw", workers=0, display=Display())
    query = encoder.encode(image)

    def search() -> object:
        return Gallery.open(folder).search_vectors(query, 5)

    answers: dict[str, Answer] = {"model/*": lambda: Gallery.open(folder).encoder.fingerprint, "*": search}
    check_all(folder, answers, not_read=set())


def test_a_package(run: RunFolder, image: Path, tmp_path: Path) -> None:
    export(run.path, package=tmp_path / "package", display=Display())

    def vectors() -> object:
        return Encoder.from_pretrained(tmp_path / "package").encode(image).tolist()

    answers: dict[str, Answer] = {"config.json": vectors, "model.safetensors": vectors}
    check_all(tmp_path / "package", answers, not_read={"README.md", "load.py"})


def test_a_cache_of_features(run: RunFolder, encoder: Encoder, tmp_path: Path) -> None:
    """A damaged file is written again."""
    catalog = open_run_images(run.config(), Display(), run).catalog.subset(range(4))
    cache, chosen = FeatureCache(tmp_path / "cache"), np.arange(len(catalog))

    def features() -> object:
        found = cache.features(encoder.embedder, catalog, Views(encoder.transform))
        return found.take(chosen, np.zeros_like(chosen)).tolist()

    features()
    check_all(tmp_path / "cache", {"*/*": features}, not_read=set())


def test_the_cache_of_the_processor_check(tmp_path: Path) -> None:
    file = tmp_path / "processor" / "bfloat16.json"
    _write_result(file, {"survives": True})
    assert list(problems(tmp_path, file, lambda: _read_result(file) in (True, None))) == []
    assert _read_result(file) is True

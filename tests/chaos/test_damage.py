"""Damage to every file of a run, a study, a gallery, a package, a table of vectors or a cache.

A command that reads the file fails with one error message that names the file, warns about the file, or gives the same
result as before. It never ends with a traceback, and never silently gives another result.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch.utils.data import Dataset

from shortlist import Encoder, locations
from shortlist.bfloat16 import _read_result, _write_result
from shortlist.data import load_image, open_collection
from shortlist.digests import tensors_digest
from shortlist.encoding import vector_file
from shortlist.encoding.feature_cache import FeatureCache, Views
from shortlist.encoding.parquet import METADATA, embed_to_table
from shortlist.errors import RunError, ShortlistError
from shortlist.export.exporter import export
from shortlist.files import with_checksum, write_json
from shortlist.gallery import Gallery, switch
from shortlist.model import serialization
from shortlist.progress import Display
from shortlist.report.study_results import read_results
from shortlist.training import RunFolder, open_encoder, sweep, tracking, train_run, write_best_recipe
from shortlist.training.ablation import CASE_FILE, STUDY_FILE, Case, collect
from shortlist.training.checkpoint import latest_state
from shortlist.training.datasets import open_run_images
from shortlist.training.run_evaluation import embed_test
from tests.chaos.extent import LONG, chance, times
from tests.test_cli import Call, call
from tests.training.runs import class_folders, fast_config, same_weights

__all__ = ["call"]  # a fixture

Answer = Callable[[], object]
TEXT = (".json", ".jsonl", ".yaml", ".log")
UNREADABLE = Path("/proc/self/mem")  # on Linux, a regular file that can be opened, and fails with EIO when it is read
OPTIONAL = {"min-score.json", "tracking.json"}  # without them, nothing is recommended, and trackers get a new run
WITHOUT_DIGEST = (".png",)  # images, which are not ours to check
LATER = "a later version"


def damages(file: Path) -> Iterator[tuple[str, bytes | Path | None]]:
    """Yield the name and the result of every kind of damage; None: the file is missing; a path: a link to it."""
    content, draw = file.read_bytes(), chance(f"damage to {file.name}")
    if file.name not in OPTIONAL:
        yield "missing", None
    yield "empty", b""
    if UNREADABLE.exists():
        yield "an I/O error", UNREADABLE
    yield "truncated", content[: len(content) * 2 // 3]
    if file.suffix not in WITHOUT_DIGEST:
        places = [(len(content) // 2, 1), (len(content) - 3, 1)]
        places += [(draw.randrange(len(content)), draw.randrange(8)) for _ in range(times(1, 25))]
        for position, bit in places:
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            yield f"bit {bit} of byte {position} flipped", bytes(flipped)
    if file.suffix in TEXT:
        nested = b"[\n" if file.suffix == ".yaml" else b"["  # in one line, YAML looks for a key at each of them
        yield "brackets", nested * 100_000 + b"\n"
        yield "an empty object", b"{}\n"
        yield "an empty list", b"[]\n"
    later = of_later_version(file)
    if later is not None:
        yield LATER, later


def of_later_version(file: Path) -> bytes | None:
    """The same contents in a later format, with digests that match; None if the file has no version."""
    if file.suffix == ".yaml":
        return None
    if file.suffix in TEXT:
        lines = file.suffix in (".jsonl", ".log")
        texts = file.read_text().splitlines() if lines else [file.read_text()]
        found = [_later(json.loads(text)) for text in texts]
        return None if found[0] is None else "".join(json.dumps(each) + "\n" for each in found).encode()
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        key = next((key for key in ("facts", "embedder") if key in metadata), None)
        if key is None:
            return None
        tensors, found = load_file(file), json.loads(metadata[key])
        metadata[key] = json.dumps({**found, "format": found["format"] + 1})
        if "digest" in metadata:
            metadata["digest"] = tensors_digest(tensors, metadata[key])
        return save(tensors, metadata)
    if file.suffix == ".parquet" and METADATA in (pq.read_schema(file).metadata or {}):
        table = pq.read_table(file)
        facts = json.dumps({**json.loads(table.schema.metadata[METADATA]), "format": 2})
        written = file.with_name("later")
        pq.write_table(table.replace_schema_metadata({METADATA: facts}), written)
        later = written.read_bytes()
        written.unlink()
        return later
    return None


def _later(value: Any) -> Any:
    """Return an object, or a list of objects, in a later format; None if it is a list of anything else."""
    if isinstance(value, list):
        return [_later(each) for each in value] if value and isinstance(value[0], dict) else None
    others = {name: each for name, each in value.items() if name != "sha256"}
    return with_checksum({**others, "format": others.get("format", 1) + 1})


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


def problems(file: Path, answer: Answer, again: bool = False) -> Iterator[str]:
    """Damage a file in every way, and yield what is wrong with what its reader does.

    Args:
        file: The file.
        answer: What is computed from the file.
        again: Whether another file is used, or the file is written again, if it cannot be used.
    """
    expected = answer()
    for how, content in damages(file):
        with damaged(file, content), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found, said, failed = None, "", True
            try:
                found, failed = answer(), False
            except (ShortlistError, OSError) as error:
                said = str(error)
            except Exception as error:
                yield f"{file.name}, {how}: {type(error).__name__}: {error}"
                continue
        named = any(file.name in text for text in (said, *(str(each.message) for each in warned)))
        if failed and not named:
            yield f"{file.name}, {how}: the error does not name it: {said}"
        if not failed and found != expected and not named:
            yield f"{file.name}, {how}: another answer: {found}"
        if how == LATER and not again and "update shortlist" not in said.lower():
            yield f"{file.name}, {how}: it is read, or not refused for this reason: {said}"
    assert answer() == expected  # undamaged again


def check_all(
    folder: Path, answers: dict[str, Answer], again: tuple[str, ...] = (), not_read: set[str] | None = None
) -> None:
    """Damage all files of a folder, one after the other.

    Args:
        folder: The folder.
        answers: What is computed from the files, by the pattern of their paths.
        again: Patterns of files that are replaced or written again if they cannot be used.
        not_read: Names of files that nothing reads.
    """
    found: list[str] = []
    left = {file for file in folder.rglob("*") if file.is_file() and not file.name.endswith("lock")}
    for pattern, answer in answers.items():
        for file in sorted(left & set(folder.glob(pattern))):
            found += problems(file, answer, any(file.match(each) for each in again))
            left.remove(file)
    assert not found, "\n".join(found)
    assert {file.name for file in left} == (not_read or set())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with an unreadable image and an evaluation before training."""
    home = tmp_path_factory.mktemp("damage")
    images = class_folders(home / "images")
    (images / "class 00" / "bad.png").write_bytes(b"not an image")
    config = fast_config(images, "evaluation.before=true", "data.on_missing=skip", "training.epochs=2")
    run = train_run(config, home / "run", Display())
    run.recommend_min_score((0.25, 0.01))
    write_json(run.tracking_file, {"wandb": "abcd1234"})
    return run


@pytest.fixture(scope="module")
def image(run: RunFolder) -> Path:
    return Path(run.config().data.source) / "class 00" / "0.png"


@pytest.fixture(scope="module")
def encoder(run: RunFolder) -> Encoder:
    return replace(open_encoder(run.path), batch_size=2)


def test_a_run(run: RunFolder, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, images = open_encoder(run.path), open_run_images(run.config(), Display(), run).catalog
    states = {checkpoint.name: load_file(checkpoint) for checkpoint in run.checkpoints.iterdir()}

    def is_as_written() -> object:
        found = latest_state(run.checkpoints)
        return found is not None and same_weights(found.tensors, states[f"step-{found.step:08}.safetensors"])

    def tracked_as() -> object:
        ids: list[str | None] = []
        tracker = SimpleNamespace(start=lambda: None, tracker=SimpleNamespace(id="another"))
        monkeypatch.setattr(tracking, "_create", lambda name, folder, step, run_id: ids.append(run_id) or tracker)
        config = run.config().model_copy(update={"tracking": ("wandb",)})
        tracking.start_trackers(SimpleNamespace(trackers=[]), config, run, 0)  # type: ignore[arg-type]
        return ids

    answers: dict[str, Answer] = {
        "config.yaml": lambda: RunFolder.open(run.path).config(),
        "facts.json": run.facts,
        "evaluation.json": run.evaluations,
        "evaluation-before.json": lambda: run.evaluations(before=True),
        "metrics.jsonl": run.metrics,
        "min-score.json": run.recommended_min_score,
        "tracking.json": tracked_as,
        "unreadable.json": lambda: open_run_images(run.config(), Display(), run).catalog.fingerprint(),
        "e*er.*": lambda: open_encoder(run.path).encode(image).tolist(),
        "best/*": lambda: serialization.read(run.best).sha256,
        "vectors/*": lambda: embed_test(encoder, images.split("test"), 0, run, lambda *_, **__: None).tolist(),
        "checkpoints/*": is_as_written,
    }
    check_all(run.path, answers, again=("vectors/*", f"checkpoints/{min(states)}"))


class Squares(Dataset[tuple[np.ndarray, int]]):
    """Images in memory."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full((32, 32, 3), 10 * index, np.uint8), index // 2


def test_a_run_on_images_in_memory(tmp_path: Path) -> None:
    settings = ("batch.size=4", "batch.per_class=2", "training.epochs=1", "data.validation=none")
    run = train_run(fast_config("given", *settings), tmp_path / "run", Display(), data=Squares())
    answers: dict[str, Answer] = {
        "images.parquet": lambda: open_run_images(run.config(), Display(), run).catalog.fingerprint(),
        "given-images/00000003.png": lambda: load_image(run.given_images / "00000003.png").tobytes(),
    }
    names = {file.name for file in run.path.rglob("*") if file.is_file() and not file.name.endswith("lock")}
    check_all(run.path, answers, not_read=names - {"images.parquet", "00000003.png"})  # the others are tested above


def test_a_sweep(run: RunFolder, tmp_path: Path) -> None:
    settings = ("data.validation=none", "batch.size=4", "batch.per_class=2", "training.epochs=1")
    config, folder = fast_config(run.path.parent / "images", "data.on_missing=skip", *settings), tmp_path / "study"
    sweep(config, {"optimizer.lr": [1e-3, 1e-2]}, folder, display=Display())
    shutil.rmtree(folder / "trials")

    def best() -> object:
        """Without its end, a journal is that of an unfinished sweep."""
        try:
            text = write_best_recipe(folder, tmp_path / "best.yaml").read_text()
        except RunError as error:
            text = str(error)
            if "No trial of the sweep" not in text:
                raise
        if "The best of 2 trials" not in text:
            raise ShortlistError(f"journal.log: {text}")
        return text

    check_all(folder, {"study.json": best, "journal.log": best}, not_read={"results.json"})


def test_an_ablation_study(run: RunFolder, tmp_path: Path) -> None:
    case = Case("RS@k", "4", 0)
    folder = case.folder(tmp_path).path
    shutil.copytree(run.path, folder)
    write_json(folder / CASE_FILE, {"method": case.method, "value": case.value, "seed": case.seed})
    config = run.config().model_dump(mode="json")
    write_json(tmp_path / STUDY_FILE, {"study": "batch-size", "learning_rate": "constant", "config": config})
    results = collect(tmp_path)
    for file, answer in {
        tmp_path / STUDY_FILE: lambda: read_results(collect(tmp_path)),
        folder / CASE_FILE: lambda: read_results(collect(tmp_path)),
        results: lambda: read_results(results),
    }.items():
        assert list(problems(file, answer)) == []


def test_a_gallery(run: RunFolder, encoder: Encoder, image: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gallery"
    Gallery.build(encoder, run.config().data.source, folder, kind="hnsw", workers=0, display=Display())
    query = encoder.encode(image)

    def search() -> object:
        return Gallery.open(folder).search_vectors(query, 5)

    answers: dict[str, Answer] = {"model/*": lambda: Gallery.open(folder).encoder.fingerprint, "*": search}
    check_all(folder, answers)
    switch(tmp_path / "live.json", folder)
    assert list(problems(tmp_path / "live.json", lambda: Gallery.open(tmp_path / "live.json").name)) == []


def test_a_package(run: RunFolder, image: Path, tmp_path: Path) -> None:
    export(run.path, package=tmp_path / "package", display=Display())

    def vectors() -> object:
        return Encoder.from_pretrained(tmp_path / "package").encode(image).tolist()

    answers: dict[str, Answer] = {"config.json": vectors, "model.safetensors": vectors}
    check_all(tmp_path / "package", answers, not_read={"README.md", "load.py"})


def interrupted(work: Callable[[], object], after: int) -> None:
    """Interrupt embedding after some batches."""
    append, calls = vector_file.VectorFile.append, []

    def stop(self: vector_file.VectorFile, vectors: np.ndarray, seen: int) -> None:
        append(self, vectors, seen)
        calls.append(seen)
        if len(calls) == after:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vector_file.VectorFile, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            work()


def test_vectors_in_a_table(run: RunFolder, encoder: Encoder, tmp_path: Path) -> None:
    """A missing table is written again."""
    catalog = open_collection(run.config().data.source).subset(range(1, 4))
    file = tmp_path / "home" / "vectors.parquet"

    def rows() -> object:
        embed_to_table(encoder, catalog, file, workers=0, display=Display())
        return pq.read_table(file).to_pylist()

    rows()
    check_all(file.parent, {"vectors.parquet": rows})


def test_unfinished_work(run: RunFolder, encoder: Encoder, tmp_path: Path) -> None:
    """What an interrupted command has left is used if it is undamaged."""
    catalog = open_collection(run.config().data.source).subset(range(1, 7))
    template, copy = tmp_path / "template", tmp_path / "copy"

    def index(home: Path) -> object:
        gallery = Gallery.build(encoder, catalog, home / "gallery", workers=0, display=Display())
        return gallery.store.vectors(range(len(gallery))).tolist()

    def embed(home: Path) -> object:
        embed_to_table(encoder, catalog, home / "vectors.parquet", workers=0, display=Display())
        return pq.read_table(home / "vectors.parquet").to_pylist()

    for work in (embed, index) if LONG else (embed,):  # both use the same files
        interrupted(lambda work=work: work(template), after=2)

        def resumed(work: Callable[[Path], object] = work) -> object:
            shutil.copytree(template, copy, symlinks=True)
            try:
                return work(copy)
            finally:
                shutil.rmtree(copy)

        left = [file for file in template.rglob("*.part*") if file.is_file()]
        assert len(left) == 2  # the vectors and the note
        for file in left:
            assert list(problems(file, resumed, again=True)) == []
        shutil.rmtree(template)


def test_a_cache_of_features(run: RunFolder, encoder: Encoder, tmp_path: Path) -> None:
    """A damaged file is written again."""
    catalog = open_run_images(run.config(), Display(), run).catalog.subset(range(4))
    cache, chosen = FeatureCache(tmp_path / "cache"), np.arange(len(catalog))

    def features() -> object:
        found = cache.features(encoder.embedder, catalog, Views(encoder.transform))
        return found.take(chosen, np.zeros_like(chosen)).tolist()

    features()
    check_all(tmp_path / "cache", {"*/*": features}, again=("*",))


def test_the_cache_of_remote_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy whose size or time differs from that in the store is downloaded again."""
    monkeypatch.setenv("SHORTLIST_CACHE", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    store.pipe("/damage/image", bytes(range(100)))
    file = Path("memory://damage/image")

    def content() -> object:
        stamp = locations.size_and_mtime(file)
        with locations.open_binary(file) as opened:
            return stamp, opened.read()

    content()
    check_all(tmp_path / "cache", {"remote/*/*": content}, again=("*",))
    store.rm("/damage", recursive=True)


def test_the_cache_of_the_processor_check(tmp_path: Path) -> None:
    file = tmp_path / "processor" / "bfloat16.json"
    _write_result(file, {"survives": True})
    assert list(problems(file, lambda: _read_result(file) in (True, None), again=True)) == []
    assert _read_result(file) is True


def test_commands(run: RunFolder, image: Path, call: Call, tmp_path: Path) -> None:
    """The same through the command line: one line names the file, or the output is the same."""
    draw = chance("damage and commands")
    shutil.copytree(run.path, tmp_path / "run")
    assert call("index", "run", image.parent, "-o", "gallery")[0] == 0
    assert call("export", "run", "--package", "package")[0] == 0
    commands: dict[str, tuple[str, ...]] = {
        "run": ("evaluate", "run", "--json"),
        "gallery": ("search", "gallery", str(image), "--json"),
        "package": ("evaluate", "package", str(image.parent.parent), "--on-missing", "skip", "--json"),
    }
    for name, command in commands.items():
        expected = call(*command)
        assert expected[0] == 0
        files = [
            file for file in sorted((tmp_path / name).rglob("*")) if file.is_file() and not file.name.endswith("lock")
        ]
        cases = [(file, *damage) for file in files for damage in damages(file)]
        for file, how, content in draw.sample(cases, times(4, 100)):
            with damaged(file, content):
                code, out, error = call(*command)
            print(f"{name}: {file.name}, {how}: {code}, {error}")
            errors = [line for line in error.splitlines() if line.startswith("Error: ")]
            assert (code, len(errors)) in ((0, 0), (1, 1))
            assert "Traceback" not in error
            assert file.name in error or (code, out) == expected[:2]

"""Random images, tables and recipes: reading them succeeds, or fails with one error message."""

from __future__ import annotations

import io
import multiprocessing
import os
import resource
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from PIL import Image

from shortlist import Encoder
from shortlist.config import RunConfig, read_config
from shortlist.config.reading import _dotted_keys
from shortlist.data import ImageError, TestTransform, TrainTransform, open_catalog, open_collection
from shortlist.data.images import load_crop
from shortlist.encoding.parquet import embed_to_table
from shortlist.errors import ConfigError, DataError, ShortlistError
from shortlist.model import Embedder
from shortlist.progress import Display
from tests.chaos.extent import SEED, chance, times
from tests.data.pictures import picture
from tests.training.runs import RECIPE, class_folders

MEMORY = 256 * 2**20  # bytes
MEMORY_OF_IMAGES = 24 * 2 * (Image.MAX_IMAGE_PIXELS or 0)  # Pillow refuses more pixels, of which each takes up to 24
EXAMPLES = times(15, 5000)
settings = hypothesis.settings(
    max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def mutated(content: bytes, random: Random) -> bytes:
    """Return a copy with one to four changes, half of them near the start, where the headers are."""
    changed = bytearray(content)
    for _ in range(random.randint(1, 4)):
        start = random.randrange(min(len(changed), random.choice((64, 10**9)))) if changed else 0
        end = start + random.choice((1, 2, 4, 4, 50))
        match random.randrange(6):
            case 0:
                changed[start : start + 1] = bytes([changed[start] ^ 1 << random.randrange(8)] if changed else [])
            case 1:
                changed[start:end] = random.randbytes(end - start)
            case 2:
                changed[start:end] = random.choice((b"\0", b"\xff", b"\x7f")) * (end - start)  # extreme numbers
            case 3:
                del changed[start:end]
            case 4:
                changed[start:start] = changed[start:end] * random.choice((1, 20))
            case 5:
                del changed[random.randrange(start, len(changed) + 1) :]
    return bytes(changed)


def survives(cases: Callable[[], Iterable[str]], memory: int = MEMORY) -> None:
    """Run cases in a process of their own, which a decoder may crash.

    Args:
        cases: Returns the problems.
        memory: Number of bytes that the cases may use at a time; using more is a problem, too.
    """

    def run() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        warnings.simplefilter("ignore")  # Pillow's, about damaged metadata
        found = list(cases())
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        sender.send([*found, *([f"{more / 2**20:,.0f} MB of memory"] if more > memory else [])])

    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    sender.close()
    try:
        problems = receiver.recv()
    except EOFError:
        problems = ["it crashed"]
    child.join()
    receiver.close()
    assert not problems, "\n".join(problems)
    assert child.exitcode == 0


def alone(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test of hypothesis in a process of its own; see `survives`."""

    def cases() -> Iterator[str]:
        try:
            test()
        except BaseException:  # of an example, which hypothesis adds as a note
            yield traceback.format_exc()

    return lambda: survives(cases, MEMORY + EXAMPLES * 2**17)  # hypothesis keeps what it has drawn


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format=kind, **options)
    return out.getvalue()


def originals(kind: str) -> list[bytes]:
    """Return small images in the variants of a format that are decoded differently."""
    rgb = picture(48, 36)
    variants: dict[str, list[tuple[Image.Image, dict[str, Any]]]] = {
        "JPEG": [
            (rgb, {"progressive": True}),
            (rgb, {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0"}),
        ],
        "PNG": [(rgb.convert("P"), {"transparency": 3}), (rgb.convert("RGBA"), {}), (rgb.convert("I;16"), {})],
        "WEBP": [
            (rgb.convert("RGBA"), {"lossless": True}),
            (rgb, {"save_all": True, "append_images": [picture(48, 36, 1)]}),
        ],
        "GIF": [
            (rgb, {"save_all": True, "append_images": [picture(48, 36, 1)]}),
            (rgb.convert("L"), {"transparency": 0}),
        ],
        "TIFF": [(rgb, {"compression": each}) for each in ("tiff_lzw", "jpeg", "tiff_deflate", "packbits")]
        + [(rgb.convert("F"), {}), (rgb.convert("CMYK"), {})],
    }
    return [encoded(rgb, kind), *(encoded(image, kind, **options) for image, options in variants[kind])]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
def test_images(kind: str) -> None:
    transforms = TestTransform(16, 18), TrainTransform(16)

    def cases() -> Iterator[str]:
        random = chance(kind)
        for number in range(times(100, 20_000)):
            content = mutated(random.choice(originals_of_kind), random)
            box = random.choice((None, None, (3, 3, 20, 20)))
            try:
                load_crop("it", random.choice(transforms), random, box, io.BytesIO(content))
            except ImageError as error:
                if "\n" in str(error) or not error.reason:
                    yield f"{number}: {error!s}"
            except Exception as error:
                yield f"{number}: {type(error).__name__}: {error}"

    originals_of_kind = originals(kind)
    survives(cases, MEMORY_OF_IMAGES)


def test_crashes_and_memory_are_noticed() -> None:
    """Negative controls.

    The one for memory takes twice the limit: the kernel counts the pages of a process inexactly, and may take back
    some of the parent's pages meanwhile.
    """
    with pytest.raises(AssertionError, match="it crashed"):
        survives(lambda: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[arg-type,return-value]
    with pytest.raises(AssertionError, match="MB of memory"):
        survives(lambda: [b"x" * (2 * MEMORY)][1:])  # type: ignore[list-item]


TABLE = {"path": ["a/0.png", "a/1.png", "b/0.png", "b/1.png"], "label": ["a", "a", "b", "b"], "split": ["train"] * 4}


def opened(file: Path) -> Iterator[str]:
    """Open a table, and yield what is wrong with how that fails."""
    try:
        open_catalog(file)
    except DataError as error:
        if file.stem not in str(error):
            yield f"the error does not name it: {error}"
    except Exception as error:
        yield f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_damaged_tables(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"table.{kind}"
    pa_table = pa.table(TABLE)
    (pa_csv.write_csv if kind == "csv" else pq.write_table)(pa_table, file)
    assert list(opened(file)) == []
    content = file.read_bytes()

    def cases() -> Iterator[str]:
        random = chance(kind)
        for number in range(times(100, 5000)):
            file.write_bytes(mutated(content, random))
            yield from (f"{number}: {each}" for each in opened(file))

    survives(cases)


def test_damaged_vectors(tmp_path: Path) -> None:
    """A file of `shortlist embed` whose vectors are kept: its damage is noticed, or it has the same vectors."""
    images, file = open_collection(class_folders(tmp_path / "images", classes=1, images=3)), tmp_path / "table.parquet"
    encoder = Encoder(Embedder("test_resnet", dim=8, image_size=32).eval(), TestTransform(32, 32))

    def table() -> object:
        embed_to_table(encoder, images, file, workers=0, display=Display())
        return pq.read_table(file).sort_by("path").to_pydict()

    expected = table()
    content = file.read_bytes()

    def cases() -> Iterator[str]:
        random = chance("vectors")
        for number in range(times(20, 2000)):
            file.write_bytes(mutated(content, random))
            try:
                found = table()
            except ShortlistError as error:
                if file.name not in str(error):
                    yield f"{number}: the error does not name it: {error}"
            except Exception as error:
                yield f"{number}: {type(error).__name__}: {error}"
            else:
                if found != expected:
                    yield f"{number}: other vectors"

    survives(cases)


NAMES = ["path", "label", "split", "role", "other"]
TYPES: list[st.SearchStrategy[Any]] = [
    *(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(), st.binary(), st.datetimes()),
    *(st.lists(st.text()), st.fixed_dictionaries({"a": st.integers(0, 9)}), st.sampled_from(["train", "query", ""])),
]
COLUMNS = st.sampled_from(TYPES).flatmap(lambda each: st.lists(each | st.none(), min_size=3, max_size=3))


@alone
@hypothesis.seed(SEED)
@settings
@given(st.dictionaries(st.sampled_from(NAMES), COLUMNS, min_size=1))
def test_tables_of_any_type(columns: dict[str, list[object]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.parquet"
        pq.write_table(pa.table(columns), file)
        assert list(opened(file)) == []


@alone
@hypothesis.seed(SEED)
@settings
@given(st.lists(st.lists(st.text() | st.sampled_from(NAMES))), st.sampled_from("\n\r\0,;\"'"), st.sampled_from(",;"))
def test_tables_of_any_text(rows: list[list[str]], end: str, separator: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.csv"
        text = end.join(separator.join(row) for row in [["path", "label"], *rows])
        file.write_bytes(text.encode(errors="surrogatepass"))
        assert list(opened(file)) == []


KEYS = [*_dotted_keys(RunConfig), "optimizer.parts.head.lr_multiplier", "inherits", "nothing", "", ".", "a..b"]
SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.dates(), st.binary()),
    st.sampled_from(["auto", "none", "half", "recall_at_k", "timm", "../x", "1e3", "~", "\0", "a:b", "a.b:c"]),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400, 1e308]),
)
ANYTHING = st.recursive(
    SCALARS, lambda each: st.lists(each, min_size=1) | st.dictionaries(SCALARS, each, min_size=1), max_leaves=8
)


def reads(text: str, *overrides: str) -> None:
    """Read a recipe, which may be refused; one that is accepted reads the same after it is written."""
    try:
        found = read_config(text, "recipe.yaml", overrides)
    except ConfigError:
        return
    written = yaml.safe_dump(found.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    assert read_config(written, "config.yaml") == found


@alone
@hypothesis.seed(SEED)
@settings
@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING, min_size=1, max_size=3))
def test_recipes_of_any_values(values: dict[str, Any]) -> None:
    recipe = yaml.safe_load(RECIPE)
    for key, value in values.items():
        section, _, name = key.partition(".")
        if name and isinstance(recipe.setdefault(section, {}), dict):
            recipe[section][name] = value
        else:
            recipe[section] = value
    reads(yaml.safe_dump(recipe, allow_unicode=True))


@alone
@hypothesis.seed(SEED)
@settings
@given(st.lists(st.tuples(st.sampled_from(KEYS) | st.text(), st.sampled_from(["=", "", "=="]), st.text() | ANYTHING)))
def test_overrides_of_any_values(overrides: list[tuple[str, str, object]]) -> None:
    reads(RECIPE, *(f"{key}{sign}{value}" for key, sign, value in overrides))


def test_damaged_recipes() -> None:
    def cases() -> Iterator[str]:
        random = chance("recipes")
        words = [
            b"&a",
            b"*a",
            b"<<: ",
            b"!!python/object:os.system ",
            b"!!binary ",
            b"? ",
            b"- ",
            b"\t",
            b"---\n",
            b"0x",
            b"{",
        ]
        for number in range(times(300, 20_000)):
            content = mutated(RECIPE.encode(), random)
            for _ in range(random.randrange(3)):
                at = random.randrange(len(content) + 1)
                content = content[:at] + random.choice(words) + content[at:]
            try:
                reads(content.decode(errors="replace"))
            except Exception as error:
                yield f"{number}: {type(error).__name__}: {error}: {content!r}"

    survives(cases)

"""The generated benchmark: characters, images, reproducibility, and the cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from shortlist.data.benchmarks import glyphs
from shortlist.data.benchmarks.glyphs import Face, distinct_characters, open_faces
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError

PINNED = "52e8b552"  # digest of Pillow 13.0.0, FreeType 2.14.3 and the fonts of matplotlib 3.9 to 3.11


@pytest.fixture(scope="module")
def faces() -> dict[str, Face]:
    return open_faces()


@pytest.fixture(scope="module")
def alphabet(faces: dict[str, Face]) -> list[str]:
    return distinct_characters(faces)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, faces: dict[str, Face], alphabet: list[str]) -> None:
    """Open the fonts and compute the alphabet only once for all tests."""
    monkeypatch.setattr(glyphs, "open_faces", lambda: faces)
    monkeypatch.setattr(glyphs, "distinct_characters", lambda faces: alphabet)


def tiny(cache: Path, **options) -> Catalog:
    return glyphs.glyphs(cache, **{"classes": 5, "per_class": 3, **options})


def content(catalog: Catalog) -> str:
    digest = hashlib.sha256()
    for index, path in enumerate(catalog.paths):
        digest.update(path.encode() + catalog.file(index).read_bytes())
    return digest.hexdigest()


def ink(image: Image.Image) -> np.ndarray:
    return np.asarray(image) > 127


def overlap(first: np.ndarray, second: np.ndarray) -> float:
    """Return the intersection over union."""
    return float((first & second).sum() / (first | second).sum())


def strokes(line: np.ndarray) -> int:
    """Return how many separate strokes a row or column of pixels crosses."""
    return int((np.diff(line.astype(int), prepend=0) == 1).sum())


@pytest.mark.parametrize("name", ["DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono"])
def test_an_a_looks_like_an_a(faces: dict[str, Face], name: str):
    image = faces[name].draw("A")
    assert image.getbbox() == (0, 0, *image.size)  # no empty row or column at the border
    drawn = ink(image)
    height, width = drawn.shape
    assert 0.7 < width / height < 1.2
    assert 0.2 < drawn.mean() < 0.55
    assert overlap(drawn, drawn[:, ::-1]) > 0.9
    assert strokes(drawn[5]) == 1  # the top
    assert abs(np.flatnonzero(drawn[5]).mean() - (width - 1) / 2) < 1.5
    assert [strokes(drawn[row]) for row in (height // 2, -5)] == [2, 2]  # two legs, the lower ones at the corners
    assert drawn[-5, :10].any()
    assert drawn[-5, -10:].any()
    assert strokes(drawn[:, width // 2]) == 2  # the top and the crossbar
    assert overlap(drawn, drawn[::-1]) < 0.8  # controls: upside down, and another character
    other = ink(faces[name].draw("R"))
    assert overlap(other, other[:, ::-1]) < 0.8


def test_thicker_strokes(faces: dict[str, Face]):
    thin, thick = (faces["DejaVuSans"].draw("O", stroke_width=width) for width in (0, 4))
    assert [large - small for large, small in zip(thick.size, thin.size, strict=True)] == pytest.approx([8, 8], abs=2)
    around = ink(ImageOps.expand(thin, 4).resize(thick.size))
    assert (ink(thick) & around).sum() > 0.99 * around.sum()
    assert ink(thick).sum() > 1.3 * around.sum()
    assert not ink(thick)[thick.height // 2, thick.width // 2]  # the hole remains


def test_faces_contain_the_characters_they_list(faces: dict[str, Face]):
    """A font draws the same box for every character that it does not contain."""
    for name, face in faces.items():
        missing = face.draw("\uffff").tobytes()
        assert len(face.characters) > 300
        for character in "AR8\u20ac\u0416\u03a8\u10d0\u20a3\u0531\u4e00":
            assert (face.draw(character).tobytes() != missing) == (character in face.characters), (name, character)
    assert not any("\u4e00" in face.characters for face in faces.values())  # control: some are missing


def test_hundreds_of_distinct_characters(faces: dict[str, Face], alphabet: list[str]):
    assert len(alphabet) == len(set(alphabet)) >= 310  # 300 are needed; other versions of Pillow may differ
    for name in ("DejaVuSans", "STIXGeneral"):
        shared = [character for character in alphabet if character in faces[name].characters]
        overlap = overlaps(faces[name], shared)
        assert overlap[~np.eye(len(shared), dtype=bool)].max() < 0.95


def overlaps(face: Face, characters: list[str]) -> np.ndarray:
    """Return the intersection over union of every pair of shapes at the same size."""
    shapes = [ink(ImageOps.pad(face.draw(character), (24, 24))) for character in characters]
    each = np.stack(shapes).reshape(len(characters), -1).astype(float)
    both = each @ each.T
    return both / (each.sum(axis=1)[:, None] + each.sum(axis=1) - both)


@pytest.mark.parametrize("pair", ["A\u0391", "A\u0410", "H\u029c", "Oo", "Cc", "Xx", "Zz"])
def test_only_one_of_two_similar_characters_is_kept(alphabet: list[str], pair: str):
    assert pair[0] in alphabet
    assert pair[1] not in alphabet


def test_the_overlap_detects_similar_characters(faces: dict[str, Face]):
    assert overlaps(faces["DejaVuSans"], ["A", "\u0391"])[0, 1] > 0.95  # control of the two tests above
    assert overlaps(faces["DejaVuSans"], ["A", "B"])[0, 1] < 0.5


def test_no_bars_and_no_accents(alphabet: list[str]):
    assert not set("Il|i\u00c4\u00e9\u00f1").intersection(alphabet)


def test_pixels_are_pinned(tmp_path: Path, quick: None, faces: dict[str, Face], alphabet: list[str]):
    if glyphs.drawing_digest() != PINNED:
        pytest.skip("the pixels depend on the fonts and on the versions of Pillow and FreeType, and these are others")
    digest = hashlib.sha256("".join(alphabet).encode())
    assert digest.hexdigest()[:16] == "965d70027a66eaf5"
    pixels = b"".join(image.tobytes() for one in "AB\u20ac" for image in glyphs.images(one, faces, seed=0, count=4))
    assert hashlib.sha256(pixels).hexdigest()[:16] == "76a359e299533249"
    assert content(tiny(tmp_path))[:16] == "8369d100156d907b"


def test_catalog(tmp_path: Path, quick: None):
    seen: list[tuple[int, int]] = []
    catalog = tiny(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 15) for done in range(1, 16)]
    assert catalog.name == "glyphs"
    assert len(catalog.class_names) == 5
    assert catalog.class_sizes().tolist() == [3] * 5
    assert len(catalog.split("train").classes()) == 3
    assert len(catalog.split("test").classes()) == 2
    assert not set(catalog.split("train").labels.tolist()) & set(catalog.split("test").labels.tolist())
    for index, path in enumerate(catalog.paths):
        split, name, _ = path.split("/")
        assert split == catalog.splits[index]
        assert name == catalog.class_names[catalog.labels[index]]
        with Image.open(catalog.file(index)) as image:
            assert (image.format, image.mode, image.size) == ("BMP", "RGB", (48, 48))


def test_bytes_depend_on_the_seed_only(tmp_path: Path, quick: None):
    first, again, other = tiny(tmp_path / "a"), tiny(tmp_path / "b"), tiny(tmp_path / "a", seed=1)
    assert content(first) == content(again) != content(other)
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


def test_bytes_do_not_depend_on_the_process(tmp_path: Path, quick: None):
    """Another process computes the alphabet itself, with another number of threads and another hash of strings."""
    script = "from shortlist.data.benchmarks.glyphs import glyphs; glyphs('other', classes=5, per_class=3)"
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "3", "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)
    (folder,) = (tmp_path / "other").iterdir()
    mine = tiny(tmp_path / "mine")
    assert mine.root.name == folder.name
    assert content(glyphs._catalog(folder, 15)) == content(mine)


def test_the_folder_depends_on_fonts_and_versions(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch):
    folders = [tiny(tmp_path).root]
    files = glyphs.font_files()
    for changed, value in (
        ("PIL.__version__", "99.0"),
        ("PIL.features.version", lambda feature: "99.0"),
        ("shortlist.data.benchmarks.glyphs.font_files", lambda: files[1:]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(changed, value)
            folders.append(tiny(tmp_path).root)
    assert len(set(folders)) == 4
    assert tiny(tmp_path).root == folders[0]


def test_more_classes_and_images_extend_the_first_ones(faces: dict[str, Face], alphabet: list[str]):
    few, many = (glyphs.images("R", faces, seed=3, count=count) for count in (2, 4))
    assert few == many[:2]
    assert many[2] != many[3]
    small, large = (glyphs.choose_characters(alphabet, 3, classes) for classes in (10, 20))
    assert list(small) == list(large)[:10]


def test_each_image_has_another_font(faces: dict[str, Face], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(glyphs, "render", lambda character, face, random: face.draw(character).tobytes())
    for character in "A\u20a3":
        able = sum(character in face.characters for face in faces.values())
        assert able >= 12
        drawn = glyphs.images(character, faces, seed=0, count=able + 1)
        assert len(set(drawn[:able])) >= able - 1  # STIX may use one drawing of a symbol in two styles
        assert drawn[able] == drawn[0]


def dark_share(image: Image.Image) -> float:
    return float((np.asarray(image).mean(axis=2) < 128).mean())


def test_every_image_shows_its_character(faces: dict[str, Face], alphabet: list[str], monkeypatch: pytest.MonkeyPatch):
    for character in alphabet[::6]:
        for image in glyphs.images(character, faces, seed=0, count=4):
            assert 0.02 < dark_share(image) < 0.6
            assert np.percentile(np.asarray(image).mean(axis=2), 75) > 145  # the background is light
    monkeypatch.setattr(glyphs, "place", lambda *_: Image.new("L", (48, 48)))
    blank = [dark_share(image) for image in glyphs.images("A", faces, seed=0, count=16)]
    assert max(blank) == 0  # control: without ink, no pixel is dark


def tilt(mask: Image.Image) -> float:
    """Return the angle in degrees between the vertical and the direction in which the ink extends most."""
    rows, columns = np.nonzero(ink(mask))
    x, y = np.linalg.eigh(np.cov(columns, rows))[1][:, 1]
    return float(np.degrees(np.arctan(x / y)))


def test_characters_stay_inside_and_nearly_upright(faces: dict[str, Face]):
    bar = faces["DejaVuSans"]  # its l is an upright rectangle
    tilts = []
    for number in range(200):
        mask = glyphs.place("l", bar, glyphs.random_state(number))
        assert mask.size == (glyphs.SIZE, glyphs.SIZE)
        left, top, right, bottom = mask.getbbox()
        assert min(left, top) >= glyphs.MARGIN
        assert max(right, bottom) <= glyphs.SIZE - glyphs.MARGIN
        assert glyphs.MIN_GLYPH - 1 <= max(right - left, bottom - top) <= glyphs.MAX_GLYPH
        tilts.append(tilt(mask))
    assert -20.5 < min(tilts) < -17
    assert 17 < max(tilts) < 20.5


def test_positions_and_sizes_vary(faces: dict[str, Face]):
    boxes = np.array([glyphs.place("A", faces["DejaVuSans"], glyphs.random_state(n)).getbbox() for n in range(200)])
    left, top, right, bottom = boxes.T
    assert left.min() == top.min() == glyphs.MARGIN
    assert right.max() == bottom.max() == glyphs.SIZE - glyphs.MARGIN
    sides = np.maximum(right - left, bottom - top)
    assert (sides.min(), sides.max()) == (glyphs.MIN_GLYPH, glyphs.MAX_GLYPH)
    assert abs((left + right).mean() / 2 - glyphs.SIZE / 2) < 1  # on average, in the middle
    assert abs((top + bottom).mean() / 2 - glyphs.SIZE / 2) < 1


def test_half_of_the_characters_have_thicker_strokes(faces: dict[str, Face], monkeypatch: pytest.MonkeyPatch):
    widths: Counter[int] = Counter()
    draw = Face.draw

    def count(face: Face, character: str, stroke_width: int) -> Image.Image:
        widths[stroke_width] += 1
        return draw(face, character, stroke_width)

    monkeypatch.setattr(Face, "draw", count)
    for number in range(200):
        glyphs.place("A", faces["DejaVuSans"], glyphs.random_state(number))
    assert widths.keys() == {0, 2, 3, 4}
    assert 80 < widths[0] < 120
    assert min(widths.values()) > 20


def test_four_kinds_of_backgrounds():
    kinds: Counter[str] = Counter()
    for number in range(200):
        weights = np.asarray(glyphs.pattern(glyphs.random_state(number)))
        values, share = set(weights.ravel().tolist()), (weights > 0).mean()
        if len(values) > 2:
            assert min(values) == 0
            assert max(values) == 102
            kinds["gradient"] += 1
        else:
            assert values in ({0}, {0, 102})
            kinds["flat" if share == 0 else "stripes" if share > 0.4 else "dots"] += 1
            assert share == 0 or 0.1 < share < 0.3 or 0.4 < share < 0.6
    assert kinds.keys() == {"flat", "gradient", "stripes", "dots"}
    assert min(kinds.values()) > 30


def test_rendered_once(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch):
    first = tiny(tmp_path)
    monkeypatch.setattr(glyphs, "_render", lambda *_: pytest.fail("rendered again"))
    assert tiny(tmp_path).fingerprint() == first.fingerprint()
    with pytest.raises(pytest.fail.Exception, match="rendered again"):  # control: other options are rendered
        tiny(tmp_path, per_class=2)


def test_an_interrupted_render_leaves_nothing(tmp_path: Path, quick: None):
    def interrupt(done: int, total: int) -> None:
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny(tmp_path, progress=interrupt)
    assert not list(tmp_path.iterdir())
    assert len(tiny(tmp_path)) == 15


def test_two_processes_render_at_once(tmp_path: Path, quick: None):
    others: list[Catalog] = []

    def meanwhile(done: int, total: int) -> None:
        if done == 7:
            others.append(tiny(tmp_path))

    mine = tiny(tmp_path, progress=meanwhile)
    assert len(mine) == len(others[0]) == 15
    assert content(mine) == content(others[0])
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_cache_is_reported(tmp_path: Path, quick: None):
    catalog = tiny(tmp_path)
    catalog.file(4).unlink()
    with pytest.raises(DataError, match=r"should contain 15 images but contains 14. Delete it"):
        tiny(tmp_path)


@pytest.mark.parametrize("options", [{"classes": 1}, {"per_class": 0}, {"classes": 100_000}])
def test_impossible_sizes(tmp_path: Path, quick: None, options: dict[str, int]):
    with pytest.raises(DataError, match="glyphs"):
        tiny(tmp_path, **options)
    assert not [entry for entry in tmp_path.iterdir() if not entry.name.startswith(".")]


def test_missing_fonts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("matplotlib.get_data_path", lambda: str(tmp_path))
    with pytest.raises(DataError, match=r"do not include DejaVuSans.ttf"):
        tiny(tmp_path)

"""The generated benchmark: shapes, reproducibility, and the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFont

from shortlist.data.benchmarks import glyph_outlines, glyphs
from shortlist.data.benchmarks.glyph_outlines import (
    UNITS,
    Face,
    bounds,
    dilate,
    distinct_characters,
    fill,
    font_files,
    open_faces,
)
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError

FONTS = "3cd0a79b"  # digest of the fonts of matplotlib 3.8 to 3.11; other fonts give other pixels


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


def winding_number(edges: np.ndarray, x: float, y: float) -> int:
    """Return the winding number of a point: the literal definition, one edge at a time."""
    turns = 0
    for (x0, y0), (x1, y1) in edges.tolist():
        if (y0 <= y) != (y1 <= y) and x0 + (y - y0) * (x1 - x0) / (y1 - y0) < x:
            turns += 1 if y1 > y0 else -1
    return turns


def square(low: int, high: int, *, reverse: bool = False) -> np.ndarray:
    corners = np.array([(low, low), (high, low), (high, high), (low, high)]) * UNITS
    corners = corners[::-1] if reverse else corners
    return np.stack((corners, np.roll(corners, -1, axis=0)), axis=1)


def test_fill_follows_the_winding_rule():
    for seed in range(5):
        points = np.random.default_rng(seed).integers(0, 20 * UNITS, (9, 2))  # intersects itself
        edges = np.stack((points, np.roll(points, -1, axis=0)), axis=1)
        middles = (np.arange(20) + 0.5) * UNITS
        expected = [[winding_number(edges, x - 0.01, y) != 0 for x in middles] for y in middles]
        filled = fill(edges, 20)
        assert (filled != expected).sum() <= 1  # a crossing very close to the centre of a sample
        assert filled.any()


def test_counters_are_holes_and_overlaps_are_not():
    assert fill(square(2, 10), 12).sum() == 64
    hole = fill(np.concatenate((square(2, 10), square(4, 8, reverse=True))), 12)
    assert hole.sum() == 64 - 16
    assert not hole[5, 5]
    assert fill(np.concatenate((square(2, 10), square(4, 8))), 12).sum() == 64


def test_dilation_is_round():
    mask = np.zeros((21, 21), dtype=bool)
    mask[10, 10] = True
    octagon = dilate(mask, 6)
    assert octagon[10, 4:17].all()
    assert octagon[10].sum() == octagon[:, 10].sum() == 13
    assert not octagon[4, 4]  # a square would include it
    assert octagon[7, 7]
    assert (octagon == octagon[::-1]).all()
    assert (octagon == octagon.T).all()


@pytest.mark.parametrize("name", ["DejaVuSans-Bold", "DejaVuSerif-Italic", "STIXGeneral"])
def test_outlines_match_freetype(faces: dict[str, Face], name: str):
    file = next(file for file in font_files() if file.stem == name)
    font = ImageFont.truetype(file, 300, layout_engine=ImageFont.Layout.BASIC)
    for character in "AB8g€Жøi":
        mask = font.getmask(character, mode="L")
        drawn = np.asarray(mask).reshape(mask.size[::-1]) >= 128
        rows, columns = np.flatnonzero(drawn.any(axis=1)), np.flatnonzero(drawn.any(axis=0))
        drawn = drawn[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        outline = faces[name].outline(character)
        low, high = bounds(outline)
        scale = drawn.shape[0] / (high - low)[1]
        ours = fill(np.rint((outline - low) * scale * UNITS).astype(np.int64), 512)
        ours = ours[: drawn.shape[0], : drawn.shape[1]]
        assert (ours != drawn).sum() < 0.08 * drawn.sum(), character  # FreeType applies hinting
        if character in "B€":  # control: the mirrored character does not match
            assert (ours != drawn[:, ::-1]).sum() > 0.08 * drawn.sum()


def test_hundreds_of_distinct_characters(faces: dict[str, Face], alphabet: list[str]):
    assert len(alphabet) == len(set(alphabet)) >= 300
    for name in ("DejaVuSans", "STIXGeneral"):
        shared = [one for one in alphabet if ord(one) in faces[name].characters]
        overlap = overlaps(faces[name], shared)
        assert overlap[~np.eye(len(shared), dtype=bool)].max() < 0.95


def overlaps(face: Face, characters: list[str]) -> np.ndarray:
    """Return the intersection over union of every pair of shapes at the same size."""
    ink = glyph_outlines._shapes(face, characters)[0].reshape(len(characters), -1).astype(float)
    both = ink @ ink.T
    return both / (ink.sum(axis=1)[:, None] + ink.sum(axis=1) - both)


@pytest.mark.parametrize("pair", ["A\u0391", "A\u0410", "Oo", "Cc", "Xx", "Zz"])
def test_only_one_of_two_similar_characters_is_kept(alphabet: list[str], pair: str):
    assert pair[0] in alphabet
    assert pair[1] not in alphabet


def test_the_overlap_detects_similar_characters(faces: dict[str, Face]):
    assert overlaps(faces["DejaVuSans"], ["A", "\u0391"])[0, 1] > 0.95  # control of the two tests above
    assert overlaps(faces["DejaVuSans"], ["A", "B"])[0, 1] < 0.5


def test_no_bars_and_no_accents(alphabet: list[str]):
    assert not set("Il|i\u00c4\u00e9\u00f1").intersection(alphabet)


def test_pixels_are_pinned(tmp_path: Path, quick: None, faces: dict[str, Face], alphabet: list[str]):
    if glyph_outlines.fonts_digest() != FONTS:
        pytest.skip("the installed fonts of matplotlib are not those of PyPI, so the pixels differ")
    digest = hashlib.sha256("".join(alphabet).encode())
    assert digest.hexdigest()[:16] == "ba0c7d529e21630f"
    pixels = b"".join(image.tobytes() for one in "AB\u20ac" for image in glyphs.images(one, faces, seed=0, count=4))
    assert hashlib.sha256(pixels).hexdigest()[:16] == "060ec60b52c104df"
    assert content(tiny(tmp_path))[:16] == "c37acea534a38a01"


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


def test_more_classes_and_images_extend_the_first_ones(faces: dict[str, Face], alphabet: list[str]):
    few, many = (glyphs.images("R", faces, seed=3, count=count) for count in (2, 4))
    assert all(np.array_equal(a, b) for a, b in zip(few, many, strict=False))
    assert not np.array_equal(many[2], many[3])
    small, large = (glyphs.choose_characters(alphabet, 3, classes) for classes in (10, 20))
    assert list(small) == list(large)[:10]


def test_each_image_has_another_font(faces: dict[str, Face], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(glyphs, "render", lambda outline, random: outline.tobytes())
    for character in "A\u20a3":
        able = sum(ord(character) in face.characters for face in faces.values())
        assert able >= 12
        drawn = glyphs.images(character, faces, seed=0, count=able + 1)
        assert len(set(drawn[:able])) >= able - 1  # STIX may use one drawing of a symbol in two styles
        assert drawn[able] == drawn[0]


def dark_share(image: np.ndarray) -> float:
    return float((image.mean(axis=2) < 128).mean())


def test_every_image_shows_its_character(faces: dict[str, Face], alphabet: list[str], monkeypatch: pytest.MonkeyPatch):
    for character in alphabet[::6]:
        for image in glyphs.images(character, faces, seed=0, count=4):
            assert 0.02 < dark_share(image) < 0.6
            assert np.percentile(image.mean(axis=2), 75) > 145  # the background is light
    monkeypatch.setattr(glyphs, "stroke", lambda mask, random: np.zeros_like(mask))
    blank = [dark_share(image) for image in glyphs.images("A", faces, seed=0, count=16)]
    assert max(blank) == 0  # control: without ink, no pixel is dark


def test_characters_stay_inside_and_nearly_upright(faces: dict[str, Face]):
    bar = faces["DejaVuSans"].outline("l")  # an upright rectangle
    steepest = []
    for number in range(200):
        edges = glyphs.place(bar, glyphs.random_state(number))
        pixels = edges / (glyphs.SAMPLES * UNITS)
        assert pixels.min() > glyphs.MARGIN - 0.01
        assert pixels.max() < glyphs.SIZE - glyphs.MARGIN + 0.01
        assert glyphs.MIN_GLYPH - 0.1 < np.ptp(pixels, axis=(0, 1)).max() < glyphs.MAX_GLYPH + 0.1
        dx, dy = max((edges[:, 1] - edges[:, 0]).tolist(), key=lambda edge: abs(edge[1]))
        steepest.append(abs(np.degrees(np.arctan2(dx, abs(dy)))))
    assert 17 < max(steepest) < 20.5


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

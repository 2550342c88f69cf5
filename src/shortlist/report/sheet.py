"""A contact sheet: pictures that were searched with, and what a gallery found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from shortlist.data import ImageError, load_image
from shortlist.extras import extra
from shortlist.files import atomic_replace
from shortlist.gallery import Hit

with extra("report", "A contact sheet"):
    from matplotlib import get_data_path

THUMB, GAP, MARGIN, LINE = 144, 14, 28, 17
INK, PAPER, GREY, RULE, HOLE = "#1c1c1e", "#ffffff", "#6b6b70", "#d0d0d4", "#f0f0f2"
ACROSS = 5  # results in a line
Font = ImageFont.FreeTypeFont


def draw_hits(found: Sequence[tuple[Path, Sequence[Hit]]], path: Path | str, *, title: str = "") -> Path:
    """Write a PNG: each query at the left, and its results beside it with score, label and file name.

    Args:
        found: pictures, and what was found with each.
        path: of the PNG; its folder is made.
        title: above all of them.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    cell = THUMB + GAP
    tall = THUMB + 2 * LINE + GAP + 8
    across = max(1, min(ACROSS, max((len(hits) for _, hits in found), default=1)))
    lines = [max(1, -(-len(hits) // across)) for _, hits in found]
    header = MARGIN + (40 if title else 0)
    left = MARGIN + cell + MARGIN
    sheet = Image.new("RGB", (left + across * cell - GAP + MARGIN, header + sum(lines) * tall + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    if title:
        draw.text((MARGIN, 20), _fitting(draw, title, sheet.width - 2 * MARGIN, _font(20)), INK, _font(20))
    top = header
    for (query, hits), number in zip(found, lines, strict=True):
        _paste(sheet, query, (MARGIN, top))
        _caption(draw, (MARGIN, top), "query", query.name)
        draw.line((left - MARGIN + GAP // 2, top, left - MARGIN + GAP // 2, top + number * tall - 3 * GAP), RULE)
        for place, hit in enumerate(hits):
            corner = (left + place % across * cell, top + place // across * tall)
            _paste(sheet, hit.item.path, corner)
            label = "" if hit.item.label is None else f"  {hit.item.label}"
            _caption(draw, corner, f"{hit.score:.3f}{label}", hit.item.path.name)
        top += number * tall
    with atomic_replace(path) as temporary:
        sheet.save(temporary, format="PNG", optimize=True)
    return path


def _paste(sheet: Image.Image, file: Path, corner: tuple[int, int]) -> None:
    """The picture, as large as fits; an empty frame where its file has gone."""
    left, top = corner
    try:
        thumb = ImageOps.contain(load_image(file, at_least=THUMB), (THUMB, THUMB))
    except ImageError:
        draw = ImageDraw.Draw(sheet)
        draw.rectangle((left, top, left + THUMB - 1, top + THUMB - 1), fill=HOLE, outline=RULE)
        draw.text((left + THUMB // 2, top + THUMB // 2), "cannot be read", GREY, _font(13), anchor="mm")
        return
    sheet.paste(thumb, (left + (THUMB - thumb.width) // 2, top + (THUMB - thumb.height) // 2))


def _caption(draw: ImageDraw.ImageDraw, corner: tuple[int, int], first: str, second: str) -> None:
    left, top = corner[0], corner[1] + THUMB + 5
    draw.text((left, top), _fitting(draw, first, THUMB, _font(14)), INK, _font(14))
    draw.text((left, top + LINE), _fitting(draw, second, THUMB, _font(12)), GREY, _font(12))


def _fitting(draw: ImageDraw.ImageDraw, text: str, width: int, font: Font) -> str:
    """The text on one line, cut where it is too long; the end of a name often tells more, so the middle goes."""
    text = " ".join(text.split("\n"))
    shown, kept = text, len(text)
    while draw.textlength(shown, font) > width and kept > 2:
        kept -= 1
        shown = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
    return shown


def _font(size: int) -> Font:
    """DejaVu, which has the letters of more languages than Pillow's own."""
    return ImageFont.truetype(Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", size)

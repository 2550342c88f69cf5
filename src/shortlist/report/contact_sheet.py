"""Contact sheets: pictures of queries and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from shortlist.data import Catalog, ImageError, load_image
from shortlist.extras import extra
from shortlist.files import atomic_replace
from shortlist.gallery import Hit
from shortlist.ranking.ranker import Ranker
from shortlist.ranking.top_k import top_k

with extra("report", "A contact sheet"):
    from matplotlib import get_data_path

INK, PAPER, GREY, RULE, EMPTY = "#1c1c1e", "#ffffff", "#6b6b70", "#d0d0d4", "#f0f0f2"
CORRECT, WRONG = "#0072b2", "#d55e00"  # blue and vermilion: distinguishable with any colour vision, as are the marks
Corner = tuple[int, int]  # left, top
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class Column:
    """A ranking of images: its title, and the embeddings, (n, d)."""

    title: str
    embeddings: Tensor


def sample_queries(catalog: Catalog, number: int, seed: int = 0) -> list[int]:
    """Choose up to `number` random images of different classes that have a positive."""
    order = torch.randperm(len(catalog), generator=torch.Generator().manual_seed(seed)).tolist()
    sizes = dict(zip(catalog.classes().tolist(), catalog.class_sizes().tolist(), strict=True))
    chosen: dict[int, int] = {}
    for row in order:
        label = int(catalog.labels[row])
        if sizes[label] > 1:
            chosen.setdefault(label, row)
    return list(chosen.values())[:number]


def top_results(embeddings: Tensor, queries: Sequence[int], number: int) -> list[list[int]]:
    """Return the `number` most similar other images of each query, best first."""
    ranker = Ranker.leave_one_out(embeddings.float(), torch.tensor(queries, device=embeddings.device))
    return top_k(ranker, min(number, len(embeddings) - 1))[1].tolist()


def draw_rankings(
    catalog: Catalog, queries: Sequence[int], columns: Sequence[Column], path: Path, *, title: str, results: int = 8
) -> Path:
    """Draw the first results of queries in several rankings, with marks for correct and wrong results.

    Args:
        catalog: The images.
        queries: Rows of the catalog, one per line of the sheet.
        columns: The rankings, from left to right.
        path: PNG file to write.
        title: Title of the sheet.
        results: Number of results per query and ranking.

    Returns:
        `path`.
    """
    side, gap, margin, header = 64, 6, 18, 74
    cell = side + gap
    block = results * cell + 2 * margin
    first = margin + cell + 2 * margin  # left edge of the first column
    sheet = Image.new("RGB", (first + len(columns) * block, header + len(queries) * (cell + gap) + margin), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    draw.text((margin, 14), title, INK, ImageFont.load_default(18))
    draw.text((margin, 48), "query", GREY, font)
    for number, column in enumerate(columns):
        left = first + number * block
        draw.line((left - margin, 48, left - margin, sheet.height - margin), RULE)
        draw.text((left, 48), column.title, INK, font)
        for line, (query, found) in enumerate(
            zip(queries, top_results(column.embeddings, queries, results), strict=True)
        ):
            for rank, row in enumerate(found):
                corner = (left + rank * cell, header + line * (cell + gap))
                _paste(sheet, catalog.file(row), corner, side)
                _mark(draw, corner, side, bool(catalog.share_label([row], [query])[0]))
    for line, query in enumerate(queries):
        _paste(sheet, catalog.file(query), (margin, header + line * (cell + gap)), side)
    with atomic_replace(path) as temporary:
        sheet.save(temporary, format="PNG")
    return path


HIT_SIDE, HIT_GAP, HIT_MARGIN, TEXT_LINE = 144, 14, 28, 17
HITS_PER_LINE = 5


def draw_hits(
    found: Sequence[tuple[Path, Sequence[Hit]]], path: Path | str, *, title: str = "", min_score: float | None = None
) -> Path:
    """Draw the results of a search: each query at the left, and its hits with score, label and file name.

    Args:
        found: Image files used as queries, each with its hits.
        path: PNG file to write. Its folder is created.
        title: Title of the sheet.
        min_score: Hits with a lower score are greyed out.

    Returns:
        `path`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    cell, height = HIT_SIDE + HIT_GAP, HIT_SIDE + 3 * TEXT_LINE + HIT_GAP + 8
    columns = max(1, min(HITS_PER_LINE, max((len(hits) for _, hits in found), default=1)))
    lines = [max(1, -(-len(hits) // columns)) for _, hits in found]
    header = HIT_MARGIN + (40 if title else 0)
    left = HIT_MARGIN + cell + HIT_MARGIN
    size = (left + columns * cell - HIT_GAP + HIT_MARGIN, header + sum(lines) * height + HIT_MARGIN)
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    if title:
        draw.text((HIT_MARGIN, 20), _shorten(draw, title, sheet.width - 2 * HIT_MARGIN, _font(20)), INK, _font(20))
    top = header
    for (query, hits), number in zip(found, lines, strict=True):
        _paste(sheet, query, (HIT_MARGIN, top), HIT_SIDE)
        _caption(draw, (HIT_MARGIN, top), "query", query.name)
        rule = left - HIT_MARGIN + HIT_GAP // 2
        draw.line((rule, top, rule, top + number * height - 3 * HIT_GAP), RULE)
        for rank, hit in enumerate(hits):
            corner = (left + rank % columns * cell, top + rank // columns * height)
            _paste(sheet, hit.item.path, corner, HIT_SIDE)
            weak = min_score is not None and hit.score < min_score
            if weak:
                _fade(sheet, corner, HIT_SIDE)
            _caption(draw, corner, f"{hit.score:.3f}{' (weak)' if weak else ''}", hit.item.label, hit.item.path.name)
        top += number * height
    with atomic_replace(path) as temporary:
        sheet.save(temporary, format="PNG", optimize=True)
    return path


def _paste(sheet: Image.Image, file: Path, corner: Corner, side: int) -> None:
    """Paste an image, scaled to fit into a square; an empty frame if the file cannot be read."""
    left, top = corner
    try:
        image = ImageOps.contain(load_image(file, at_least=side), (side, side))
    except ImageError:
        draw = ImageDraw.Draw(sheet)
        draw.rectangle((left, top, left + side - 1, top + side - 1), fill=EMPTY, outline=RULE)
        draw.text((left + side // 2, top + side // 2), "cannot be read", GREY, _font(13), anchor="mm")
        return
    sheet.paste(image, (left + (side - image.width) // 2, top + (side - image.height) // 2))


def _fade(sheet: Image.Image, corner: Corner, side: int) -> None:
    """Grey out a square."""
    box = (*corner, corner[0] + side, corner[1] + side)
    grey = ImageOps.grayscale(sheet.crop(box)).convert("RGB")
    sheet.paste(Image.blend(grey, Image.new("RGB", grey.size, PAPER), 0.6), box)


def _mark(draw: ImageDraw.ImageDraw, corner: Corner, side: int, correct: bool) -> None:
    """Draw a frame with a tick or a cross."""
    left, top = corner
    colour = CORRECT if correct else WRONG
    draw.rectangle((left - 1, top - 1, left + side, top + side), outline=colour, width=3)
    x, y = left + side - 15, top + side - 15
    draw.rectangle((x, y, x + 15, y + 15), fill=colour)
    if correct:
        draw.line((x + 3, y + 8, x + 6, y + 12, x + 12, y + 4), PAPER, 2)
    else:
        draw.line((x + 4, y + 4, x + 11, y + 11), PAPER, 2)
        draw.line((x + 11, y + 4, x + 4, y + 11), PAPER, 2)


def _caption(draw: ImageDraw.ImageDraw, corner: Corner, first: str, *others: str | None) -> None:
    """Write lines of text below an image, the first one larger. None is omitted."""
    left, top = corner[0], corner[1] + HIT_SIDE + 5
    draw.text((left, top), _shorten(draw, first, HIT_SIDE, _font(14)), INK, _font(14))
    for number, text in enumerate((text for text in others if text is not None), 1):
        draw.text((left, top + number * TEXT_LINE), _shorten(draw, text, HIT_SIDE, _font(12)), GREY, _font(12))


def _shorten(draw: ImageDraw.ImageDraw, text: str, width: int, font: Font) -> str:
    """Return the text on one line. The middle of a long text is omitted, because the end of a name is informative."""
    text = " ".join(text.split("\n"))
    shown, kept = text, len(text)
    while draw.textlength(shown, font) > width and kept > 2:
        kept -= 1
        shown = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
    return shown


def _font(size: int) -> Font:
    """Return DejaVu of matplotlib, which supports more scripts than the default font of Pillow."""
    return ImageFont.truetype(Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", size)

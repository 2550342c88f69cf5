"""Pictures of queries with their first results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from shortlist.data import Catalog, load_image
from shortlist.files import atomic_replace

THUMB, GAP, MARGIN = 64, 6, 18
INK, PAPER, GREY = "#1c1c1e", "#ffffff", "#6b6b70"
RIGHT, WRONG = "#0072b2", "#d55e00"  # blue and vermilion, which colour-blind people tell apart; the marks say it too


@dataclass(frozen=True)
class Column:
    """One ranking of the same images: what to call it, and the embeddings, (n, d)."""

    title: str
    embeddings: Tensor


def sample_queries(catalog: Catalog, number: int, seed: int = 0) -> list[int]:
    """Random images of different classes that have something to find; fewer if there are fewer classes."""
    order = torch.randperm(len(catalog), generator=torch.Generator().manual_seed(seed)).tolist()
    sizes = dict(zip(catalog.classes().tolist(), catalog.class_sizes().tolist(), strict=True))
    chosen: dict[int, int] = {}
    for index in order:
        label = int(catalog.labels[index])
        if sizes[label] > 1:
            chosen.setdefault(label, index)
    return list(chosen.values())[:number]


def top_results(embeddings: Tensor, queries: Sequence[int], number: int) -> list[list[int]]:
    """The most similar other images of each query, the best first."""
    similarities = embeddings[list(queries)] @ embeddings.T
    similarities[torch.arange(len(queries)), torch.tensor(queries)] = -torch.inf
    return similarities.topk(min(number, len(embeddings) - 1)).indices.tolist()


def draw_results(
    catalog: Catalog, queries: Sequence[int], columns: Sequence[Column], path: Path, *, title: str, results: int = 8
) -> Path:
    """Write a picture: a row for each query, and its first results in each column, right and wrong ones marked."""
    found = [top_results(column.embeddings, queries, results) for column in columns]
    cell = THUMB + GAP
    block = results * cell + 2 * MARGIN
    first = MARGIN + cell + 2 * MARGIN  # where the first column begins
    header = 74
    sheet = Image.new("RGB", (first + len(columns) * block, header + len(queries) * (cell + GAP) + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, 14), title, INK, _font(18))
    draw.text((MARGIN, 48), "query", GREY, _font(14))
    for number, (column, rows) in enumerate(zip(columns, found, strict=True)):
        left = first + number * block
        draw.line((left - MARGIN, 48, left - MARGIN, sheet.height - MARGIN), "#d0d0d4")
        draw.text((left, 48), column.title, INK, _font(14))
        for row, (query, answers) in enumerate(zip(queries, rows, strict=True)):
            for place, answer in enumerate(answers):
                right = catalog.labels[answer] == catalog.labels[query]
                corner = (left + place * cell, header + row * (cell + GAP))
                _paste(sheet, catalog.file(answer), corner)
                _mark(draw, corner, bool(right))
    for row, query in enumerate(queries):
        _paste(sheet, catalog.file(query), (MARGIN, header + row * (cell + GAP)))
    with atomic_replace(path) as temporary:
        sheet.save(temporary, format="PNG")
    return path


def _paste(sheet: Image.Image, file: Path, corner: tuple[int, int]) -> None:
    thumb = ImageOps.contain(load_image(file, at_least=THUMB), (THUMB, THUMB))
    sheet.paste(thumb, (corner[0] + (THUMB - thumb.width) // 2, corner[1] + (THUMB - thumb.height) // 2))


def _mark(draw: ImageDraw.ImageDraw, corner: tuple[int, int], right: bool) -> None:
    """A frame with a tick, or with a cross."""
    left, top = corner
    colour = RIGHT if right else WRONG
    draw.rectangle((left - 1, top - 1, left + THUMB, top + THUMB), outline=colour, width=3)
    x, y = left + THUMB - 15, top + THUMB - 15
    draw.rectangle((x, y, x + 15, y + 15), fill=colour)
    if right:
        draw.line((x + 3, y + 8, x + 6, y + 12, x + 12, y + 4), PAPER, 2)
    else:
        draw.line((x + 4, y + 4, x + 11, y + 11), PAPER, 2)
        draw.line((x + 11, y + 4, x + 4, y + 11), PAPER, 2)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)

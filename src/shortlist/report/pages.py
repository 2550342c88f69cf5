"""Common parts of the HTML pages: templates, thumbnails, and queries with their results.

A page is a single file that contains its style, script and pictures, and loads nothing from the network.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image, ImageOps
from torch import Tensor

from shortlist.data import Catalog, FitTransform, load_image
from shortlist.data.images import ImageError, load_crop
from shortlist.files import write_text_atomically
from shortlist.report.analysis import Analysis

THUMBNAIL_SIDE = 96  # pixels: sharp at the 72 CSS pixels of a page, and about 2 kB
_ORIGINAL_SIZE = FitTransform(sys.maxsize)


class Thumbnails:
    """The thumbnails of a page. Each image is stored once, however often it is shown."""

    def __init__(self) -> None:
        self._indices: dict[tuple[str, str], int | None] = {}
        self.images: list[str] = []  # WebP in base64

    def add(self, catalog: Catalog, row: int) -> int | None:
        """Return the index of an image's thumbnail; None if the image cannot be read."""
        key = str(catalog.file(row)), str(catalog.box(row))
        if key not in self._indices:
            self._indices[key] = self._encode(catalog, row)
        return self._indices[key]

    def _encode(self, catalog: Catalog, row: int) -> int | None:
        try:
            image = _thumbnail(catalog, row)
        except ImageError:
            return None
        content = io.BytesIO()
        image.save(content, format="WEBP", quality=72, method=4)
        self.images.append(base64.b64encode(content.getvalue()).decode("ascii"))
        return len(self.images) - 1


def _thumbnail(catalog: Catalog, row: int) -> Image.Image:
    """Return an image, or the part inside its box, with no side longer than `THUMBNAIL_SIDE`."""
    if catalog.box(row) is None:
        image = load_image(catalog.file(row), at_least=THUMBNAIL_SIDE)
    else:
        image = Image.fromarray(load_pixels(catalog, row).permute(1, 2, 0).numpy())
    return image if max(image.size) <= THUMBNAIL_SIDE else ImageOps.contain(image, (THUMBNAIL_SIDE, THUMBNAIL_SIDE))


def load_pixels(catalog: Catalog, row: int) -> Tensor:
    """Return the pixels of an image, or of the part inside its box, uint8 (3, height, width)."""
    return load_crop(catalog.file(row), _ORIGINAL_SIZE, Random(0), catalog.box(row))


@dataclass(frozen=True)
class Picture:
    """An image in a page.

    Args:
        thumbnail: Index of its thumbnail; None if the image cannot be read.
        name: Its class or, for judged queries, its path.
        path: Its path.
    """

    thumbnail: int | None
    name: str
    path: str

    @classmethod
    def of(cls, thumbnails: Thumbnails, catalog: Catalog, row: int) -> Picture:
        """Create a picture of row `row` of a catalog."""
        path = str(catalog.paths[row])
        name = path if catalog.judgements else ", ".join(catalog.label_names(row))
        return cls(thumbnails.add(catalog, row), name, path)


@dataclass(frozen=True)
class Result:
    """A result of a query."""

    picture: Picture
    correct: bool
    similarity: float


@dataclass(frozen=True)
class Ranking:
    """The first results of a query in one run.

    Args:
        run: Name of the run; empty if there is only one.
        first_rank: Rank of the first correct result.
        results: The results, best first.
    """

    run: str
    first_rank: int
    results: list[Result]


@dataclass(frozen=True)
class QueryCard:
    """A query and its results, with the groups that it belongs to."""

    picture: Picture
    num_positives: int
    groups: list[str]
    rankings: list[Ranking]


@dataclass(frozen=True)
class QueryBrowser:
    """Queries that a reader can filter by group and by class.

    Args:
        name: Name of the test.
        judged: Whether queries have judgements instead of classes.
        groups: Name, button text and number of queries of each group.
        cards: The queries.
    """

    name: str
    judged: bool
    groups: list[tuple[str, str, int]]
    cards: list[QueryCard]

    @property
    def classes(self) -> list[str]:
        """Names of the classes to choose from; none for judged queries."""
        return [] if self.judged else sorted({card.picture.name for card in self.cards})


def browse_queries(
    thumbnails: Thumbnails,
    catalog: Catalog,
    analyses: Mapping[str, Analysis],
    chosen: Mapping[str, Sequence[int]],
    labels: Mapping[str, str],
) -> QueryBrowser:
    """Collect queries and their results.

    Args:
        thumbnails: Thumbnails of the page.
        catalog: The images of the test.
        analyses: Analyses of the same queries by run; a single one needs no name.
        chosen: Indices of queries by group.
        labels: Button texts of groups, if they differ from the group's name.
    """
    groups: dict[int, list[str]] = {}
    for group, members in chosen.items():
        for query in members:
            groups.setdefault(query, []).append(group)
    first = next(iter(analyses.values()))
    cards = [
        QueryCard(
            Picture.of(thumbnails, catalog, int(first.queries[query])),
            int(first.num_positives[query]),
            names,
            [_ranking(thumbnails, catalog, analysis, query, run) for run, analysis in analyses.items()],
        )
        for query, names in groups.items()
    ]
    buttons = [(group, labels.get(group, group), len(members)) for group, members in chosen.items()]
    return QueryBrowser(catalog.name, bool(catalog.judgements), buttons, cards)


def _ranking(thumbnails: Thumbnails, catalog: Catalog, analysis: Analysis, query: int, run: str) -> Ranking:
    results = [
        Result(Picture.of(thumbnails, catalog, row), bool(correct), float(similarity))
        for row, correct, similarity in zip(
            analysis.results[query].tolist(), analysis.correct[query], analysis.similarities[query], strict=True
        )
        if row >= 0
    ]
    return Ranking(run, int(analysis.first_rank[query]), results)


def write_page(file: Path, template: str, thumbnails: Thumbnails, **context: Any) -> Path:
    """Render a template to a file.

    Args:
        file: The file. Its folder is created.
        template: Name of the template.
        thumbnails: The thumbnails that the page contains.
        context: Variables of the template.

    Returns:
        `file`.
    """
    page = render(template, pictures=thumbnails.images, **context)
    file.parent.mkdir(parents=True, exist_ok=True)
    # File names may contain bytes that are not valid text.
    write_text_atomically(file, page.encode("utf-8", "replace").decode("utf-8"))
    return file


def render(template: str, **context: Any) -> str:
    """Render a template of the folder `templates`; texts are escaped."""
    return _environment().get_template(template).render(**context)


@cache  # it keeps the compiled templates
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("shortlist.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"thousands": "{:,}".format, "percent": lambda share: f"{100 * share:.1f}"}
    return environment

"""The command `shortlist search`."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from shortlist.cli.app import AsJson, Model, app, print_untruncated
from shortlist.cli.galleries import Place
from shortlist.errors import ConfigError
from shortlist.progress import format_count

if TYPE_CHECKING:
    from shortlist.gallery import Hit


@app.command()
def search(
    place: Place,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files to use as queries.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Number of results per query.")] = 10,
    label: Annotated[str | None, typer.Option(help="Return only images with this label.")] = None,
    min_score: Annotated[
        float | None, typer.Option(min=-1, max=1, help="Minimum score of a result. Default: that of the gallery.")
    ] = None,
    sheet: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw a contact sheet of the results to this file.")
    ] = None,
    model: Model = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the result as CSV, one line per result.")] = False,
    as_json: AsJson = False,
) -> None:
    """Search a gallery for the images most similar to the given images.

    Results with a score below --min-score are marked as weak; --json and --csv omit them. The default is stored in the
    gallery, and the report of a run recommends a value.
    """
    from shortlist.files import check_writable
    from shortlist.gallery import Gallery

    if as_csv and as_json:
        raise ConfigError("--csv and --json cannot be combined: give one of them.")
    if sheet is not None:
        check_writable(sheet)
        from shortlist.report.contact_sheet import draw_hits  # fails before the search if an extra is missing
    gallery = Gallery.open(place, model)
    lowest = gallery.min_score if min_score is None else min_score
    found = list(zip(images, gallery.search(images, k, label=label, min_score=-1), strict=True))
    if label is not None and not any(hits for _, hits in found):
        raise gallery.unknown_label(label)
    if sheet is not None:
        title = f"{gallery.name}: the most similar of {format_count(len(gallery), 'images')}"
        draw_hits(found, sheet, title=title, min_score=lowest)
    similar = [(query, [hit for hit in hits if lowest is None or hit.score >= lowest]) for query, hits in found]
    if as_json:
        results = [{"query": str(query), "hits": [_hit_facts(hit) for hit in hits]} for query, hits in similar]
        facts = {"gallery": gallery.facts(), "min_score": lowest, "results": results}
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    elif as_csv:
        _print_csv(similar)
    else:
        for (query, hits), (_, enough) in zip(found, similar, strict=True):
            _print_hits(query, hits, len(enough))
        if found != similar:
            print(f"(weak): below the minimum score {lowest:g}, which --min-score overrides.")
        if sheet is not None:
            print(f"The contact sheet is {sheet}.")
    gallery.close()


def _hit_facts(hit: Hit) -> dict[str, object]:
    from shortlist.locations import as_url

    item = hit.item
    return {
        "id": item.id,
        "score": hit.score,
        "label": item.label,
        "labels": list(item.labels),
        "path": as_url(item.path),
        "fields": dict(item.fields),
    }


def _print_csv(found: list[tuple[Path, list[Hit]]]) -> None:
    from shortlist.locations import as_url

    fields = list(dict.fromkeys(name for _, hits in found for hit in hits for name in hit.item.fields))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["query", "rank", "id", "score", "label", "path", *fields])
    for query, hits in found:
        for rank, hit in enumerate(hits, start=1):
            item = hit.item
            values = (query, rank, item.id, f"{hit.score:.6f}", item.label, as_url(item.path))
            writer.writerow([*values, *(item.fields.get(name) for name in fields)])


def _print_hits(query: Path, hits: list[Hit], enough: int) -> None:
    """Print the hits of a query. All but the first `enough` hits are marked as weak."""
    from shortlist.locations import as_url

    remark = "" if enough else " nothing similar enough" if hits else " the gallery is empty"
    print(f"{query}:{remark}")
    fields = list(dict.fromkeys(name for hit in hits for name in hit.item.fields))
    table = Table("", "score", "label", "image", *fields, box=None)
    for rank, hit in enumerate(hits, start=1):
        score = f"{hit.score:.4f}{' (weak)' if rank > enough else ''}"
        values = (str(hit.item.fields.get(name) or "") for name in fields)
        table.add_row(str(rank), score, hit.item.label or "-", as_url(_relative(hit.item.path)), *values)
    print_untruncated(table)


def _relative(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

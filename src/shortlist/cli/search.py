"""Embed images, make galleries of them, and search those."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shortlist.cli.app import AsJson, AsJsonWithProgress, Root, app, quiet_milvus
from shortlist.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from shortlist.gallery import Added, Gallery, Hit
    from shortlist.progress import Display

Run = Annotated[Path, typer.Argument(help="A finished run's folder.")]
Images = Annotated[
    str,
    typer.Argument(
        help="A folder of images, with a sub-folder a class or without; a .csv or .parquet file; an image; or a "
        "benchmark's name."
    ),
]
Place = Annotated[
    str,
    typer.Argument(
        metavar="GALLERY",
        callback=quiet_milvus,
        help="A folder, or a Milvus collection: milvus:FILE.db or http://HOST:19530/COLLECTION.",
    ),
]
Split = Annotated[str | None, typer.Option(help="Only train, validation or test, where the images have splits.")]
Workers = Annotated[int | None, typer.Option(min=0, help="Processes that decode. Default: by cores and images.")]
Model = Annotated[
    Path | None, typer.Option(metavar="RUN", help="The same model from another folder, where it has been moved.")
]

gallery_app = typer.Typer(help="Look at a gallery, add to it, remove from it.", no_args_is_help=True)
app.add_typer(gallery_app, name="gallery")


@app.command()
def embed(
    run: Run,
    images: Images,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.parquet", help="Where to write.")],
    root: Root = None,
    split: Split = None,
    workers: Workers = None,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Write path, label and vector of every image into a Parquet file.

    Run again, it embeds what is new or has changed and drops what is gone; killed, it goes on where it was.
    """
    from shortlist.data import open_collection
    from shortlist.data.loader import decoding_workers
    from shortlist.encoding.parquet import embed_to_table
    from shortlist.progress import display_for
    from shortlist.training import open_encoder

    display = display_for(sys.stderr, as_json=as_json)
    catalog = open_collection(images, root=root, split=split)
    encoder = open_encoder(run)
    workers = decoding_workers(len(catalog)) if workers is None else workers
    done = embed_to_table(encoder, catalog, out, workers=workers, display=display)
    _say_unreadable(display, done.unreadable)
    text = f"{out}: images embedded: {done.embedded:,}, there already: {done.kept:,}, dropped: {done.dropped:,}"
    _say_result(display, as_json, f"{text}, unreadable: {len(done.unreadable):,}.", dataclasses.asdict(done))


@app.command()
def index(
    run: Run,
    images: Images,
    out: Annotated[
        str,
        typer.Option(
            "--out",
            "-o",
            metavar="GALLERY",
            callback=quiet_milvus,
            help="A folder, or a Milvus collection: milvus:FILE.db or http://HOST:19530/COLLECTION.",
        ),
    ],
    kind: Annotated[
        str,
        typer.Option(help="flat (exact), hnsw, ivfpq (both approximate), or auto: by the number of images and memory."),
    ] = "auto",
    root: Root = None,
    split: Split = None,
    workers: Workers = None,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Make a gallery of images, to be searched by images; if there is one already, add to it.

    What is in it and has not changed is not embedded again; killed half-way, the gallery is as it was, and the same
    command goes on. `shortlist gallery` adds and removes later.
    """
    from shortlist import gallery as galleries
    from shortlist.data import open_collection
    from shortlist.data.loader import decoding_workers
    from shortlist.progress import display_for
    from shortlist.training import open_encoder

    display = display_for(sys.stderr, as_json=as_json)
    catalog = open_collection(images, root=root, split=split)
    encoder = open_encoder(run)
    workers = decoding_workers(len(catalog)) if workers is None else workers
    gallery, added = galleries.index(encoder, catalog, out, model=run, kind=kind, workers=workers, display=display)
    _say_added(display, as_json, gallery, added)
    gallery.close()


@app.command()
def search(
    place: Place,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files to search with.")],
    k: Annotated[int, typer.Option("-k", min=1, help="How many to find for each.")] = 10,
    label: Annotated[str | None, typer.Option(help="Find only images of this label.")] = None,
    sheet: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw a contact sheet of what is found.")
    ] = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Find the images of a gallery that are most like an image."""
    from shortlist.gallery import Gallery

    if sheet is not None:
        from shortlist.report.contact_sheet import draw_hits  # fails before the search if an extra is missing
    gallery = Gallery.open(place, model)
    vectors = gallery.encoder.encode(images)
    found = list(zip(images, gallery.search_vectors(vectors, k, label=label), strict=True))
    if label is not None and not any(hits for _, hits in found):
        known = gallery.labels()
        hint = did_you_mean(label, known) if known else "and no labels at all"
        raise DataError(f"the gallery {gallery.name} has no image of the label {label!r}, {hint}")
    if sheet is not None:
        draw_hits(found, sheet, title=f"{gallery.name}: the most similar of {len(gallery):,} images")
    if as_json:
        results = [{"query": str(query), "hits": [_facts(hit) for hit in hits]} for query, hits in found]
        print(json.dumps({"gallery": gallery.facts(), "results": results}, indent=2, ensure_ascii=False))
    else:
        _print_hits(found)
        if sheet is not None:
            print(f"The contact sheet is {sheet}.")
    gallery.close()


@gallery_app.command("show")
def show_gallery(place: Place, as_json: AsJson = False) -> None:
    """Print what is in a gallery, and how it is searched."""
    from shortlist.gallery import Gallery

    gallery = Gallery.open(place)
    facts, labels = gallery.facts(), gallery.labels()
    gallery.close()
    if as_json:
        print(json.dumps({**facts, "labels": labels}, indent=2, ensure_ascii=False))
        return
    facts |= {"labels": f"{len(labels):,}", "images": f"{facts['images']:,}", "search": _how(facts)}
    table = Table(show_header=False, box=None, pad_edge=False)
    for name in ("name", "place", "images", "labels", "search", "dim", "fingerprint"):
        table.add_row(name, str(facts[name]))
    _print_whole(table)


@gallery_app.command()
def add(
    place: Place,
    images: Images,
    root: Root = None,
    split: Split = None,
    workers: Workers = None,
    model: Model = None,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Add images to a gallery with the model that it has; files that have changed since are embedded again."""
    from shortlist.data import open_collection
    from shortlist.data.loader import decoding_workers
    from shortlist.gallery import Gallery
    from shortlist.progress import display_for

    display = display_for(sys.stderr, as_json=as_json)
    catalog = open_collection(images, root=root, split=split)
    gallery = Gallery.open(place, model)
    workers = decoding_workers(len(catalog)) if workers is None else workers
    added = gallery.add(catalog, workers=workers, display=display)
    _say_added(display, as_json, gallery, added)
    gallery.close()


@gallery_app.command()
def remove(
    place: Place,
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Images, or folders with all that is in them.")
    ],
    as_json: AsJsonWithProgress = False,
) -> None:
    """Take images out of a gallery. Their files are left alone, and need not be there any more."""
    from shortlist.gallery import Gallery
    from shortlist.progress import display_for

    display, gallery = display_for(sys.stderr, as_json=as_json), Gallery.open(place)
    removed = gallery.remove(paths, display=display)
    left = len(gallery)
    text = f"Images removed: {removed:,}, left: {left:,}."
    _say_result(display, as_json, text, {"removed": removed, "images": left})
    gallery.close()


def _say_added(display: Display, as_json: bool, gallery: Gallery, added: Added) -> None:
    _say_unreadable(display, added.unreadable)
    facts = gallery.facts()
    text = f"Images added: {added.added:,}, there already: {added.unchanged:,}, unreadable: {len(added.unreadable):,}."
    text = f"{text} The gallery {facts['place']} has {facts['images']:,}; search is {_how(facts)}."
    _say_result(display, as_json, text, {**facts, **dataclasses.asdict(added)})


def _say_result(display: Display, as_json: bool, text: str, facts: dict[str, Any]) -> None:
    """A sentence to the error output, and with --json the facts to the standard output."""
    display.message(text, **facts)
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))


def _how(facts: dict[str, Any]) -> str:
    kind, recall = facts["kind"], facts["recall"]
    if kind == "flat":
        return "exact (flat)"
    if recall is None:
        return f"approximate ({kind}, whose recall is not measured)"
    queries = f"{recall['queries']:,} of its own images as queries"
    return f"approximate ({kind}, recall@{recall['at']} {100 * recall['recall']:.1f} %, measured with {queries})"


def _say_unreadable(display: Display, unreadable: list[str]) -> None:
    for path in unreadable:
        display.message(f"cannot be read: {path}", unreadable=path)


def _facts(hit: Hit) -> dict[str, object]:
    return {"id": hit.item.id, "score": hit.score, "label": hit.item.label, "path": str(hit.item.path)}


def _print_hits(found: list[tuple[Path, list[Hit]]]) -> None:
    for query, hits in found:
        print(f"{query}:" if hits else f"{query}: nothing found")
        table = Table("", "score", "label", "image", box=None)
        for place, hit in enumerate(hits, start=1):
            table.add_row(str(place), f"{hit.score:.4f}", hit.item.label or "-", str(_from_here(hit.item.path)))
        _print_whole(table)


def _from_here(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _print_whole(table: Table) -> None:
    """However narrow the terminal is, nothing is cut: paths are there to be copied."""
    Console(width=10**5, highlight=False, markup=False).print(table)

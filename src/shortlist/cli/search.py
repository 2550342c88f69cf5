"""The commands `shortlist embed`, `index`, `search` and `gallery`."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shortlist.cli.app import (
    AsJson,
    AsJsonWithProgress,
    LabelSeparator,
    Merge,
    Model,
    ModelCommand,
    ModelName,
    PartsFolder,
    Root,
    ShardOption,
    app,
    choose_parts,
    embedding_command,
    keep_freed_memory,
    quiet_milvus,
)
from shortlist.errors import ConfigError, DataError, did_you_mean
from shortlist.progress import format_count

if TYPE_CHECKING:
    from shortlist.data import Catalog
    from shortlist.encoding import Encoder, Shard
    from shortlist.gallery import Added, Gallery, Hit
    from shortlist.progress import Display

Images = Annotated[
    str,
    typer.Argument(
        help="Folder of images, with or without one sub-folder per class; .csv or .parquet file; image file; or "
        "name of a benchmark."
    ),
]
_PLACE: dict[str, Any] = {
    "metavar": "GALLERY",
    "callback": quiet_milvus,
    "help": "Folder of the gallery, or a Milvus collection: milvus:FILE.db or http://HOST:19530/COLLECTION; or its "
    "name, see `shortlist gallery switch`.",
}
Place = Annotated[str, typer.Argument(**_PLACE)]
MinScore = Annotated[
    float | None,
    typer.Option(min=-1, max=1, help="Minimum score of a result. Default: that of the gallery."),
]
Split = Annotated[str | None, typer.Option(help="Split to use: train, validation or test. Default: all images.")]
Workers = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Number of processes that decode images, at most 8 per core. Default: chosen by the number of cores and "
        "images.",
    ),
]

Prune = Annotated[
    bool,
    typer.Option("--prune", help="Remove images from the gallery that are no longer in the folder or table."),
]
Log = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Append one JSON object per changed image to this file.")
]

gallery_app = typer.Typer(
    help="Show or check a gallery, add or remove images, or rebuild it with another model.", no_args_is_help=True
)
app.add_typer(gallery_app, name="gallery")


@app.command(cls=ModelCommand)
@embedding_command
def embed(
    run: ModelName,
    images: Images,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.parquet", help="Parquet file to write.")],
    root: Root = None,
    split: Split = None,
    label_separator: LabelSeparator = None,
    workers: Workers = None,
    shard: ShardOption = None,
    merge: Merge = False,
    parts: PartsFolder = None,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Embed images, and write the path, label and vector of each image to a Parquet file.

    If the file exists, only new and changed images are embedded, and missing ones are dropped. If the command is
    interrupted, running it again resumes it.

    With torchrun, several processes embed the images. To use independent jobs, run each with --shard, and then run
    the command once with --merge.
    """
    from shortlist.data import open_collection
    from shortlist.encoding.parquet import embed_to_table
    from shortlist.files import check_writable
    from shortlist.progress import display_for
    from shortlist.training import open_encoder

    display = display_for(sys.stderr, as_json=as_json)
    check_writable(out)
    chosen, folder, merged = choose_parts(shard, merge, parts, out.with_name(f"{out.name}.parts"))
    catalog = open_collection(images, root=root, split=split, label_separator=label_separator)
    encoder = open_encoder(run)
    keep_freed_memory()
    if chosen is not None:
        _embed_shard(encoder, catalog, chosen, folder, workers, display, as_json)
        return
    done = embed_to_table(encoder, catalog, out, workers=workers, parts=merged, display=display)
    _report_unreadable(display, done.unreadable)
    text = f"{out}: images embedded: {done.embedded:,}, unchanged: {done.kept:,}, dropped: {done.dropped:,}"
    _report_result(display, as_json, f"{text}, unreadable: {len(done.unreadable):,}.", dataclasses.asdict(done))


@app.command(cls=ModelCommand)
@embedding_command
def index(
    run: ModelName,
    images: Images,
    out: Annotated[str, typer.Option("--out", "-o", **_PLACE)],
    kind: Annotated[
        str,
        typer.Option(
            help="Index type: flat (exact), hnsw or ivfpq (approximate), or auto (by number of images and memory)."
        ),
    ] = "auto",
    min_score: Annotated[
        float | None,
        typer.Option(
            min=-1,
            max=1,
            help="Minimum score of a result, stored in the gallery. Default: as recommended by the run's report.",
        ),
    ] = None,
    root: Root = None,
    split: Split = None,
    label_separator: LabelSeparator = None,
    workers: Workers = None,
    shard: ShardOption = None,
    merge: Merge = False,
    parts: PartsFolder = None,
    prune: Prune = False,
    log: Log = None,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Build a gallery of images that can be searched by image, or add images to an existing gallery.

    Images that the gallery already contains and that have not changed are not embedded again. If the command is
    interrupted, the gallery is unchanged, and running the command again resumes it. See also `shortlist gallery`.

    With torchrun, several processes embed the images. To use independent jobs, run each with --shard, and then run
    the command once with --merge.
    """
    from shortlist import gallery as galleries
    from shortlist.data import open_collection
    from shortlist.files import check_writable
    from shortlist.gallery.adding import whole_images
    from shortlist.gallery.milvus_address import is_milvus
    from shortlist.gallery.store import GALLERY_FILE
    from shortlist.gallery.switching import current_location
    from shortlist.progress import display_for
    from shortlist.training import RunFolder, open_encoder

    display = display_for(sys.stderr, as_json=as_json)
    chosen, folder, merged = choose_parts(
        shard, merge, parts, None if is_milvus(out) else Path(f"{out.rstrip('/')}.parts")
    )
    if not is_milvus(current := current_location(out)):
        check_writable(Path(current) / GALLERY_FILE)
    catalog = open_collection(images, root=root, split=split, label_separator=label_separator)
    encoder = open_encoder(run)
    keep_freed_memory()
    if chosen is not None:
        _embed_shard(encoder, whole_images(catalog), chosen, folder, workers, display, as_json)
        return
    gallery, added = galleries.index(
        encoder,
        catalog,
        out,
        model=run,
        kind=kind,
        workers=workers,
        parts=merged,
        prune=_pruned(catalog, images) if prune else None,
        min_score=min_score,
        default_min_score=None if min_score is not None else RunFolder(Path(run)).recommended_min_score(),
        log=log,
        display=display,
    )
    report_added(display, as_json, gallery, added)
    gallery.close()


@app.command()
def search(
    place: Place,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files to use as queries.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Number of results per query.")] = 10,
    label: Annotated[str | None, typer.Option(help="Return only images with this label.")] = None,
    min_score: MinScore = None,
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
        known = gallery.labels()
        hint = did_you_mean(label, known) if known else "and no labels at all"
        raise DataError(f"The gallery {gallery.name} has no image with the label {label!r}, {hint}")
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


@gallery_app.command("show")
def show_gallery(place: Place, as_json: AsJson = False) -> None:
    """Print the size, labels and index type of a gallery."""
    from shortlist.gallery import Gallery

    gallery = Gallery.open(place)
    facts, labels = gallery.facts(), gallery.labels()
    gallery.close()
    if as_json:
        print(json.dumps({**facts, "labels": labels}, indent=2, ensure_ascii=False))
        return
    facts["minimum score"] = "none" if facts["min_score"] is None else f"{facts['min_score']:g}"
    facts |= {"labels": f"{len(labels):,}", "images": f"{facts['images']:,}", "search": _search_type(facts)}
    table = Table(show_header=False, box=None, pad_edge=False)
    for name in ("name", "place", "images", "labels", "search", "minimum score", "dim", "fingerprint"):
        table.add_row(name, str(facts[name]))
    _print_untruncated(table)


@gallery_app.command("set")
def set_gallery(
    place: Place,
    min_score: Annotated[
        float, typer.Option(min=-1, max=1, help="Default minimum score of searches; -1 returns all results.")
    ],
) -> None:
    """Set the minimum score of a gallery. By default, searches omit results with a lower score."""
    from shortlist.gallery import Gallery

    gallery = Gallery.open(place)
    gallery.set_min_score(min_score)
    print(f"Searches of {gallery.name} leave out results with a score below {min_score:g}.")
    gallery.close()


@gallery_app.command("check")
def check_gallery(place: Place, as_json: AsJsonWithProgress = False) -> None:
    """Read all files of a gallery, and verify their digests. Exits with 1 if one is damaged."""
    from shortlist.gallery import Gallery
    from shortlist.progress import display_for

    found = Gallery.check(place, display=display_for(sys.stderr, as_json=as_json))
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "ok": found.ok}, indent=2, ensure_ascii=False))
    else:
        for problem in found.problems:
            print(f"damaged: {problem}")
        for name in found.unverified:
            print(f"not verified: {name} was written by an earlier version of shortlist, without a digest")
        problems = format_count(len(found.problems), "problems")
        print(f"{format_count(found.files, 'files')} and the model checked: {problems}")
    raise typer.Exit(0 if found.ok else 1)


@gallery_app.command()
@embedding_command
def add(
    place: Place,
    images: Images,
    root: Root = None,
    split: Split = None,
    label_separator: LabelSeparator = None,
    workers: Workers = None,
    model: Model = None,
    prune: Prune = False,
    log: Log = None,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Add images to a gallery. Files that have changed since they were added are embedded again."""
    from shortlist.data import open_collection
    from shortlist.gallery import Gallery
    from shortlist.progress import display_for

    display = display_for(sys.stderr, as_json=as_json)
    catalog = open_collection(images, root=root, split=split, label_separator=label_separator)
    gallery = Gallery.open(place, model)
    keep_freed_memory()
    pruned = _pruned(catalog, images) if prune else None
    added = gallery.add(catalog, workers=workers, prune=pruned, log=log, display=display)
    report_added(display, as_json, gallery, added)
    gallery.close()


@gallery_app.command()
def remove(
    place: Place,
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Image files, or folders with all images in them.")
    ],
    log: Log = None,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Remove images from a gallery. The image files are not touched, and need not exist."""
    from shortlist.gallery import Gallery
    from shortlist.progress import display_for

    display, gallery = display_for(sys.stderr, as_json=as_json), Gallery.open(place)
    removed = gallery.remove(paths, log=log, display=display)
    left = len(gallery)
    text = f"Images removed: {removed:,}, remaining: {left:,}."
    _report_result(display, as_json, text, {"removed": removed, "images": left})
    gallery.close()


def _pruned(catalog: Catalog, images: str) -> str:
    """Return the folder whose images are removed from the gallery if the source does not list them."""
    from shortlist.locations import absolute_path

    if len(catalog) == 1 and absolute_path(catalog.file(0)) == absolute_path(images):
        raise ConfigError("--prune is for folders and tables, not for a single image.")
    return absolute_path(catalog.root)


def _embed_shard(
    encoder: Encoder,
    catalog: Catalog,
    shard: Shard,
    folder: Path,
    workers: int | None,
    display: Display,
    as_json: bool,
) -> None:
    from shortlist.data.loader import decoding_workers
    from shortlist.distributed import current_processes
    from shortlist.encoding import Parts
    from shortlist.encoding.vector_file import read_note

    if workers is None:
        workers = decoding_workers(len(catalog) // shard.number, current_processes().on_this_machine)
    with display.task(f"embedding {catalog.name}, shard {shard}", "images") as progress:
        path = Parts(folder, encoder, catalog).embed(shard, workers=workers, progress=progress)
    note = read_note(path)
    _report_unreadable(display, note.left_out)
    facts = {"part": str(path), "embedded": note.rows, "unreadable": note.left_out}
    text = f"{path}: images embedded: {note.rows:,}, unreadable: {len(note.left_out):,}."
    _report_result(display, as_json, f"{text} When all shards are done, use --merge instead of --shard.", facts)


def report_added(display: Display, as_json: bool, gallery: Gallery, added: Added) -> None:
    """Print the numbers of added, replaced, unchanged and removed images, and describe the gallery."""
    _report_unreadable(display, added.unreadable)
    facts = gallery.facts()
    replaced = f", replaced: {added.replaced:,}" if added.replaced else ""
    removed = f", removed: {added.removed:,}" if added.removed else ""
    text = f"Images added: {added.added:,}{replaced}, unchanged: {added.unchanged:,}{removed}"
    text = f"{text}, unreadable: {len(added.unreadable):,}."
    images = format_count(facts["images"], "images")
    text = f"{text} The gallery {facts['place']} has {images}; search is {_search_type(facts)}."
    _report_result(display, as_json, text, {**facts, **dataclasses.asdict(added)})


def _report_result(display: Display, as_json: bool, text: str, facts: dict[str, Any]) -> None:
    """Print a message to stderr and, with --json, the facts to stdout."""
    display.message(text, **facts)
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))


def _search_type(facts: dict[str, Any]) -> str:
    kind, recall = facts["kind"], facts["recall"]
    if kind == "flat":
        return "exact (flat)"
    if recall is None:
        return f"approximate ({kind}, recall not measured)"
    queries = f"{recall['queries']:,} of its own images as queries"
    return f"approximate ({kind}, recall@{recall['at']} {100 * recall['recall']:.1f} %, measured with {queries})"


def _report_unreadable(display: Display, unreadable: dict[str, str]) -> None:
    for path, reason in unreadable.items():
        display.message(f"unreadable: {path}: {reason}", unreadable=path, reason=reason)


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

    remark = "" if enough else " nothing similar enough" if hits else " nothing found"
    print(f"{query}:{remark}")
    fields = list(dict.fromkeys(name for hit in hits for name in hit.item.fields))
    table = Table("", "score", "label", "image", *fields, box=None)
    for rank, hit in enumerate(hits, start=1):
        score = f"{hit.score:.4f}{' (weak)' if rank > enough else ''}"
        values = (str(hit.item.fields.get(name) or "") for name in fields)
        table.add_row(str(rank), score, hit.item.label or "-", as_url(_relative(hit.item.path)), *values)
    _print_untruncated(table)


def _relative(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _print_untruncated(table: Table) -> None:
    """Print a table without truncating it to the width of the terminal, so that paths can be copied."""
    Console(width=10**5, highlight=False, markup=False).print(table)

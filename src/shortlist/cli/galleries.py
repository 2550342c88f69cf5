"""The commands `shortlist index` and `gallery`."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from contextlib import closing, suppress
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
    embedding_command,
    keep_freed_memory,
    quiet_milvus,
)
from shortlist.errors import ConfigError
from shortlist.progress import format_count

if TYPE_CHECKING:
    from shortlist.encoding.shards import EmbeddedShard
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
        min=0, help="Number of processes that decode images. Default: chosen by the number of cores and images."
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
    from shortlist.encoding.shards import choose_parts, embed_shard
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
        part = embed_shard(encoder, catalog, chosen, folder, workers=workers, display=display)
        _report_shard(display, as_json, part)
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
    from shortlist.encoding.shards import choose_parts, embed_shard
    from shortlist.files import check_writable
    from shortlist.gallery.adding import folder_to_prune, whole_images
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
        part = embed_shard(encoder, whole_images(catalog), chosen, folder, workers=workers, display=display)
        _report_shard(display, as_json, part)
        return
    gallery, added = galleries.index(
        encoder,
        catalog,
        out,
        model=run,
        kind=kind,
        workers=workers,
        parts=merged,
        prune=folder_to_prune(catalog, images) if prune else None,
        log=log,
        display=display,
    )
    if min_score is None and gallery.min_score is None:
        min_score = RunFolder(Path(run)).recommended_min_score()
    if min_score is not None:
        gallery.set_min_score(min_score)
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


@gallery_app.command("show")
def show_gallery(place: Place, as_json: AsJson = False) -> None:
    """Print the size, labels and index type of a gallery."""
    from shortlist.gallery import Gallery

    gallery = Gallery.open(place)
    facts, labels, search_type = gallery.facts(), gallery.labels(), gallery.describe_index()
    gallery.close()
    if as_json:
        print(json.dumps({**facts, "labels": labels}, indent=2, ensure_ascii=False))
        return
    facts["minimum score"] = "none" if facts["min_score"] is None else f"{facts['min_score']:g}"
    facts |= {"labels": f"{len(labels):,}", "images": f"{facts['images']:,}", "search": search_type}
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
    from shortlist.gallery.adding import folder_to_prune
    from shortlist.progress import display_for

    display = display_for(sys.stderr, as_json=as_json)
    catalog = open_collection(images, root=root, split=split, label_separator=label_separator)
    gallery = Gallery.open(place, model)
    keep_freed_memory()
    pruned = folder_to_prune(catalog, images) if prune else None
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


@gallery_app.command()
@embedding_command
def rebuild(
    place: Place,
    model: Annotated[str, typer.Option(metavar="MODEL", help="Run or other model to embed with; see `index`.")],
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="NEW", callback=quiet_milvus, help="Folder or collection to write."),
    ],
    kind: Annotated[str | None, typer.Option(help="Index type, see `index`. Default: that of the gallery.")] = None,
    workers: Workers = None,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Embed all images of a gallery with another model, and write them to a new gallery.

    The gallery is not changed, and the images keep their ids and labels. If the command is interrupted, running it
    again resumes it. Running it again later applies the changes that were made to the gallery in the meantime.
    """
    from shortlist import gallery as galleries
    from shortlist.gallery.rebuilding import describe_min_score
    from shortlist.progress import display_for
    from shortlist.training import RunFolder, open_encoder

    display = display_for(sys.stderr, as_json=as_json)
    with closing(galleries.Gallery.open(place)) as gallery:
        encoder = open_encoder(model)
        keep_freed_memory()
        new, added = galleries.rebuild(gallery, encoder, out, model=model, kind=kind, workers=workers, display=display)
        before = gallery.min_score
    with closing(new):
        recommended = None if new.min_score is not None else RunFolder(Path(model)).recommended_min_score()
        if recommended is not None:
            new.set_min_score(recommended)
        report_added(display, as_json, new, added)
        if before is not None and new.min_score != before:
            display.message(describe_min_score(new, before, out), min_score=new.min_score, previous_min_score=before)


@gallery_app.command()
def switch(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="File that contains the current gallery.")],
    new: Annotated[
        str | None, typer.Argument(metavar="GALLERY", callback=quiet_milvus, help="Gallery to use from now on.")
    ] = None,
    back: Annotated[bool, typer.Option("--back", help="Use the previous gallery again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a name refer to another gallery. Servers that were started with the name load it within seconds.

    Until the new gallery and its model are loaded, they answer requests with the previous one. All commands accept the
    name in place of the gallery.
    """
    from shortlist import gallery as galleries
    from shortlist.gallery.rebuilding import describe_min_score

    if (new is None) != back:
        raise ConfigError("give either the gallery to switch to, or --back")
    before = None
    with suppress(galleries.GalleryError), closing(galleries.Gallery.open(name)) as gallery:
        before = gallery.min_score
    now = galleries.switch_back(name) if new is None else galleries.switch(name, new)
    if as_json:
        print(json.dumps({"name": str(name), **now.model_dump()}, indent=2))
    else:
        undo = "" if now.previous is None else f" To undo this: shortlist gallery switch {name} --back"
        print(f"{name} now refers to {now.gallery}.{undo}")
    if before is not None:
        with closing(galleries.Gallery.open(name)) as gallery:
            if gallery.min_score is None:
                print(describe_min_score(gallery, before, name), file=sys.stderr)


def _report_shard(display: Display, as_json: bool, part: EmbeddedShard) -> None:
    _report_unreadable(display, part.unreadable)
    text = f"{part.part}: images embedded: {part.embedded:,}, unreadable: {len(part.unreadable):,}."
    text = f"{text} When all shards are done, use --merge instead of --shard."
    _report_result(display, as_json, text, dataclasses.asdict(part))


def report_added(display: Display, as_json: bool, gallery: Gallery, added: Added) -> None:
    """Print the numbers of added, replaced, unchanged and removed images, and describe the gallery."""
    _report_unreadable(display, added.unreadable)
    facts = gallery.facts()
    replaced = f", replaced: {added.replaced:,}" if added.replaced else ""
    removed = f", removed: {added.removed:,}" if added.removed else ""
    text = f"Images added: {added.added:,}{replaced}, unchanged: {added.unchanged:,}{removed}"
    text = f"{text}, unreadable: {len(added.unreadable):,}."
    images = format_count(facts["images"], "images")
    text = f"{text} The gallery {facts['place']} has {images}; search is {gallery.describe_index()}."
    _report_result(display, as_json, text, {**facts, **dataclasses.asdict(added)})


def _report_result(display: Display, as_json: bool, text: str, facts: dict[str, Any]) -> None:
    """Print a message to stderr and, with --json, the facts to stdout."""
    display.message(text, **facts)
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))


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

"""The commands `shortlist index` and `gallery`."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
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
    print_untruncated,
    quiet_milvus,
)
from shortlist.cli.embedding import Images, Split, Workers, report_result, report_shard, report_unreadable
from shortlist.errors import ConfigError
from shortlist.progress import Display, display_for, format_count

if TYPE_CHECKING:
    from shortlist.gallery import Added, Gallery

_PLACE: dict[str, Any] = {
    "metavar": "GALLERY",
    "callback": quiet_milvus,
    "help": "Folder of the gallery, or a Milvus collection: milvus:FILE.db or http://HOST:19530/COLLECTION; or its "
    "name, see `shortlist gallery switch`.",
}
Place = Annotated[str, typer.Argument(**_PLACE)]
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
        report_shard(display, as_json, part)
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
        min_score=min_score,
        default_min_score=None if min_score is not None else RunFolder(Path(run)).recommended_min_score(),
        log=log,
        display=display,
    )
    _report_added(display, as_json, gallery, added)
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
    print_untruncated(table)


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

    found = Gallery.check(place, display=display_for(sys.stderr, as_json=as_json))
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "ok": found.ok}, indent=2, ensure_ascii=False))
    else:
        for problem in found.problems:
            print(f"damaged: {problem}")
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

    display = display_for(sys.stderr, as_json=as_json)
    catalog = open_collection(images, root=root, split=split, label_separator=label_separator)
    gallery = Gallery.open(place, model)
    keep_freed_memory()
    pruned = folder_to_prune(catalog, images) if prune else None
    added = gallery.add(catalog, workers=workers, prune=pruned, log=log, display=display)
    _report_added(display, as_json, gallery, added)
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

    display, gallery = display_for(sys.stderr, as_json=as_json), Gallery.open(place)
    removed = gallery.remove(paths, log=log, display=display)
    left = len(gallery)
    text = f"Images removed: {removed:,}, remaining: {left:,}."
    report_result(display, as_json, text, {"removed": removed, "images": left})
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
    from shortlist.training import RunFolder, open_encoder

    display = display_for(sys.stderr, as_json=as_json)
    with closing(galleries.Gallery.open(place)) as gallery:
        encoder = open_encoder(model)
        keep_freed_memory()
        new, added = galleries.rebuild(
            gallery,
            encoder,
            out,
            model=model,
            kind=kind,
            workers=workers,
            min_score=RunFolder(Path(model)).recommended_min_score(),
            display=display,
        )
        before = gallery.min_score
    with closing(new):
        _report_added(display, as_json, new, added)
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
        raise ConfigError("Give either the gallery to switch to, or --back.")
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


def _report_added(display: Display, as_json: bool, gallery: Gallery, added: Added) -> None:
    """Print the numbers of added, replaced, unchanged and removed images, and describe the gallery."""
    report_unreadable(display, added.unreadable)
    facts = gallery.facts()
    replaced = f", replaced: {added.replaced:,}" if added.replaced else ""
    removed = f", removed: {added.removed:,}" if added.removed else ""
    text = f"Images added: {added.added:,}{replaced}, unchanged: {added.unchanged:,}{removed}"
    text = f"{text}, unreadable: {len(added.unreadable):,}."
    images = format_count(facts["images"], "images")
    text = f"{text} The gallery {facts['place']} has {images}; search is {gallery.describe_index()}."
    report_result(display, as_json, text, {**facts, **dataclasses.asdict(added)})

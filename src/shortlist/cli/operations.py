"""The commands `shortlist gallery rebuild` and `shortlist gallery switch`, which replace a gallery in use."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shortlist.cli.app import AsJson, AsJsonWithProgress, embedding_command, keep_freed_memory, quiet_milvus
from shortlist.cli.search import Place, Workers, gallery_app, report_added
from shortlist.errors import ConfigError

if TYPE_CHECKING:
    from shortlist.gallery import Gallery


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
    from shortlist.progress import display_for
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
        report_added(display, as_json, new, added)
        if before is not None and new.min_score != before:
            display.message(_note_on_min_score(new, before, out), min_score=new.min_score, previous_min_score=before)


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
                print(_note_on_min_score(gallery, before, name), file=sys.stderr)


def _note_on_min_score(gallery: Gallery, before: float, place: Path | str) -> str:
    """Describe the minimum score of a gallery that replaces one with another minimum score."""
    if gallery.min_score is not None:
        now = f"The minimum score of {gallery.name} is {gallery.min_score:g}"
        return f"{now}; that of the previous gallery is {before:g}."
    return (
        f"{gallery.name} has no minimum score, so searches return all results. The previous gallery has {before:g}, "
        "but the scores of different models cannot be compared. To set one: "
        f"shortlist gallery set {shlex.quote(str(place))} --min-score SCORE"
    )

"""The command `shortlist embed`, and what it shares with the other commands that embed images."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shortlist.cli.app import (
    AsJsonWithProgress,
    LabelSeparator,
    Merge,
    ModelCommand,
    ModelName,
    PartsFolder,
    Root,
    ShardOption,
    app,
    embedding_command,
    keep_freed_memory,
)
from shortlist.progress import Display, display_for

if TYPE_CHECKING:
    from shortlist.encoding.shards import EmbeddedShard

Images = Annotated[
    str,
    typer.Argument(
        help="Folder of images, with or without one sub-folder per class; .csv or .parquet file; image file; or "
        "name of a benchmark."
    ),
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
    from shortlist.training import open_encoder

    display = display_for(sys.stderr, as_json=as_json)
    check_writable(out)
    chosen, folder, merged = choose_parts(shard, merge, parts, out.with_name(f"{out.name}.parts"))
    catalog = open_collection(images, root=root, split=split, label_separator=label_separator)
    encoder = open_encoder(run)
    keep_freed_memory()
    if chosen is not None:
        part = embed_shard(encoder, catalog, chosen, folder, workers=workers, display=display)
        report_shard(display, as_json, part)
        return
    done = embed_to_table(encoder, catalog, out, workers=workers, parts=merged, display=display)
    report_unreadable(display, done.unreadable)
    text = f"{out}: images embedded: {done.embedded:,}, unchanged: {done.kept:,}, dropped: {done.dropped:,}"
    report_result(display, as_json, f"{text}, unreadable: {len(done.unreadable):,}.", dataclasses.asdict(done))


def report_shard(display: Display, as_json: bool, part: EmbeddedShard) -> None:
    """Print the number of images of a shard that were embedded, and what to do next."""
    report_unreadable(display, part.unreadable)
    text = f"{part.part}: images embedded: {part.embedded:,}, unreadable: {len(part.unreadable):,}."
    text = f"{text} When all shards are done, use --merge instead of --shard."
    report_result(display, as_json, text, dataclasses.asdict(part))


def report_result(display: Display, as_json: bool, text: str, facts: dict[str, Any]) -> None:
    """Print a message to stderr and, with --json, the facts to stdout."""
    display.message(text, **facts)
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))


def report_unreadable(display: Display, unreadable: dict[str, str]) -> None:
    """Print the images that cannot be read, and the reasons."""
    for path, reason in unreadable.items():
        display.message(f"unreadable: {path}: {reason}", unreadable=path, reason=reason)

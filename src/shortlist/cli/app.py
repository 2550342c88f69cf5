"""The application object, and arguments and options that several commands share."""

from __future__ import annotations

import itertools
import json
import logging
import shlex
import sys
from collections.abc import Callable, Iterable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from typer.core import TyperCommand, TyperGroup

from shortlist.errors import DataError, shorten_list
from shortlist.launch import is_launched, launched

COMMANDS = (  # in the order in which --help lists them
    *("demo", "plan", "train", "evaluate", "report", "compare", "embed", "index", "search", "serve", "export"),
    *("data", "recipes", "gallery", "sweep", "ablate"),
)


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=COMMANDS.index)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept --import also after the name of the command."""
        found, rest = list[str](), list[str]()
        remaining = iter(args)
        for each in remaining:
            if each == "--import":
                found += [each, *itertools.islice(remaining, 1)]
            else:
                (found if each.startswith("--import=") else rest).append(each)
        return super().parse_args(ctx, [*found, *rest])


app = typer.Typer(
    cls=_Commands,
    help="Train image embeddings for retrieval by optimising recall@k, and evaluate, search and export them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class ModelCommand(TyperCommand):
    """Command whose first argument, the model, can also be given as --model MODEL."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for position, each in enumerate(args):
            if each.startswith("--model="):
                args = [each.removeprefix("--model="), *args[:position], *args[position + 1 :]]
                break
            if each == "--model" and len(args) > position + 1:
                args = [args[position + 1], *args[:position], *args[position + 2 :]]
                break
        return super().parse_args(ctx, args)


Recipe = Annotated[str, typer.Argument(help="Name of a packaged recipe, or a YAML file.")]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a run or of an exported package; timm:NAME, a pretrained model of timm; or OWNER/NAME, a "
        "package on the Hugging Face Hub. Also as --model MODEL.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The model that the gallery was built with, if its run has been moved: see `index --help`.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Settings of the recipe to override, such as optimizer.lr=1e-4 data.root=cars."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of a table.")]
AsJsonWithProgress = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, and progress as JSON lines to stderr.")
]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print messages and progress as JSON lines.")]
Source = Annotated[
    str, typer.Argument(help="Name of a benchmark, folder with one sub-folder per class, or .csv or .parquet file.")
]
Root = Annotated[
    Path | None, typer.Option(help="Folder of the benchmark, or folder that the paths in a table are relative to.")
]
LabelSeparator = Annotated[
    str | None,
    typer.Option(help='Separator of several labels of an image in a table, such as "|". Default: one label per image.'),
]
ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard", metavar="I/N", help="Embed only shard I, from 0 to N - 1, of N shards, and write it to a part file."
    ),
]
Merge = Annotated[bool, typer.Option("--merge", help="Use the part files that all shards have written.")]
PartsFolder = Annotated[
    Path | None,
    typer.Option("--parts", metavar="FOLDER", help="Folder of the part files. Default: next to the result."),
]


def _print_version(requested: bool) -> None:
    if requested:
        from shortlist import __version__

        print(f"shortlist {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import a Python module first, such as one that registers a timm model. May be repeated.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    from shortlist.imports import import_modules

    context.obj = modules or []
    import_modules(context.obj, "--import")


@cache
def root_command() -> Any:
    """Return the command with all of its subcommands, whose modules must have been imported. Building it is slow."""
    return typer.main.get_command(app)


def option_names(command: Any = None) -> dict[str, str]:
    """Map the arguments of Python functions to command-line options, such as `on_missing` to --on-missing."""
    command = command or root_command()
    names = {each.name: each.opts[0] for each in command.params if each.param_type_name == "option"}
    for inner in getattr(command, "commands", {}).values():
        names |= option_names(inner)
    return names


def keep_freed_memory() -> None:
    """Configure the allocator for a network on the CPU. Only the command line does this, since it owns the process."""
    import torch

    from shortlist.batches.memory import reuse_freed_memory

    if not torch.cuda.is_available():
        reuse_freed_memory()


def embedding_command(command: Callable[..., None]) -> Callable[..., None]:
    """Run a command in the main process; the other processes that a launcher has started embed images for it.

    If parts are missing, the error contains the commands that write them.
    """

    def work(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except DataError as error:
            again = [shlex.join(_shard_command(str(shard))) for shard in getattr(error, "shards", ())]
            if not again:
                raise
            raise DataError(f"{error} Run again: {shorten_list(again)}") from error

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        if not is_launched():
            return work(*args, **options)
        with launched():
            from shortlist.distributed import current_processes

            return current_processes().on_main(lambda: work(*args, **options))

    return run


def _shard_command(shard: str) -> list[str]:
    options = [("--shard", shard) if each == "--merge" else (each,) for each in sys.argv[1:]]
    return ["shortlist", *itertools.chain(*options)]


def quiet_milvus(place: str) -> str:
    """Stop the Milvus client from logging tracebacks of errors that it also raises. Returns `place`."""
    from shortlist.gallery.milvus_address import is_milvus

    if is_milvus(place) and find_spec("pymilvus"):
        import_module("pymilvus")  # configures its logging on import
        for name in ("pymilvus", "milvus_lite"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return place


def print_facts(facts: dict[str, Any], as_json: bool = False) -> None:
    """Print facts as JSON or YAML."""
    import yaml

    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print(yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, width=120), end="")


def untruncated_column(header: str, names: Iterable[str]) -> Column:
    """Return a column of names that a narrow terminal does not truncate, so that they can be copied."""
    return Column(header, min_width=max(map(len, names)), no_wrap=True)


def print_untruncated(table: Table) -> None:
    """Print a table without truncating it to the width of the terminal, so that paths can be copied."""
    Console(width=10**5, highlight=False, markup=False).print(table)

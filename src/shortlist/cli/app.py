"""What all commands share: the app, and options that mean the same everywhere."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column
from typer.core import TyperGroup

COMMANDS = (  # in the order of use, which is that of --help
    *("demo", "train", "evaluate", "report", "compare", "embed", "index", "search", "serve", "export"),
    *("data", "recipes", "gallery", "ablate"),
)


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=COMMANDS.index)


app = typer.Typer(
    cls=_Commands,
    help="Train image embeddings so that the right answers land in the first k results.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as optimizer.lr=1e-4 data.root=cars.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
AsJsonWithProgress = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, and progress to the error output as JSON lines.")
]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print messages and progress as JSON lines.")]
Source = Annotated[
    str, typer.Argument(help="A benchmark's name, a folder with a sub-folder a class, or a .csv or .parquet file.")
]
Root = Annotated[
    Path | None, typer.Option(help="The folder of a benchmark, or the one that a table's paths are relative to.")
]


def _print_version(asked: bool) -> None:
    if asked:
        from shortlist import __version__

        print(f"shortlist {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None: ...


def option_names(command: Any = None) -> dict[str, str]:
    """What the arguments of functions are called on the command line: `on_missing` is --on-missing."""
    command = command or typer.main.get_command(app)
    names = {each.name: each.opts[0] for each in command.params if each.param_type_name == "option"}
    for inner in getattr(command, "commands", {}).values():
        names |= option_names(inner)
    return names


def quiet_milvus(place: str) -> str:
    """Keep the client of Milvus, if a gallery is there, from logging tracebacks of errors that it raises anyway."""
    from shortlist.gallery.milvus_address import is_milvus

    if is_milvus(place) and find_spec("pymilvus"):
        import_module("pymilvus")  # it sets up its logging when it is imported
        for name in ("pymilvus", "milvus_lite"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return place


def whole_column(header: str, names: Iterable[str]) -> Column:
    """A column of names, which a narrow terminal must not cut: they are there to be copied."""
    return Column(header, min_width=max(map(len, names)), no_wrap=True)

"""What all commands share: the app, and options that mean the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column

app = typer.Typer(
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


def whole_column(header: str, names: Iterable[str]) -> Column:
    """A column of names, which a narrow terminal must not cut: they are there to be copied."""
    return Column(header, min_width=max(map(len, names)), no_wrap=True)

"""Take a run's model elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shortlist.cli.app import AsJsonWithProgress, app


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A finished run's folder.")],
    onnx: Annotated[Path | None, typer.Option(metavar="FILE", help="For onnxruntime and others.")] = None,
    torchscript: Annotated[Path | None, typer.Option(metavar="FILE", help="For torch.jit.load, also in C++.")] = None,
    torch_export: Annotated[Path | None, typer.Option(metavar="FILE.pt2", help="For torch.export.load.")] = None,
    package: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Weights, configuration, a model card, and code that loads them with timm."),
    ] = None,
    license: Annotated[str | None, typer.Option(help="Of the weights, for the model card.")] = None,  # noqa: A002
    as_json: AsJsonWithProgress = False,
) -> None:
    """Write a run's model for use without shortlist: any of four forms, each checked against the run's own vectors.

    ONNX, TorchScript and torch.export files take uint8 images and give unit vectors; how an image becomes their input
    is in their metadata. Files that exist are replaced.
    """
    from shortlist.export import export as write  # takes seconds
    from shortlist.progress import display_for

    written = write(
        run,
        onnx=onnx,
        torchscript=torchscript,
        torch_export=torch_export,
        package=package,
        license=license,
        display=display_for(sys.stderr, as_json=as_json),
    )
    if as_json:
        print(json.dumps([{"kind": each.kind, "path": str(each.path), **each.check} for each in written], indent=2))
        return
    for each in written:
        print(
            f"{each.kind}: {each.path}, checked on {each.check['images']}: largest difference "
            f"{each.check['largest_difference']:.1e}, allowed {each.check['tolerance']:.0e}"
        )

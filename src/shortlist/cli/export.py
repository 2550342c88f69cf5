"""The command `shortlist export`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shortlist.cli.app import AsJsonWithProgress, ModelCommand, ModelName, app
from shortlist.progress import display_for


@app.command(cls=ModelCommand)
def export(
    run: ModelName,
    onnx: Annotated[Path | None, typer.Option(metavar="FILE", help="ONNX file to write.")] = None,
    torchscript: Annotated[Path | None, typer.Option(metavar="FILE", help="TorchScript file to write.")] = None,
    torch_export: Annotated[
        Path | None, typer.Option(metavar="FILE.pt2", help="File to write for torch.export.load.")
    ] = None,
    package: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder to write: weights, configuration, model card, and code that needs only timm."
        ),
    ] = None,
    license: Annotated[str | None, typer.Option(help="License of the weights, for the model card.")] = None,  # noqa: A002
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the package to the Hugging Face Hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Require that the uploaded package is private.")] = False,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Export a model for use without shortlist. Every file is verified against the vectors that shortlist computes.

    ONNX, TorchScript and torch.export files map uint8 images to unit vectors; their metadata describe the
    preprocessing. Existing files are replaced.
    """
    from shortlist.export import export as write  # imported here because it takes seconds

    written = write(
        run,
        onnx=onnx,
        torchscript=torchscript,
        torch_export=torch_export,
        package=package,
        license=license,
        push_to_hub=push_to_hub,
        private=private,
        display=display_for(sys.stderr, as_json=as_json),
    )
    if as_json:
        facts = [{"kind": each.kind, "path": str(each.path), "url": each.url, **each.check} for each in written]
        print(json.dumps(facts, indent=2))
        return
    for each in written:
        print(
            f"{each.kind}: {each.path}, verified on {each.check['images']}: largest difference "
            f"{each.check['largest_difference']:.1e}, tolerance {each.check['tolerance']:.0e}"
        )
        if each.url is not None:
            print(f"uploaded: {each.url}")

"""The search page."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from shortlist.cli.app import app, quiet_milvus


@app.command()
def serve(
    gallery: Annotated[
        str, typer.Argument(callback=quiet_milvus, help="A gallery's folder, or a Milvus collection's URL.")
    ],
    host: Annotated[str, typer.Option(help="0.0.0.0: others may visit it, too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8080,
    model: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="The run that the gallery was made with, where its own model is gone."),
    ] = None,
    max_bytes: Annotated[int, typer.Option(min=1, help="Of an image that is sent.")] = 20 * 2**20,
    max_pixels: Annotated[int, typer.Option(min=1, max=170_000_000, help="Of an image that is sent.")] = 50_000_000,
) -> None:
    """Search a gallery in the browser: drop an image, or click one of the gallery's.

    Beside the page there is a JSON API, which /docs describes. Only this computer can reach it, unless --host says
    otherwise. Uploads are decoded in memory and never stored.
    """
    from shortlist.serve import Limits, serve  # says what to install, before anything is opened

    limits = Limits(bytes=max_bytes, pixels=max_pixels)
    from shortlist.gallery.gallery import Gallery

    with closing(Gallery.open(gallery, model)) as opened:

        def ready(address: str, public: bool) -> None:
            print(f"{opened.name}: {len(opened):,} images to search at {address} (Ctrl-C ends it)", flush=True)
            if public:
                print("Everyone who can reach this computer can see them.", flush=True)

        serve(opened, host, port, limits, ready=ready)

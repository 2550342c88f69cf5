"""The command `shortlist serve`."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from shortlist.cli.app import Model, app, quiet_milvus


@app.command()
def serve(
    gallery: Annotated[
        str, typer.Argument(callback=quiet_milvus, help="Folder of the gallery, or URL of a Milvus collection.")
    ],
    host: Annotated[str, typer.Option(help="Interface to bind; 0.0.0.0 exposes it to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to bind; 0 selects a free port.")] = 8080,
    model: Model = None,
    max_bytes: Annotated[int, typer.Option(min=1, help="Maximum upload size in bytes.")] = 20 * 2**20,
    max_pixels: Annotated[
        int, typer.Option(min=1, max=170_000_000, help="Maximum number of pixels of an uploaded image.")
    ] = 50_000_000,
) -> None:
    """Serve a web page and a JSON API to search a gallery.

    The API is documented at /docs. By default, only this computer can connect; see --host. Uploaded images are
    decoded in memory and never stored.
    """
    from shortlist.serve import Limits, serve  # fails before the gallery is opened if an extra is missing

    limits = Limits(bytes=max_bytes, pixels=max_pixels)
    from shortlist.gallery.gallery import Gallery

    with closing(Gallery.open(gallery, model)) as opened:

        def ready(address: str, public: bool) -> None:
            print(f"Serving {opened.name} with {len(opened):,} images at {address} (press Ctrl-C to stop)", flush=True)
            if public:
                print("Everyone who can connect to this computer can see the images.", flush=True)

        serve(opened, host, port, limits, ready=ready)

"""The command `shortlist serve`."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from shortlist.cli.app import Model, app, quiet_milvus
from shortlist.errors import ConfigError
from shortlist.progress import format_count


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
        int,
        typer.Option(min=1, max=170_000_000, help="Maximum number of pixels of an uploaded or gallery image."),
    ] = 50_000_000,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="SHORTLIST_TOKEN",
            help="Token that requests must carry. Other users of this computer may see the arguments of a command: "
            "set the environment variable instead, or use --token-file.",
        ),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token.")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Number of processes that answer requests; each loads the model.")
    ] = 1,
    backend: Annotated[
        str,
        typer.Option(
            metavar="torch|onnx",
            help="Runtime that embeds uploads: PyTorch, or ONNX Runtime, which needs the extra export and the CPU.",
        ),
    ] = "torch",
    access_log: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Append one JSON object per request to this file; - is standard output."),
    ] = None,
) -> None:
    """Serve a web page and a JSON API to search a gallery.

    The API is documented at /docs. By default, only this computer can connect; see --host. Uploaded images are
    decoded in memory and never stored. With a token, the page asks for it, and other clients send the header
    "Authorization: Bearer TOKEN". /metrics has measurements for Prometheus; /api/health and /api/ready are for health
    checks.
    """
    from shortlist.serve import Limits, read_token, serve  # fails before the gallery is opened if an extra is missing

    if token_file is not None:
        if token is not None:
            raise ConfigError("Two tokens are given: use either --token-file, or --token or SHORTLIST_TOKEN.")
        token = read_token(token_file)
    elif token is None:
        token = os.environ.get("SHORTLIST_TOKEN")  # typer ignores an empty value, which `serve` refuses

    limits = Limits(bytes=max_bytes, pixels=max_pixels)
    from shortlist.gallery.gallery import Gallery

    with closing(Gallery.open(gallery, model)) as opened:

        def ready(address: str, public: bool) -> None:
            stream = sys.stderr if access_log == "-" else sys.stdout  # the log consists of JSON lines only
            images = format_count(len(opened), "images")
            print(f"Serving {opened.name} with {images} at {address} (press Ctrl-C to stop)", file=stream, flush=True)
            if public:
                condition = "" if token is None else " and has the token"
                advice = " To require a token, use --token-file." if token is None else ""
                text = f"Everyone who can connect to this computer{condition} can see the images.{advice}"
                print(text, file=stream, flush=True)

        serve(
            opened,
            host,
            port,
            limits,
            token=token,
            processes=processes,
            backend=backend,
            access_log=access_log,
            ready=ready,
        )

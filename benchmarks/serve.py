"""Measure requests per second and latencies of `shortlist serve` on this computer.

    python benchmarks/serve.py              # the model in PyTorch and in ONNX Runtime, with one process
    python benchmarks/serve.py --processes 2 --backends torch
    python benchmarks/serve.py --quick      # to test the script

The script creates a gallery of random images, starts the server on a free port of the loopback interface, and sends
requests with 1, 8 and 64 clients: for health, for images similar to an image of the gallery, for a thumbnail, and for a
search with an upload, a JPEG of the size of a photograph. The clients are threads of this process, on the same cores.
The script stops with an error if any response is not 200. With ONNX Runtime, only uploads are measured, since nothing
else uses the model. The peak memory is that of the server's first process, and includes the conversion to ONNX. The
results are written to results/serve.json.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

RESULTS = Path(__file__).parent / "results" / "serve.json"
AT_ONCE = (1, 8, 64)
Ask = Callable[[httpx.Client, int], httpx.Response]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000, help="number of images in the gallery")
    parser.add_argument("--requests", type=int, default=512, help="requests of each kind, for each number of clients")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--size", type=int, default=224, help="image size of the backbone")
    parser.add_argument("--megapixels", type=float, default=2.0, help="size of the upload")
    parser.add_argument("--processes", type=int, default=1, help="number of processes of the server")
    parser.add_argument("--backends", nargs="+", choices=["torch", "onnx"], default=["torch", "onnx"])
    parser.add_argument("--quick", action="store_true", help="few images and requests, and a tiny model")
    parser.add_argument("--out", type=Path, help="default: results/serve.json; with --quick, nothing is written")
    options = parser.parse_args()
    if options.quick:
        options.images, options.requests, options.backbone, options.size = 40, 64, "test_resnet", 64
    rows: list[dict[str, Any]] = []
    memory: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        gallery = make_gallery(Path(folder), options.images, options.backbone, options.size)
        for backend in options.backends:
            found, memory[backend] = measure_backend(backend, gallery, options)
            rows += found
    for backend, peak in memory.items():
        print(f"peak memory of the server, {backend}: {peak / 2**20:,.0f} MiB")
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "quick")}
    where = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    result = {"command": "python benchmarks/serve.py", **settings, **where, "peak_memory": memory, "cases": rows}
    if options.out is not None or not options.quick:
        (options.out or RESULTS).write_text(json.dumps(result, indent=2) + "\n")


def measure_backend(backend: str, gallery: Path, options: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Start a server and measure it. Return the cases and the peak memory."""
    command = [sys.executable, "-m", "shortlist", "serve", gallery, "--port", "0", "--backend", backend]
    command += ["--processes", options.processes]
    server = subprocess.Popen([str(each) for each in command], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    found = re.search(r"http://\S+", server.stdout.readline())
    if found is None:
        sys.exit("it does not serve")
    upload, only = photograph(options.megapixels), "search" if backend == "onnx" else ""
    rows = measure(found.group(), options.images, options.requests, upload, only)
    memory = peak_memory(server.pid)
    server.send_signal(signal.SIGTERM)
    server.wait()
    return [{"backend": backend, **row} for row in rows], memory


def make_gallery(folder: Path, images: int, backbone: str, size: int) -> Path:
    """Create a gallery of random images of 100 x 75 blocks, which are quick to generate."""
    from shortlist.data import TestTransform, open_catalog
    from shortlist.encoding import Encoder
    from shortlist.gallery.gallery import Gallery
    from shortlist.model import Embedder

    random = np.random.default_rng(0)
    for number in range(images):
        place = folder / "images" / f"{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        blocks = Image.fromarray(random.integers(0, 256, (75, 100, 3), dtype=np.uint8))
        blocks.resize((400, 300)).save(place / f"{number}.jpg")
    embedder = Embedder(backbone, dim=512, pretrained=False).eval()
    gallery = Gallery.create(folder / "gallery", Encoder(embedder, TestTransform(size, round(size * 8 / 7))))
    gallery.add(open_catalog(folder / "images"))
    return folder / "gallery"


def photograph(megapixels: float) -> bytes:
    height = round((megapixels * 1e6 * 3 / 4) ** 0.5)
    out = io.BytesIO()
    grain = np.random.default_rng(1).integers(0, 256, (height // 8, height // 6, 3), dtype=np.uint8)
    Image.fromarray(grain).resize((height * 4 // 3, height)).save(out, format="JPEG", quality=90)
    return out.getvalue()


def measure(address: str, images: int, requests: int, upload: bytes, only: str) -> list[dict[str, Any]]:
    kinds: dict[str, Ask] = {
        "health": lambda client, _: client.get("/api/health"),
        "similar": lambda client, number: client.get(f"/api/items/{number % images}/similar"),
        "thumbnail": lambda client, number: client.get(f"/api/items/{number % images}/thumbnail"),
        f"search, {len(upload) / 1e6:.1f} MB": lambda client, _: client.post("/api/search", files={"image": upload}),
    }
    rows = []
    print("| request | clients | requests per second | p50 ms | p95 ms | p99 ms |\n|---|---|---|---|---|---|")
    for name, ask in ((name, ask) for name, ask in kinds.items() if name.startswith(only)):
        for at_once in AT_ONCE:
            row = {"request": name, "at_once": at_once, **timed(address, ask, at_once, requests)}
            rows.append(row)
            print(
                f"| {name} | {at_once} | {row['a_second']:.1f} | {row['p50'] * 1e3:.1f} | {row['p95'] * 1e3:.1f} "
                f"| {row['p99'] * 1e3:.1f} |",
                flush=True,
            )
    return rows


def timed(address: str, ask: Ask, at_once: int, requests: int) -> dict[str, float]:
    numbers = count()

    def worker(client: httpx.Client) -> list[float]:
        times = []
        while (number := next(numbers)) < requests:
            started = time.perf_counter()
            answer = ask(client, number)
            times.append(time.perf_counter() - started)
            if answer.status_code != 200:
                raise SystemExit(f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text}")
        return times

    with httpx.Client(base_url=address, timeout=300) as one, ThreadPoolExecutor(at_once) as threads:
        ask(one, 0)
        clients = [httpx.Client(base_url=address, timeout=300) for _ in range(at_once)]
        started = time.perf_counter()
        times = [each for found in threads.map(worker, clients) for each in found]
        seconds = time.perf_counter() - started
        for client in clients:
            client.close()
    p50, p95, p99 = np.percentile(times, [50, 95, 99]).tolist()
    return {"a_second": len(times) / seconds, "p50": p50, "p95": p95, "p99": p99}


def peak_memory(pid: int) -> int:
    """Return the peak memory of a process in bytes (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) * 1024  # type: ignore[union-attr]


if __name__ == "__main__":
    main()

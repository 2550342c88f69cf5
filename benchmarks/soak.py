"""Test `shortlist serve` under full load for a long time: failures, response times and memory.

    python benchmarks/soak.py

The script starts the server with a gallery of random images, as benchmarks/serve.py does, and requests similar images,
thumbnails and searches with uploads, with the number of concurrent requests at which the server has its highest
throughput. Meanwhile, slow clients upload a file at little more than the minimum rate, and others stop after a few
bytes. Any response other than 200 is a failure, except for the refusal (408) of a stalled upload. Memory is that of the
server, in the second and in the last quarter of the time. The results are written to results/soak.json. The script
fails if a request failed, or if the memory has grown by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
from serve import make_gallery, peak_memory, photograph

RESULTS = Path(__file__).parent / "results" / "soak.json"
PIECE = 4096  # bytes that a slow client sends at a time
MAX_GROWTH = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--at-once", type=int, default=8, help="number of clients that send one request after another")
    parser.add_argument("--slow", type=int, default=4, help="number of clients that upload slowly")
    parser.add_argument("--stalled", type=int, default=2, help="number of clients that stop")
    parser.add_argument("--rate", type=int, default=2**15, help="bytes per second of a slow client")
    parser.add_argument("--images", type=int, default=2000, help="number of images in the gallery")
    parser.add_argument("--megapixels", type=float, default=2.0, help="size of the upload")
    parser.add_argument("--address", help="URL of a server that is running, instead of starting one")
    parser.add_argument("--pid", type=int, help="process id of that server")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with running_server(options.images) if options.address is None else given(options) as (address, pid):
        load = Load(address, pid, options.images, photograph(options.megapixels), options.seconds, options.rate)
        found = load.run(options.at_once, options.slow, options.stalled)
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "address", "pid")}
    options.out.write_text(json.dumps({"command": "python benchmarks/soak.py", **settings, **found}, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    if found["failures"] or found["growth"] > MAX_GROWTH:
        sys.exit("requests failed, or the memory has grown")


@contextmanager
def given(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    yield options.address, options.pid


@contextmanager
def running_server(images: int) -> Iterator[tuple[str, int]]:
    """Start a server, and yield its URL and its process."""
    with tempfile.TemporaryDirectory() as folder:
        gallery = make_gallery(Path(folder), images, "resnet18", 224)
        command = [sys.executable, "-m", "shortlist", "serve", str(gallery), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            if found is None:
                sys.exit("it does not serve")
            try:
                yield found.group(), server.pid
            finally:
                server.terminate()


@dataclass
class Load:
    """Clients of a server, and the responses that they received."""

    address: str
    pid: int
    images: int
    upload: bytes
    seconds: float
    rate: int
    times: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, at_once: int, slow: int, stalled: int) -> dict[str, object]:
        """Run all clients, and return the responses that they received."""
        self.end = time.monotonic() + self.seconds
        kinds: list[tuple[int, Callable[[int], None]]] = [
            *((number, self.ask) for number in range(at_once)),
            *((number, self.upload_slowly) for number in range(slow)),
            *((number, self.stall) for number in range(stalled)),
        ]
        clients = [threading.Thread(target=self.guarded, args=(client, number)) for number, client in kinds]
        for client in clients:
            client.start()
        memory = []
        while time.monotonic() < self.end:
            memory.append(resident_memory(self.pid))
            time.sleep(min(1.0, self.seconds / 20))
        for client in clients:
            client.join()
        quarter = len(memory) // 4
        early, late = np.mean(memory[quarter : 2 * quarter]), np.mean(memory[3 * quarter :])
        p50, p99 = np.percentile(self.times, [50, 99]).tolist()
        return {
            "answers": dict(self.counts),
            "failures": self.failures,
            "a_second": len(self.times) / self.seconds,
            "p50": p50,
            "p99": p99,
            "memory_second_quarter": round(early),
            "memory_last_quarter": round(late),
            "growth": late / early,
            "peak_memory": peak_memory(self.pid),
        }

    def guarded(self, client: Callable[[int], None], number: int) -> None:
        try:
            client(number)
        except (OSError, httpx.HTTPError) as error:
            self.failures.append(f"{client.__name__}: {type(error).__name__}: {error}")

    def ask(self, number: int) -> None:
        """Send one request after another, of each kind in turn."""
        with httpx.Client(base_url=self.address, timeout=300) as client:
            while time.monotonic() < self.end:
                number += 1
                item, started = number % self.images, time.perf_counter()
                kind = ("similar", "thumbnail", "search")[number % 3]
                if kind == "search":
                    answer = client.post("/api/search", files={"image": self.upload})
                else:
                    answer = client.get(f"/api/items/{item}/{kind}")
                self.times.append(time.perf_counter() - started)
                self.note(kind, answer.status_code, 200)

    def upload_slowly(self, _: int) -> None:
        while time.monotonic() < self.end:
            body = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n'
            body += self.upload + b"\r\n--b--\r\n"
            with self.begun(len(body)) as connection:
                for start in range(0, len(body), PIECE):
                    connection.sendall(body[start : start + PIECE])
                    time.sleep(PIECE / self.rate)
                self.note("slow upload", status_of(connection), 200)

    def stall(self, _: int) -> None:
        """Send a few bytes and wait for the refusal, or for the end."""
        while (left := self.end - time.monotonic()) > 0:
            with self.begun(100_000) as connection:
                connection.sendall(b"--b\r\n")
                connection.settimeout(left)
                try:
                    self.note("stalled upload", status_of(connection), 408)
                except TimeoutError:
                    return

    def begun(self, length: int) -> socket.socket:
        """Open a connection and send the headers of an upload."""
        parts = urlsplit(self.address)
        connection = socket.create_connection((parts.hostname, parts.port), timeout=300)
        head = f"POST /api/search HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {length}\r\n"
        connection.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n".encode())
        return connection

    def note(self, kind: str, status: int, expected: int) -> None:
        self.counts[f"{kind}: {status}"] += 1
        if status != expected:
            self.failures.append(f"{kind}: {status}")


def status_of(connection: socket.socket) -> int:
    return int(connection.recv(2**16).split(b" ", 2)[1])


def resident_memory(pid: int) -> int:
    """Return the resident memory of a process in bytes (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1)) * 1024  # type: ignore[union-attr]


if __name__ == "__main__":
    main()

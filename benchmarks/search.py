"""Measure exact search against FAISS's flat index, approximate indexes against exact search, and changes of galleries.

    python benchmarks/search.py

*Exact search*: the top 1000 of 60,502 vectors of 512 dimensions among themselves, the size of the test set of SOP; the
top 1000 and the top 10 of 10,000 other queries in the same vectors; and the top 10 of one query in 200,000 vectors.
`nearest` and FAISS's IndexFlatIP are measured alternately in one process, and the fastest run of each counts. So is
the matrix product of all queries and vectors alone, in blocks: no exact search of other queries can be faster. For the
search of the vectors among themselves, the peak memory in addition to the vectors is measured in separate processes
(the result alone, (n, 1000) of float32 and int64, takes 726 MB).
*Approximate search*: 1,000,000 clustered vectors of 512 dimensions in HNSW and IVF-PQ indexes, as galleries build and
search them: recall@10 against exact search, queries per second one at a time and all at once, the size of the index,
and the time to build it and to tune the search effort (candidates of HNSW, lists of IVF-PQ).
*Changes*: in galleries of 10,000 to 1,000,000 vectors, the time to add 1, 100 and 10,000 vectors and to remove them
again, and the bytes written, as means over a few changes, since some changes merge the files of earlier ones.

All measurements use 2 threads. `--parts exact` measures only the exact search. For smaller sizes, use --images 20000
--many 50000 --changed 10000. The results are written to results/search.json, and an interrupted run resumes from there;
results that it already contains are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from alone import run_alone

from shortlist.gallery.folder_store import FolderStore
from shortlist.gallery.store import Row
from shortlist.ranking.ranker import products
from shortlist.ranking.top_k import BLOCK_SIZE
from shortlist.search import faiss_index, nearest

RESULTS = Path(__file__).parent / "results" / "search.json"
DIMENSIONS, K, THREADS = 512, 1000, 2
QUERIES = 1_000  # of the approximate indexes
WAYS = ("nearest", "faiss")
OTHER_QUERIES = ((10_000, None, 1000), (10_000, None, 10), (1, 200_000, 10))  # queries, vectors (None: --images), k
MIN_SECONDS = 2.0  # short searches are repeated for this time
PARTS = ("exact", "approximate", "changes")
CHANGED = (10_000, 100_000, 1_000_000)  # vectors of the galleries that are changed
MAX_CHANGED_HNSW = 100_000  # to build HNSW of a million takes 18 minutes
REPEATS = {1: 10, 100: 10, 10_000: 3}  # how often so many vectors are added and removed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=60_502, help="vectors of the exact search")
    parser.add_argument("--many", type=int, default=1_000_000, help="vectors of the approximate indexes")
    parser.add_argument("--changed", type=int, nargs="+", default=CHANGED, help="vectors of the galleries to change")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; default: everything")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        case = dict(options.case)
        parts = {"time": timed, "memory": memory, "approximate": approximate, "changes": changes}
        print(json.dumps(parts[case.pop("what")](**case)))
        return
    threads = {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
    found = begun(options.out, {"images": options.images, "many": options.many, "k": K, "threads": THREADS})
    measure = {"exact": measure_exact, "approximate": measure_approximate, "changes": measure_changes}
    for part in options.parts:
        measure[part](found, options, threads)


def measure_exact(found: dict[str, Any], options: argparse.Namespace, threads: dict[str, str]) -> None:
    if "exact" not in found:
        case = {"what": "time", "images": options.images, "k": K, "repeats": options.repeats}
        exact = run_alone(__file__, case, threads)
        for way in WAYS:
            case = {"what": "memory", "images": options.images, "way": way}
            exact[f"{way}_mb"] = run_alone(__file__, case, threads)["mb"]
        found["exact"] = exact
        save(options.out, found)
    others = found["exact"].setdefault("other_queries", {})
    for queries, vectors, k in OTHER_QUERIES:
        images = vectors or options.images
        if (name := f"top {k} of {queries} in {images}") not in others:
            case = {"what": "time", "images": images, "k": k, "repeats": options.repeats, "queries": queries}
            others[name] = run_alone(__file__, case, threads)
            save(options.out, found)
    print_exact(found)


def measure_approximate(found: dict[str, Any], options: argparse.Namespace, threads: dict[str, str]) -> None:
    print("\n| index | effort | recall@10 | queries/s, one at a time | all at once | MB | build s | tune s |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in faiss_index.KINDS:
        if kind not in found["approximate"]:
            case = {"what": "approximate", "images": options.many, "kind": kind}
            found["approximate"][kind] = run_alone(__file__, case, threads)
            save(options.out, found)
        row = found["approximate"][kind]
        numbers = " | ".join(f"{row[name]:,.0f}" for name in ("one", "all", "mb", "build", "tune"))
        print(f"| {kind} | {row['effort']} | {row['recall']:.3f} | {numbers} |", flush=True)


def measure_changes(found: dict[str, Any], options: argparse.Namespace, threads: dict[str, str]) -> None:
    print(
        "\n| gallery | index | vectors | add ms | written MB | remove ms | written MB |\n|---|---|---|---|---|---|---|"
    )
    for kind in ("flat", "hnsw"):
        for images in options.changed:
            if kind == "hnsw" and images > MAX_CHANGED_HNSW:
                continue
            name = f"{kind} {images}"
            if name not in found.setdefault("changes", {}):
                case = {"what": "changes", "images": images, "kind": kind}
                found["changes"][name] = run_alone(__file__, case, threads)
                save(options.out, found)
            for row in found["changes"][name]["rows"]:
                add, remove = (
                    f"{1000 * row[what]['seconds']:,.0f} | {row[what]['bytes'] / 1e6:,.3f}"
                    for what in ("add", "remove")
                )
                print(f"| {images:,} | {kind} | {row['vectors']:,} | {add} | {remove} |", flush=True)


def begun(file: Path, what: dict[str, Any]) -> dict[str, Any]:
    """Return the results of an earlier call with the same settings, if there are any."""
    earlier = json.loads(file.read_text()) if file.exists() else {}
    same = all(earlier.get(name) == value for name, value in what.items())
    return earlier if same else {"command": "python benchmarks/search.py", **what, "approximate": {}}


def save(file: Path, found: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=2) + "\n")


def print_exact(found: dict[str, Any]) -> None:
    exact = found["exact"]
    print(f"\n{DIMENSIONS} dimensions, {THREADS} threads\n")
    print("| exact search | nearest | FAISS | products | ratio | same neighbours |\n|---|---|---|---|---|---|")
    for name, row in {f"top {K} of {found['images']} in themselves": exact, **exact["other_queries"]}.items():
        times = " | ".join(f"{row[way]:.4g} s" for way in (*WAYS, "products"))
        print(f"| {name} | {times} | {row['nearest'] / row['faiss']:.2f} | {100 * row['same']:.2f} % |")
    memory = ", ".join(f"{way} {exact[f'{way}_mb']:,.0f}" for way in WAYS)
    print(f"\nMB above the vectors, in themselves: {memory}", flush=True)


def clustered(number: int, seed: int = 0) -> torch.Tensor:
    """Unit vectors in classes of about 5, which vary in few of their dimensions, as trained embeddings do."""
    random = torch.Generator().manual_seed(seed)
    classes = torch.randint(max(1, number // 5), (number,), generator=random)
    centres = torch.randn(max(1, number // 5), 64, generator=random)
    basis = torch.randn(64, DIMENSIONS, generator=random) / 8
    vectors = torch.empty(number, DIMENSIONS)
    for start in range(0, number, 65_536):  # a million at once would need three times their memory
        some = classes[start : start + 65_536]
        latent = centres[some] + 0.7 * torch.randn(len(some), 64, generator=random)
        vectors[start : start + 65_536] = latent @ basis + 0.1 * torch.randn(len(some), DIMENSIONS, generator=random)
    return torch.nn.functional.normalize(vectors, out=vectors)


def ways(queries: torch.Tensor, vectors: torch.Tensor, k: int) -> dict[str, Callable[[], tuple[Any, Any]]]:
    import faiss  # after torch

    flat = faiss.IndexFlatIP(DIMENSIONS)
    flat.add(vectors.numpy())
    return {"nearest": lambda: nearest(queries, vectors, k), "faiss": lambda: flat.search(queries.numpy(), k)}


def multiply(queries: torch.Tensor, vectors: torch.Tensor) -> None:
    """Compute all products, and discard them."""
    out = torch.empty(BLOCK_SIZE * BLOCK_SIZE)
    for rows in queries.split(BLOCK_SIZE):
        for columns in vectors.split(BLOCK_SIZE):
            products(rows, columns, out=out[: len(rows) * len(columns)].view(len(rows), len(columns)))


def timed(images: int, k: int, repeats: int, queries: int | None = None) -> dict[str, Any]:
    """Measure alternately, so that other work on the machine affects both.

    Args:
        images: Number of vectors.
        k: Number of results per query.
        repeats: Minimum number of runs of each.
        queries: Number of queries, which are other vectors of the same classes. None: the vectors themselves.
    """
    torch.set_num_threads(THREADS)
    vectors = clustered(images + (queries or 0))
    vectors, others = vectors[:images], vectors[images:]
    asked = vectors if queries is None else others
    both = ways(asked, vectors, k)
    times: dict[str, list[float]] = {way: [] for way in (*WAYS, "products")}
    answers = {}
    while len(times[WAYS[-1]]) < repeats or sum(map(sum, times.values())) < MIN_SECONDS:
        for way in WAYS:
            time.sleep(0.02)  # until the threads of the other library no longer wait actively
            started = time.perf_counter()
            _, rows = both[way]()
            times[way].append(time.perf_counter() - started)
            answers[way] = np.asarray(rows)
        started = time.perf_counter()
        multiply(asked, vectors)
        times["products"].append(time.perf_counter() - started)
    same = float(np.mean([len(np.intersect1d(*each)) / k for each in zip(*answers.values(), strict=True)]))
    return {**{way: min(each) for way, each in times.items()}, "times": times, "same": same}


def memory(images: int, way: str) -> dict[str, float]:
    """Return the peak memory above the memory before the search, which includes FAISS's own copy of the vectors."""
    torch.set_num_threads(THREADS)
    vectors = clustered(images)
    work = ways(vectors, vectors, K)[way]
    before = psutil.Process().memory_info().rss
    with Peak() as peak:
        work()
    return {"mb": (peak.most - before) / 1e6}


class Peak:
    """Samples the memory of the process ten times per second; memory that was freed before does not count."""

    def __enter__(self) -> Peak:
        self.most, self.done = 0, threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        process = psutil.Process()
        while not self.done.wait(0.1):
            self.most = max(self.most, process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self.most = max(self.most, psutil.Process().memory_info().rss)
        self.done.set()
        self.thread.join()


def approximate(images: int, kind: str) -> dict[str, Any]:
    torch.set_num_threads(THREADS)
    vectors = clustered(images).numpy()
    started = time.perf_counter()
    index = None if kind == "flat" else faiss_index.build(kind, vectors)
    build = time.perf_counter() - started
    if kind != "flat":
        faiss_index.tune(index, vectors)
    tune = time.perf_counter() - started - build
    queries = clustered_queries(vectors)
    _, exact = nearest(queries, vectors, 10)
    started = time.perf_counter()
    _, found = faiss_index.search(index, vectors, queries, 10, None)
    together = len(queries) / (time.perf_counter() - started)
    started = time.perf_counter()
    for query in queries[:200]:
        faiss_index.search(index, vectors, query[None], 10, None)
    alone = len(queries[:200]) / (time.perf_counter() - started)
    recall = np.mean([len(np.intersect1d(*each)) / 10 for each in zip(found, exact.numpy(), strict=True)])
    size = 0 if kind == "ivfpq" else vectors.nbytes
    if index is not None:
        with tempfile.TemporaryDirectory() as folder:
            faiss_index.write(index, Path(folder) / "index")  # without the vectors, which HNSW holds in memory
            size += os.path.getsize(Path(folder) / "index")  # noqa: PTH202
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "kind": kind,
        "recall": float(recall),
        "one": alone,
        "all": together,
        "mb": size / 1e6,
        "build": build,
        "tune": tune,
        "effort": "all" if kind == "flat" else faiss_index.effort(index),
        "peak_mb": peak / 1e6,
    }


def clustered_queries(vectors: np.ndarray) -> np.ndarray:
    """Return queries close to vectors of the gallery: some of these vectors, slightly perturbed."""
    random = np.random.default_rng(1)
    near = vectors[np.sort(random.permutation(len(vectors))[:QUERIES])]
    moved = near + random.normal(0, 0.3 / DIMENSIONS**0.5, near.shape)
    return (moved / np.linalg.norm(moved, axis=1, keepdims=True)).astype(np.float32)


class NoEncoder:
    """Stands in for the model of a gallery whose vectors are random."""

    dim, fingerprint = DIMENSIONS, "random"

    def save(self, folder: Path) -> Path:
        folder.mkdir()
        return folder


def changes(images: int, kind: str) -> dict[str, Any]:
    """Add vectors to a gallery, and remove them again, so that its size stays about the same."""
    torch.set_num_threads(THREADS)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        store = FolderStore.create(Path(folder) / "gallery", NoEncoder(), kind)
        change(store, clustered(images).numpy(), [])
        for number, repeats in REPEATS.items():
            vectors = clustered(number, seed=1).numpy()
            done: dict[str, list[tuple[float, float]]] = {"add": [], "remove": []}
            for _ in range(repeats):
                first = store.now.manifest.next_id
                done["add"].append(change(store, vectors, []))
                done["remove"].append(change(store, vectors[:0], range(first, first + number)))
            means = {
                what: dict(zip(("seconds", "bytes"), np.mean(each, axis=0), strict=True)) for what, each in done.items()
            }
            rows.append({"vectors": number, **means})
    return {"rows": rows}


def change(store: FolderStore, vectors: np.ndarray, removed: Sequence[int]) -> tuple[float, float]:
    """Return the seconds of a change, and the bytes that it writes."""
    first = store.now.manifest.next_id
    rows = [Row(f"/images/{each // 1000}/{each}.jpg", None, 1, 1) for each in range(first, first + len(vectors))]
    process = psutil.Process()
    before, started = process.io_counters().write_chars, time.perf_counter()
    with store.changing():
        store.change(rows, vectors, removed=removed)
    return time.perf_counter() - started, process.io_counters().write_chars - before


if __name__ == "__main__":
    main()

"""Measure time and memory of the large-batch step with a real backbone, on the CPU.

    python benchmarks/step.py                    all cases: about an hour on 2 cores; resumes an interrupted run
    python benchmarks/step.py --targets          only the cases of the targets: about 10 minutes
    python benchmarks/step.py --shares           only the shares of the stages, at batch 392 and 4,000
    python benchmarks/step.py --busy             only kept graphs on busy cores, at batch 392
    python benchmarks/step.py --batches 128 392 --again
    python benchmarks/step.py --quick            tiny images and batches, to test the script; nothing is written

Three methods compute the same gradient: *plain*, a single backward pass over the whole batch; *twice*, the large-batch
step without kept graphs, so that every image is embedded twice; *kept*, the large-batch step with all graphs kept.

Memory and time are measured in separate processes. Memory is the peak of the process in one step, above that of the
model, the pixels and everything that a first small step loads. For this measurement, malloc returns every freed block
of at least 128 kB to the system immediately, so that the peak does not include freed memory. Times are measured
alternately in one process that keeps freed memory (`reuse_freed_memory`, as in training), and the ratio of neighbouring
measurements is taken, which is reliable on a noisy machine. If plain does not fit into memory, its time per image is
measured with a smaller batch in the same process.

The shares of the stages are those of the time of a training step with SiMix, AdamW and no kept graphs, on JPEGs of
500 x 375 pixels that worker processes decode: *input* is the time that the step waits for images, *first* and *second*
are the passes through the network (the second with the backward pass), *loss* is the loss with its gradient, *other*
the rest. Each result is written to results/step.json immediately.

On busy cores, where one process per core multiplies matrices all the time, *kept* is compared with *twice*.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from alone import run_alone

RESULTS = Path(__file__).parent / "results" / "step.json"
METHODS = ["plain", "twice", "kept"]
BATCHES = [64, 128, 392, 1024, 2048, 4000]
MEMORY_LIMIT = 14 * 2**30
# Environment in which malloc returns freed memory to the system, for measuring memory.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "MALLOC_TRIM_THRESHOLD_": str(2**17)}
PEAK_GROWTH, TWICE, KEPT = 1.15, 1.40, 1.05  # targets
LOSS_SHARE, NOT_NETWORK_SHARE, BUSY_KEPT = 0.05, 0.10, 1.0  # targets
STAGES = ["input", "first", "loss", "second", "optimiser", "other"]
SHARES_AT = [392, 4000]
BUSY_AT = 392
FILES = 256  # number of JPEGs for the shares
# Keeps a core and its caches busy, until its parent ends.
BUSY = """
import os, torch
torch.set_num_threads(1)
parent, matrix = os.getppid(), torch.randn(1024, 1024)
while os.getppid() == parent:
    matrix @ matrix
"""


@dataclass(frozen=True)
class Setting:
    backbone: str = "tf_efficientnet_lite0"
    dimensions: int = 512
    pixels: int = 112
    chunk: int = 32
    repeats: int = 5


@dataclass(frozen=True)
class Case:
    measure: str  # "memory", "time", "shares" or "busy"
    batch: int
    ways: tuple[str, ...]  # methods: one for memory and shares, several for time
    plain_batch: int = 0  # batch size of the plain method, for time only


QUICK = Setting(pixels=32, chunk=4, repeats=2)


# ------------------------------------------------------------------------------------------- in a separate process


class Bench:
    """A model, a batch, and the methods that compute its gradient."""

    def __init__(self, setting: Setting, batch: int) -> None:
        from shortlist import RecallAtKLoss
        from shortlist.model import Embedder

        torch.manual_seed(0)
        self.setting = setting
        self.model = Embedder(setting.backbone, dim=setting.dimensions, image_size=setting.pixels)
        self.loss = RecallAtKLoss()
        self.pixels = torch.randint(256, (batch, 3, setting.pixels, setting.pixels), dtype=torch.uint8)
        self.labels = torch.arange(batch) // 4

    def method(self, name: str, batch: int) -> Callable[[], None]:
        pixels, labels = self.pixels[:batch], self.labels[:batch]
        if name == "plain":
            return lambda: self.loss(self.model(pixels), labels).backward()
        from shortlist.batches.large_batch import LargeBatchStep

        step = LargeBatchStep(self.model, self.loss, self.setting.chunk, keep_graphs=name == "kept")

        def run() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # if out of memory, the step would continue with smaller chunks
                out = step(pixels, labels)
            assert out.kept == (out.chunks if name == "kept" else 0)

        return run


def measure_memory(bench: Bench, case: Case) -> dict[str, Any]:
    (name,) = case.ways
    for _ in range(2):  # loading libraries, starting threads and creating kernels belong to the idle state
        bench.method(name, min(case.batch, bench.setting.chunk))()
    bench.model.zero_grad(set_to_none=True)
    run = bench.method(name, case.batch)
    ctypes.CDLL(None).malloc_trim(0)
    idle = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    run()
    return {"megabytes": (_status("VmHWM") - idle) / 2**20}


def seconds_per_image(bench: Bench, images: dict[str, int]) -> dict[str, list[float]]:
    """Measure methods alternately, each with its number of images."""
    from shortlist.batches.memory import reuse_freed_memory

    reuse_freed_memory()
    runs = {name: bench.method(name, number) for name, number in images.items()}
    seconds: dict[str, list[float]] = {name: [] for name in images}
    for turn in range(bench.setting.repeats + 1):
        for name, run in runs.items():
            bench.model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            run()
            if turn > 0:  # the first turn is a warm-up
                seconds[name].append((time.perf_counter() - start) / images[name])
    return seconds


def measure_time(bench: Bench, case: Case) -> dict[str, Any]:
    images = {name: case.plain_batch if name == "plain" else case.batch for name in case.ways}
    seconds = seconds_per_image(bench, images)
    ratios = {
        name: statistics.median(ours / plain for ours, plain in zip(seconds[name], seconds["plain"], strict=True))
        for name in case.ways
        if name != "plain"
    }
    rates = {name: 1 / statistics.median(values) for name, values in seconds.items()}
    return {"images_per_second": rates, "times_plain": ratios, "seconds_per_image": seconds}


@contextmanager
def busy_cores() -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(10)  # until they have imported torch
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure_busy(bench: Bench, case: Case) -> dict[str, Any]:
    with busy_cores():
        seconds = seconds_per_image(bench, dict.fromkeys(case.ways, case.batch))
    ratios = [kept / twice for kept, twice in zip(seconds["kept"], seconds["twice"], strict=True)]
    return {"kept_by_twice": statistics.median(ratios), "worst": max(ratios), "seconds_per_image": seconds}


class Stopwatch:
    """Measures the seconds that named calls take."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return run


def measure_shares(bench: Bench, case: Case) -> dict[str, Any]:
    from input import write_images

    from shortlist import RecallAtKLoss, SiMix
    from shortlist.batches.large_batch import LargeBatchStep
    from shortlist.batches.memory import reuse_freed_memory
    from shortlist.data import ImageDataset, TrainTransform, image_chunks, open_catalog
    from shortlist.data.loader import decoding_workers

    reuse_freed_memory()
    step = LargeBatchStep(bench.model, RecallAtKLoss(simix=SiMix()), bench.setting.chunk, keep_graphs=False)
    optimiser = torch.optim.AdamW(bench.model.parameters())
    batches = [bench.setting.chunk, *[case.batch] * min(2, bench.setting.repeats)]  # the first is a warm-up
    parts = [step.parts([(epoch, i % FILES) for i in range(size)]) for epoch, size in enumerate(batches)]
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), FILES)
        dataset = ImageDataset(open_catalog(folder), TrainTransform(bench.setting.pixels))
        loading = image_chunks(dataset, chain.from_iterable(parts), decoding_workers())
        shares = []
        for size, own in zip(batches, parts, strict=True):
            watch = Stopwatch()
            read = watch.timed("input", lambda: next(loading))
            for stage, method in (("first", "_embed"), ("loss", "_differentiate"), ("second", "_backpropagate")):
                setattr(step, method, watch.timed(stage, getattr(LargeBatchStep, method).__get__(step)))
            start = time.perf_counter()
            step((read() for _ in own), bench.labels[:size])
            watch.timed("optimiser", lambda: (optimiser.step(), optimiser.zero_grad()))()
            total = time.perf_counter() - start
            watch.seconds["first"] -= watch.seconds["input"]  # images are read while they are embedded
            watch.seconds["other"] = total - sum(watch.seconds.values())
            shares.append({stage: seconds / total for stage, seconds in watch.seconds.items()} | {"seconds": total})
    return {name: statistics.mean(each[name] for each in shares[1:]) for name in shares[0]}


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    import psutil

    from shortlist.batches.memory import is_out_of_memory

    bench = Bench(setting, case.batch)
    limit = _status("VmSize") + min(MEMORY_LIMIT, psutil.virtual_memory().available * 9 // 10)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        measures = {"memory": measure_memory, "time": measure_time, "shares": measure_shares, "busy": measure_busy}
        return measures[case.measure](bench, case)
    except Exception as error:
        if not is_out_of_memory(error) and not str(error).startswith("Out of memory"):
            raise
        return {"out_of_memory": True}


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


# ------------------------------------------------------------------------------------------------------- all cases


Results = dict[Case, dict[str, Any]]


def memory_cases(batches: list[int]) -> Iterator[Case]:
    for name in METHODS:
        for batch in batches:
            yield Case("memory", batch, (name,))


def time_case(batch: int, results: Results) -> Case:
    """Compare all methods that fit into memory; plain is measured at the largest batch that fits."""

    def fits(name: str, size: int) -> bool:
        return "out_of_memory" not in results.get(Case("memory", size, (name,)), {})

    known = [case.batch for case in results if case.ways == ("plain",) and fits("plain", case.batch)]
    plain_batch = batch if fits("plain", batch) else max(size for size in known if size < batch)
    return Case("time", batch, tuple(name for name in METHODS if name == "plain" or fits(name, batch)), plain_batch)


def show(case: Case, result: dict[str, Any]) -> None:
    if "out_of_memory" in result:
        print(f"{case.measure:6} {case.batch:5} {' '.join(case.ways):6}   out of memory", flush=True)
    elif case.measure == "memory":
        print(f"memory {case.batch:5} {case.ways[0]:6} {result['megabytes']:9.0f} MB", flush=True)
    elif case.measure == "shares":
        stages = "  ".join(f"{stage} {100 * result[stage]:.1f} %" for stage in STAGES)
        print(f"shares {case.batch:5} {stages}   of {result['seconds']:.1f} s", flush=True)
    elif case.measure == "busy":
        ratios = f"{result['kept_by_twice']:.2f} x twice, worst repeat {result['worst']:.2f}"
        print(f"busy   {case.batch:5} kept   {ratios}", flush=True)
    else:
        at = f" (plain at {case.plain_batch})" if case.plain_batch != case.batch else ""
        for name in case.ways:
            ratio = f"{result['times_plain'][name]:6.2f} x plain{at}" if name != "plain" else ""
            rate = result["images_per_second"][name]
            print(f"time   {case.batch:5} {name:6} {rate:9.1f} images/s {ratio}", flush=True)


def show_targets(setting: Setting, results: Results) -> None:
    def line(text: str, measured: float, target: float) -> None:
        print(f"{text:64} {measured:5.2f}     target {target:.2f}     {'met' if measured <= target else 'MISSED'}")

    peaks = {
        case.batch: result.get("megabytes")
        for case, result in results.items()
        if case.measure == "memory" and case.ways == ("twice",)
    }
    smallest = 4 * setting.chunk
    largest = max(peaks, default=smallest)
    if largest > smallest and peaks.get(smallest) and peaks[largest]:
        text = f"peak memory without kept graphs, batch {largest} / batch {smallest}"
        line(text, peaks[largest] / peaks[smallest], PEAK_GROWTH)
    for name, text, target in (("twice", "embedded twice", TWICE), ("kept", "all graphs kept", KEPT)):
        ratios = {
            case.batch: result["times_plain"][name]
            for case, result in results.items()
            if case.measure == "time"
            and case.batch == case.plain_batch >= smallest
            and name in result.get("times_plain", {})
        }
        if ratios:
            worst = max(ratios, key=lambda batch: ratios[batch])
            line(f"time per image, {text} / plain, worst at batch {worst}", ratios[worst], target)
    for case, result in results.items():
        if case.measure == "shares" and "loss" in result:
            if case.batch == SHARES_AT[-1]:
                line(f"share of the loss, batch {case.batch}", result["loss"], LOSS_SHARE)
            network = result["first"] + result["second"]
            line(f"share of all but the network, batch {case.batch}", 1 - network, NOT_NETWORK_SHARE)
        if case.measure == "busy":
            line(f"time on busy cores, kept / twice, batch {case.batch}", result["kept_by_twice"], BUSY_KEPT)


def load(setting: Setting) -> Results:
    saved = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = saved["rows"] if saved.get("setting") == asdict(setting) else []
    cases = (row.pop("case") for row in rows)
    return {Case(**case | {"ways": tuple(case["ways"])}): row for case, row in zip(cases, rows, strict=True)}


def save(setting: Setting, results: Results) -> None:
    rows = [{"case": asdict(case)} | result for case, result in results.items()]
    RESULTS.parent.mkdir(exist_ok=True)
    unfinished = RESULTS.with_suffix(".tmp")
    unfinished.write_text(json.dumps({"setting": asdict(setting), "rows": rows}, indent=1) + "\n")
    unfinished.replace(RESULTS)


def cases(arguments: argparse.Namespace, setting: Setting, results: Results) -> Iterator[Case]:
    """Yield the cases to measure. Which methods are timed depends on the results for memory."""
    smallest, batches = 4 * setting.chunk, [16, 40] if arguments.quick else arguments.batches
    everything = not arguments.shares and not arguments.busy
    if everything and arguments.targets:
        yield from (Case("memory", batch, ("twice",)) for batch in (smallest, batches[-1]))
        batches = [batch for batch in (smallest, 392) if batch < batches[-1]]
    elif everything:
        yield from memory_cases(batches)
    if everything:
        yield from (time_case(batch, results) for batch in batches)
    if everything or arguments.shares:
        yield from (Case("shares", batch, ("twice",)) for batch in (batches[-1:] if arguments.quick else SHARES_AT))
    if everything or arguments.busy:
        yield Case("busy", batches[-1] if arguments.quick else BUSY_AT, ("twice", "kept"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="batch sizes")
    parser.add_argument("--targets", action="store_true", help="measure only the cases of the targets")
    parser.add_argument("--shares", action="store_true", help="measure only the shares of the stages")
    parser.add_argument("--busy", action="store_true", help="measure only kept graphs on busy cores")
    parser.add_argument("--quick", action="store_true", help="use tiny sizes and write nothing")
    parser.add_argument("--again", action="store_true", help="repeat measurements whose results exist")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        setting, case = json.loads(arguments.case)
        print(json.dumps(measure(Setting(**setting), Case(**case))))
        return
    setting = QUICK if arguments.quick else Setting()
    results = {} if arguments.quick else load(setting)
    for case in cases(arguments, setting, results):
        if arguments.again or case not in results:
            results[case] = run_alone(
                __file__, [asdict(setting), asdict(case)], RETURN_FREED_MEMORY if case.measure == "memory" else None
            )
            if not arguments.quick:
                save(setting, results)
        show(case, results[case])
    show_targets(setting, results)
    if arguments.quick:
        print("(These sizes are too small for the targets to be meaningful.)")


if __name__ == "__main__":
    main()

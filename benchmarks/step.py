"""Time and memory of the large-batch step with a real backbone: embed, loss, gradient, on the CPU.

    python benchmarks/step.py                    everything: about an hour on 2 cores, resumes where it was stopped
    python benchmarks/step.py --bars             only what the bars at the end are about: about 10 minutes
    python benchmarks/step.py --batches 128 392 --again
    python benchmarks/step.py --quick            tiny images and batches, to see that it runs; nothing is written

Three ways to the same gradient: *plain*, one backward pass over the whole batch; *twice*, the large-batch step with
nothing kept, so that every image is embedded twice; *kept*, the large-batch step with all graphs kept.

Memory and time are measured in processes of their own. Memory: the peak of the process in one step, above what it
holds with the model, the pixels, and all that a first small step has loaded; malloc gives every block of 128 kB or more
back to the system at once, so that the peak is that of what is alive. Time: the ways take turns in one process that
keeps freed memory (`reuse_freed_memory`, as a training does), and the ratio of neighbours is taken, so that it is fair
on a noisy machine. Where plain does not fit, its time an image is that at a smaller batch, in the same process.
Each result is written to results/step.json as it comes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from alone import run_alone

RESULTS = Path(__file__).parent / "results" / "step.json"
WAYS = ["plain", "twice", "kept"]
BATCHES = [64, 128, 392, 1024, 2048, 4000]
MEMORY_LIMIT = 14 * 2**30
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "MALLOC_TRIM_THRESHOLD_": str(2**17)}  # for memory
PEAK_GROWTH, TWICE, KEPT = 1.15, 1.40, 1.05  # the bars


@dataclass(frozen=True)
class Setting:
    backbone: str = "tf_efficientnet_lite0"
    dimensions: int = 512
    pixels: int = 112
    chunk: int = 32
    repeats: int = 5


@dataclass(frozen=True)
class Case:
    measure: str  # "memory" or "time"
    batch: int
    ways: tuple[str, ...]  # one for memory; for time those that take turns
    plain_batch: int = 0  # for time: images that the plain way embeds


QUICK = Setting(pixels=32, chunk=4, repeats=2)


# ---------------------------------------------------------------------------------------------- in a process of its own


class Bench:
    """A model, a batch, and the ways to its gradient."""

    def __init__(self, setting: Setting, batch: int) -> None:
        from shortlist import RecallAtKLoss
        from shortlist.model import Embedder

        torch.manual_seed(0)
        self.setting = setting
        self.model = Embedder(setting.backbone, dim=setting.dimensions, image_size=setting.pixels)
        self.loss = RecallAtKLoss()
        self.pixels = torch.randint(256, (batch, 3, setting.pixels, setting.pixels), dtype=torch.uint8)
        self.labels = torch.arange(batch) // 4

    def way(self, name: str, batch: int) -> Callable[[], None]:
        pixels, labels = self.pixels[:batch], self.labels[:batch]
        if name == "plain":
            return lambda: self.loss(self.model(pixels), labels).backward()
        from shortlist.batches.large_batch import LargeBatchStep

        step = LargeBatchStep(self.model, self.loss, self.setting.chunk, keep_graphs=name == "kept")

        def run() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # out of memory, it would continue with less: not what is measured here
                out = step(pixels, labels)
            assert out.kept == (out.chunks if name == "kept" else 0)

        return run


def measure_memory(bench: Bench, case: Case) -> dict[str, Any]:
    (name,) = case.ways
    for _ in range(2):  # libraries load, thread pools start, kernels for a chunk are made: part of the idle process
        bench.way(name, min(case.batch, bench.setting.chunk))()
    bench.model.zero_grad(set_to_none=True)
    run = bench.way(name, case.batch)
    ctypes.CDLL(None).malloc_trim(0)
    idle = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    run()
    return {"megabytes": (_status("VmHWM") - idle) / 2**20}


def measure_time(bench: Bench, case: Case) -> dict[str, Any]:
    from shortlist.batches.memory import reuse_freed_memory

    reuse_freed_memory()
    images = {name: case.plain_batch if name == "plain" else case.batch for name in case.ways}
    runs = {name: bench.way(name, number) for name, number in images.items()}
    seconds: dict[str, list[float]] = {name: [] for name in case.ways}  # an image
    for turn in range(bench.setting.repeats + 1):
        for name, run in runs.items():
            bench.model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            run()
            if turn > 0:  # the first one warms up
                seconds[name].append((time.perf_counter() - start) / images[name])
    ratios = {
        name: statistics.median(ours / plain for ours, plain in zip(seconds[name], seconds["plain"], strict=True))
        for name in case.ways
        if name != "plain"
    }
    rates = {name: 1 / statistics.median(values) for name, values in seconds.items()}
    return {"images_a_second": rates, "times_plain": ratios, "seconds_an_image": seconds}


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    import psutil

    from shortlist.batches.memory import is_out_of_memory

    bench = Bench(setting, case.batch)
    limit = _status("VmSize") + min(MEMORY_LIMIT, psutil.virtual_memory().available * 9 // 10)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        return (measure_memory if case.measure == "memory" else measure_time)(bench, case)
    except Exception as error:
        if not is_out_of_memory(error) and not str(error).startswith("Out of memory"):
            raise
        return {"out_of_memory": True}


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


# ------------------------------------------------------------------------------------------------------- all of them


Results = dict[Case, dict[str, Any]]


def memory_cases(batches: list[int]) -> Iterator[Case]:
    for name in WAYS:
        for batch in batches:
            yield Case("memory", batch, (name,))


def time_case(batch: int, results: Results) -> Case:
    """All ways that fit; plain at the largest batch where it does."""

    def fits(name: str, size: int) -> bool:
        return "out_of_memory" not in results.get(Case("memory", size, (name,)), {})

    known = [case.batch for case in results if case.ways == ("plain",) and fits("plain", case.batch)]
    plain_batch = batch if fits("plain", batch) else max(size for size in known if size < batch)
    return Case("time", batch, tuple(name for name in WAYS if name == "plain" or fits(name, batch)), plain_batch)


def show(case: Case, result: dict[str, Any]) -> None:
    if "out_of_memory" in result:
        print(f"{case.measure:6} {case.batch:5} {' '.join(case.ways):6}   out of memory", flush=True)
    elif case.measure == "memory":
        print(f"memory {case.batch:5} {case.ways[0]:6} {result['megabytes']:9.0f} MB", flush=True)
    else:
        at = f" (plain at {case.plain_batch})" if case.plain_batch != case.batch else ""
        for name in case.ways:
            ratio = f"{result['times_plain'][name]:6.2f} x plain{at}" if name != "plain" else ""
            print(f"time   {case.batch:5} {name:6} {result['images_a_second'][name]:9.1f} images/s {ratio}", flush=True)


def show_bars(setting: Setting, results: Results) -> None:
    def line(text: str, found: float, bar: float) -> None:
        print(f"{text:64} {found:5.2f} x   bar {bar:.2f} x   {'met' if found <= bar else 'MISSED'}")

    peaks = {case.batch: result.get("megabytes") for case, result in results.items() if case.ways == ("twice",)}
    few = 4 * setting.chunk
    largest = max(peaks, default=few)
    if largest > few and peaks.get(few) and peaks[largest]:
        line(f"peak memory, nothing kept, batch {largest} / batch {few}", peaks[largest] / peaks[few], PEAK_GROWTH)
    for name, text, bar in (("twice", "embedded twice", TWICE), ("kept", "all graphs kept", KEPT)):
        ratios = {
            case.batch: result["times_plain"][name]
            for case, result in results.items()
            if case.measure == "time"
            and case.batch == case.plain_batch >= few
            and name in result.get("times_plain", {})
        }
        if ratios:
            worst = max(ratios, key=lambda batch: ratios[batch])
            line(f"time an image, {text} / plain, worst at batch {worst}", ratios[worst], bar)


def load(setting: Setting) -> Results:
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = found["rows"] if found.get("setting") == asdict(setting) else []
    cases = (row.pop("case") for row in rows)
    return {Case(**case | {"ways": tuple(case["ways"])}): row for case, row in zip(cases, rows, strict=True)}


def save(setting: Setting, results: Results) -> None:
    rows = [{"case": asdict(case)} | result for case, result in results.items()]
    RESULTS.parent.mkdir(exist_ok=True)
    unfinished = RESULTS.with_suffix(".tmp")
    unfinished.write_text(json.dumps({"setting": asdict(setting), "rows": rows}, indent=1) + "\n")
    unfinished.replace(RESULTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--bars", action="store_true", help="only the cases of the bars")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing is written")
    parser.add_argument("--again", action="store_true", help="measure again what results/step.json has already")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        setting, case = json.loads(arguments.case)
        print(json.dumps(measure(Setting(**setting), Case(**case))))
        return
    setting = QUICK if arguments.quick else Setting()
    few, batches = 4 * setting.chunk, [16, 40] if arguments.quick else arguments.batches
    results = {} if arguments.quick else load(setting)

    def run(case: Case) -> None:
        if arguments.again or case not in results:
            results[case] = run_alone(
                __file__, [asdict(setting), asdict(case)], GIVE_BACK if case.measure == "memory" else None
            )
            if not arguments.quick:
                save(setting, results)
        show(case, results[case])

    of_bars = [Case("memory", batch, ("twice",)) for batch in (few, batches[-1])]
    for case in of_bars if arguments.bars else memory_cases(batches):
        run(case)
    for batch in [batch for batch in (few, 392) if batch < batches[-1]] if arguments.bars else batches:
        run(time_case(batch, results))
    show_bars(setting, results)
    if arguments.quick:
        print("(of sizes that say nothing about the bars)")


if __name__ == "__main__":
    main()

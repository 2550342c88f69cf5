"""Whether this processor executes the bfloat16 instructions that it announces.

Some virtual machines announce AMX and do not execute it: torch and oneDNN believe the announcement, and the kernel
ends the process with SIGILL at the first bfloat16 product. What could end a process is therefore tried in another one.
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from shortlist.cache import cache_folder
from shortlist.errors import ConfigError
from shortlist.files import write_text_atomically

VARIABLE, CAP = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"  # bfloat16 without AMX
PROGRAM = "from shortlist.processor import try_products; try_products()"
PATIENCE = 120.0  # seconds for a child, most of which it spends importing torch
_FATAL = {-signal.SIGILL, -signal.SIGSEGV, -signal.SIGFPE, 0xC000001D}  # what the processor does to a process; Windows


@functools.cache
def require_bfloat16() -> None:
    """Make sure that bfloat16 products on the CPU do not end this process; call it before the first one.

    A child process computes some. That is done once per processor and version of torch: the answer is kept in the
    cache folder. Where the child dies, but not without AMX, this process is told to do without AMX, too: the
    environment variable ONEDNN_MAX_CPU_ISA is set for it and its future children. This is the one setting of the
    process that shortlist changes. It has no effect once oneDNN has begun to work, so a copy of this process tries it
    first.

    Where nothing can be found out (the child cannot be started, fails or takes too long), a warning says so.

    Raises:
        ConfigError: a bfloat16 product would end this process.
    """
    if _survives(None):
        return
    problem = "This processor does not execute the bfloat16 instructions that it announces"
    if not _survives(CAP):
        raise ConfigError(f"{problem}, so a product would end the process: use float32.")
    if not _copy_survives(os.environ.get(VARIABLE, CAP)):
        raise ConfigError(
            f"{problem}, and it is too late to tell this process: set {VARIABLE}={CAP} in the environment before "
            "starting it, or use float32."
        )
    os.environ.setdefault(VARIABLE, CAP)


def try_products() -> None:
    """Compute what a model computes in bfloat16 on a CPU, forward and backward."""
    _no_core_dump()
    torch.set_num_threads(1)
    for size in (64, 256):
        matrix = torch.ones(size, size, dtype=torch.bfloat16, requires_grad=True)
        (matrix @ matrix).sum().backward()  # type: ignore[no-untyped-call]
    heads = torch.ones(2, 4, 64, 32, dtype=torch.bfloat16, requires_grad=True)
    functional.scaled_dot_product_attention(heads, heads, heads).sum().backward()  # type: ignore[no-untyped-call]
    layers = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64 * 12 * 12, 128))
    with torch.autocast("cpu", torch.bfloat16):
        vectors = layers(torch.ones(8, 3, 16, 16))
    vectors.sum().backward()


def _survives(isa: str | None) -> bool:
    """Whether a process survives bfloat16 products, with oneDNN's instruction set capped or not: as cached, or tried.

    Only an answer is cached: where there is none, the products are taken to work.
    """
    facts = {"processor": _processor(), "kernel": platform.release(), "torch": torch.__version__, VARIABLE: isa}
    file = _cache_file(facts)
    known = _read_answer(file)
    if known is None:
        known = _try_in_a_child(isa)
        if known is None:
            return True
        _keep_answer(file, {**facts, "survives": known})
    return known


def _try_in_a_child(isa: str | None) -> bool | None:
    """None: it could not be found out."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_MAX_CPU_ISA")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # it imports what this process imports
    if isa is not None:
        environment[VARIABLE] = isa
    try:
        child = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error).partition("\n")[0]
    else:
        if child.returncode in {0, *_FATAL}:
            return child.returncode == 0
        problem = (child.stderr.strip().splitlines() or [f"it ended with {child.returncode}"])[-1]
    warnings.warn(
        f"Could not find out whether bfloat16 works on this processor; assuming that it does. ({problem})",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _copy_survives(isa: str) -> bool:
    """Whether a copy of this process, as far as it has come, survives a product once its environment has the cap."""
    if "fork" not in multiprocessing.get_all_start_methods() or multiprocessing.current_process().daemon:
        return False  # it cannot be copied
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the copy does without
        copy = multiprocessing.get_context("fork").Process(target=_try_in_a_copy, args=(isa,), daemon=True)
        copy.start()
    copy.join(PATIENCE)
    if copy.exitcode is None:
        copy.kill()
        copy.join()
    return copy.exitcode == 0


def _try_in_a_copy(isa: str) -> None:
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    _no_core_dump()
    os.environ[VARIABLE] = isa
    torch.set_num_threads(1)  # a copy has none of the others
    _multiply()


def _multiply() -> None:
    """The least that needs the instructions."""
    matrix = torch.ones(64, 64, dtype=torch.bfloat16)
    matrix @ matrix


def _no_core_dump() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _processor() -> str:
    """The processor's name, and a digest of the instructions that it announces."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    facts = dict(
        reversed([(name.strip(), value.strip()) for name, _, value in (each.partition(":") for each in lines)])
    )
    flags = hashlib.sha256(facts.get("flags", facts.get("Features", "")).encode()).hexdigest()[:16]
    return f"{facts.get('model name', platform.machine())}, flags {flags}"


def _cache_file(facts: dict[str, str | None]) -> Path | None:
    try:
        folder = cache_folder("processor")
    except RuntimeError:  # there is no home
        return None
    return folder / f"bfloat16-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"


def _read_answer(file: Path | None) -> bool | None:
    try:
        survives = None if file is None else json.loads(file.read_text(encoding="utf-8"))["survives"]
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged
        return None
    return survives if isinstance(survives, bool) else None


def _keep_answer(file: Path | None, answer: dict[str, str | bool | None]) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, json.dumps(answer, indent=2) + "\n")
    except OSError:
        return  # it is found out again

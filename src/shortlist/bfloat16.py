"""Check that this processor executes the bfloat16 instructions that it reports.

Some virtual machines report AMX but do not execute it. torch and oneDNN rely on the report, and the kernel ends the
process with SIGILL at the first bfloat16 matrix product. The check therefore runs in another process.
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
from shortlist.errors import ConfigError, RunError
from shortlist.files import read_json, write_json

VARIABLE, CAP = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"  # bfloat16 without AMX
PROGRAM = "from shortlist.bfloat16 import try_products; try_products()"
TIMEOUT = 120.0  # seconds for a child process, which spends most of its time importing torch
# Exit codes of a process that executed an invalid instruction; the last one is STATUS_ILLEGAL_INSTRUCTION of Windows.
_FATAL = {-signal.SIGILL, -signal.SIGSEGV, -signal.SIGFPE, 0xC000001D}


@functools.cache
def require_bfloat16() -> None:
    """Ensure that bfloat16 matrix products on the CPU do not crash this process. Call it before the first product.

    A child process computes some products. This is done once per processor and version of torch; the result is stored
    in the cache folder. If the child crashes with AMX but not without it, AMX is disabled for this process and its
    future children by setting the environment variable ONEDNN_MAX_CPU_ISA. This is the only process-wide setting that
    shortlist changes. It has no effect once oneDNN is initialised, so a fork of this process tries it first.

    If the check itself fails (the child cannot be started, fails or times out), a warning is issued.

    Raises:
        ConfigError: A bfloat16 product would crash this process.
    """
    if _survives(None):
        return
    problem = "This processor does not execute the bfloat16 instructions that it reports"
    if not _survives(CAP):
        raise ConfigError(f"{problem}, so a bfloat16 product would crash the process. Use float32.")
    if not _fork_survives(os.environ.get(VARIABLE, CAP)):
        raise ConfigError(
            f"{problem}, and oneDNN is already initialised in this process, so they cannot be disabled. Set "
            f"{VARIABLE}={CAP} in the environment before starting the process, or use float32."
        )
    os.environ.setdefault(VARIABLE, CAP)


def try_products() -> None:
    """Compute the bfloat16 operations of typical models on the CPU, forward and backward."""
    _disable_core_dumps()
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
    """Return whether a process survives bfloat16 products, from the cache or by trying it in a child process.

    If the child gives no result, nothing is cached and the products are assumed to work.

    Args:
        isa: Value of ONEDNN_MAX_CPU_ISA, or None to leave oneDNN's instruction set unrestricted.
    """
    facts = {"processor": _processor(), "kernel": platform.release(), "torch": torch.__version__, VARIABLE: isa}
    file = _cache_file(facts)
    known = _read_result(file)
    if known is None:
        known = _try_in_child(isa)
        if known is None:
            return True
        _write_result(file, {**facts, "survives": known})
    return known


def _try_in_child(isa: str | None) -> bool | None:
    """Return whether a child process survives bfloat16 products; None if the check failed."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_MAX_CPU_ISA")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # the child imports the same modules as this process
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
            timeout=TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error).partition("\n")[0]
    else:
        if child.returncode in {0, *_FATAL}:
            return child.returncode == 0
        problem = (child.stderr.strip().splitlines() or [f"the check ended with exit code {child.returncode}"])[-1]
    warnings.warn(
        f"Could not check whether bfloat16 works on this processor; assuming that it does. ({problem})",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _fork_survives(isa: str) -> bool:
    """Return whether a fork of this process survives a product after setting ONEDNN_MAX_CPU_ISA."""
    if "fork" not in multiprocessing.get_all_start_methods() or multiprocessing.current_process().daemon:
        return False  # this process cannot be forked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which the fork does not use
        fork = multiprocessing.get_context("fork").Process(target=_try_in_fork, args=(isa,), daemon=True)
        fork.start()
    fork.join(TIMEOUT)
    if fork.exitcode is None:
        fork.kill()
        fork.join()
    return fork.exitcode == 0


def _try_in_fork(isa: str) -> None:
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    _disable_core_dumps()
    os.environ[VARIABLE] = isa
    torch.set_num_threads(1)  # the other threads do not exist in a fork
    _multiply()


def _multiply() -> None:
    """Compute the smallest product that uses the instructions."""
    matrix = torch.ones(64, 64, dtype=torch.bfloat16)
    matrix @ matrix


def _disable_core_dumps() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _processor() -> str:
    """Return the processor's name and a digest of the instruction sets that it reports."""
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
    except RuntimeError:  # no home folder
        return None
    return folder / f"bfloat16-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"


def _read_result(file: Path | None) -> bool | None:
    try:
        survives = None if file is None else read_json(file)["survives"]
    except (OSError, RunError, KeyError, TypeError):  # missing or damaged
        return None
    return survives if isinstance(survives, bool) else None


def _write_result(file: Path | None, result: dict[str, str | bool | None]) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, result)
    except OSError:
        return  # the check is repeated next time

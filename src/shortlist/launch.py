"""Join the processes that `torchrun` or `accelerate launch` has started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by the launchers for each process
TIMEOUT = timedelta(minutes=30)  # for a process that does not answer; one that has ended is detected immediately

Together = Callable[[], AbstractContextManager[None]]  # `Processes.together`


def is_launched() -> bool:
    """Return whether a launcher has started this process together with others."""
    return all(name in os.environ for name in VARIABLES) and os.environ["WORLD_SIZE"] != "1"


def is_main_process() -> bool:
    """Return whether this is the process that prints messages: the first of those that a launcher has started."""
    return not is_launched() or os.environ["RANK"] == "0"


@contextmanager
def launched() -> Iterator[Together]:
    """Join the processes of a launcher within the context. Without a launcher, do nothing.

    Afterwards, `shortlist.distributed.current_processes` returns them. A process group that exists already is used, and
    not destroyed. Without a launcher, torch is not imported.

    Yields:
        A function that returns a context manager in which an error of one process is raised in all of them.

    Raises:
        RunError: The processes cannot connect to each other.
    """
    if not is_launched():
        yield nullcontext
        return

    import torch
    from torch import distributed as dist

    from shortlist.distributed import ProcessLostError, current_processes
    from shortlist.errors import RunError

    joins = not dist.is_initialized()
    if joins:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend, timeout=TIMEOUT)
        except dist.DistError as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            reason = str(error).partition("\n")[0]
            raise RunError(f"The processes cannot meet at MASTER_ADDR:MASTER_PORT, {address}: {reason}") from None
    try:
        yield current_processes().together
    except ProcessLostError:
        joins = False  # NCCL would wait for the lost process
        raise
    finally:
        if joins:
            dist.destroy_process_group()

"""Saving and restoring of gradients and of the state of random number generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

CPU = torch.device("cpu")


def cuda_devices(device: torch.device) -> list[torch.device]:
    """Return the device if it is a CUDA device, else an empty list."""
    return [device] if device.type == "cuda" else []


def random_state(device: torch.device) -> list[Tensor]:
    """Return the states of the random number generators that a model on this device uses."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(cuda) for cuda in cuda_devices(device))]


def set_random_state(device: torch.device, state: list[Tensor]) -> None:
    """Restore states that `random_state` returned."""
    torch.set_rng_state(state[0])
    for cuda, cuda_state in zip(cuda_devices(device), state[1:], strict=True):
        torch.cuda.set_rng_state(cuda_state, cuda)


@contextmanager
def seeded(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Seed the random number generators of a device within the context, and restore their states afterwards."""
    with torch.random.fork_rng(cuda_devices(device)):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed all other GPUs, permanently
        for cuda in cuda_devices(device):
            with torch.cuda.device(cuda):
                torch.cuda.manual_seed(seed)
        yield


class Undo:
    """Restores the random state of the time of its creation, and the gradients that `remember_gradients` saved."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._random_state = device, random_state(device)
        self._gradients: dict[Tensor, Tensor | None] = {}

    def remember_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Save the gradients of these tensors, except those that were saved before."""
        for tensor in tensors:
            if tensor not in self._gradients:
                self._gradients[tensor] = None if tensor.grad is None else tensor.grad.clone()

    def restore(self) -> None:
        """Restore the saved gradients and the random state. This can be repeated."""
        for tensor, gradient in self._gradients.items():
            tensor.grad = None if gradient is None else gradient.clone()
        set_random_state(self._device, self._random_state)


def leaves(result: Tensor) -> Iterator[Tensor]:
    """Yield all leaf tensors that a backward pass from this result adds gradients to."""
    nodes = [torch.autograd.graph.get_gradient_edge(result).node]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        new = {edge[0] for edge in node.next_functions if edge[0] is not None} - seen
        nodes.extend(new)
        seen |= new

"""Gradients that a step adds only if it succeeds, and the tensors that receive them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor


class NewGradients(AbstractContextManager["NewGradients"]):
    """Context in which tensors collect new gradients, which are added to their previous gradients at its end.

    If an exception leaves the context, the previous gradients are restored.
    """

    def __init__(self) -> None:
        self._before: dict[Tensor, Tensor | None] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, in the order in which they were passed to `collect`."""
        return list(self._before)

    def collect(self, tensors: Iterable[Tensor]) -> None:
        """Set aside the gradients of tensors that have not been passed before."""
        for tensor in tensors:
            if tensor not in self._before:
                self._before[tensor], tensor.grad = tensor.grad, None

    def discard(self) -> None:
        """Discard all gradients that were collected so far."""
        for tensor in self._before:
            tensor.grad = None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for tensor, before in self._before.items():
            if kind is not None or tensor.grad is None:
                tensor.grad = before
            elif before is not None:
                tensor.grad = before.add_(tensor.grad)


def leaves(result: Tensor) -> Iterator[Tensor]:
    """Yield all leaf tensors that a backward pass from this result adds gradients to.

    Their order depends only on the structure of the graph, so it is the same in all processes.
    """
    nodes = [torch.autograd.graph.get_gradient_edge(result).node]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)

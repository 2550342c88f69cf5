"""Division of the queries of a batch among processes that each have all of its embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor


class Sharing:
    """A single process, which ranks all queries, and the interface of a process that ranks a part of them."""

    queries = slice(None)  # part of the queries, in ascending order of their number of positives

    def sum(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the sum of the results of `compute` in all processes."""
        return compute()

    def sum_gradient(self, gradient: Tensor, embeddings: Tensor) -> Tensor:
        """Return the sum over all processes of a gradient with respect to some embeddings, (N, d).

        If the embeddings are those of the shared batch itself, rows that this process does not need may be 0.
        """
        return gradient

    def concatenate(self, values: Tensor) -> Tensor:
        """Return the values, (n,), of all processes."""
        return values


_current: ContextVar[Sharing] = ContextVar("sharing", default=Sharing())  # noqa: B039 - it has no state


def current_sharing() -> Sharing:
    """Return how queries are divided in the current context; by default, this process ranks all of them."""
    return _current.get()


@contextmanager
def shared_queries(sharing: Sharing) -> Iterator[None]:
    """Divide the queries of all losses computed in the `with` block. All processes must compute the same losses."""
    token = _current.set(sharing)
    try:
        yield
    finally:
        _current.reset(token)

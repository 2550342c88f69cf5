"""When memory runs out, the large-batch step continues with smaller chunks, and its gradient is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shortlist.batches import large_batch
from shortlist.batches.large_batch import LargeBatchStep
from shortlist.batches.memory import GraphSize
from shortlist.errors import RunError
from tests.batches.steps import (
    LOSSES,
    Proxies,
    Residual,
    conv_net,
    difference,
    make,
    mlp,
    plain_step,
    some_images,
    some_labels,
    take_gradients,
)

EXACT = 1e-9
ERRORS = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory\nfrom there"),
    "python": MemoryError(),
}
each_error = pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS.keys())


class Holds(nn.Module):
    """Raises an error for more images than it holds; optionally only if there is a graph."""

    def __init__(self, most: int, error: Exception, with_graph_only: bool = False) -> None:
        super().__init__()
        self.most, self.error, self.with_graph_only = most, error, with_graph_only

    def forward(self, images: Tensor) -> Tensor:
        if len(images) > self.most and (torch.is_grad_enabled() or not self.with_graph_only):
            raise self.error
        return images


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, owner: FailsBackward) -> Tensor:
        ctx.owner = owner
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        ctx.owner.calls += 1
        if ctx.owner.calls in ctx.owner.failing:
            raise torch.OutOfMemoryError("out of memory in backward")
        return gradient[0], None


class FailsBackward(nn.Module):
    """An identity, some of whose backward passes fail."""

    def __init__(self, *failing: int) -> None:
        super().__init__()
        self.failing, self.calls = failing, 0

    def forward(self, features: Tensor) -> Tensor:
        return _FailsBackward.apply(features, self)


def net(first: nn.Module) -> Callable[[], nn.Module]:
    """A model with random layers behind some module."""
    return lambda: nn.Sequential(first, *conv_net(Residual(nn.Conv2d(8, 8, 1), 0.4), FailsBackward(), nn.Dropout(0.3)))


def expected_gradients(model: nn.Module, loss: nn.Module, chunk_size: int) -> list[Tensor | None]:
    """The gradients of a step without errors, with chunks of this size and the same random state."""
    state = torch.get_rng_state()
    plain_step(model, loss, some_images().split(chunk_size), some_labels())
    torch.set_rng_state(state)
    return take_gradients(model, loss)


@pytest.mark.parametrize(
    ("error", "with_graph_only", "keep"),
    [("gpu", False, False), ("gpu", True, "auto"), ("cpu", False, True), ("cpu", True, 10**6), ("python", True, False)],
)
def test_chunks_are_halved_until_they_fit(error: str, with_graph_only: bool, keep: bool | int | str) -> None:
    holds = Holds(5, ERRORS[error], with_graph_only)
    model, loss = make(net(holds)), make(Proxies)
    step = LargeBatchStep(model, loss, 16, keep_graphs=keep)
    random_state = torch.get_rng_state()
    with pytest.warns(RuntimeWarning) as warned:
        out = step(some_images(), some_labels())
    assert [str(warning.message).split(",")[0] for warning in warned] == [
        *([] if keep is False else ["Out of memory; graphs are no longer kept"]),
        "Out of memory; chunk_size is now 8",
        "Out of memory; chunk_size is now 4",
    ]
    assert all(warning.filename == __file__ for warning in warned)
    first_line = str(ERRORS[error]).partition("\n")[0] or "MemoryError"
    assert str(warned[0].message).endswith(f"({first_line})")
    assert (step.chunk_size, step.keep_graphs, out.chunks) == (4, False, 5)
    found = take_gradients(model, loss)
    torch.set_rng_state(random_state)
    holds.most = 99
    assert difference(found, expected_gradients(model, loss, 4)) < EXACT
    step(some_images(), some_labels())  # the next step uses the size that was found, without a warning


def test_a_failed_backward_pass_leaves_no_gradients() -> None:
    """Neither the model nor a loss whose parameters the step knows only from its graph has any."""
    model, loss = make(lambda: conv_net(nn.Dropout(0.3), FailsBackward(3, 7))), make(Proxies)
    plain_step(model, loss, some_images(seed=7).split(20), some_labels())  # what is to be added to
    held = take_gradients(model, loss)
    model[4].calls = 100
    expected = expected_gradients(model, loss, 2)
    for parameter, gradient in zip([*model.parameters(), *loss.parameters()], held, strict=True):
        parameter.grad = gradient.clone()
    model[4].calls = 0
    step = LargeBatchStep(model, lambda embeddings, labels: loss(embeddings, labels), 8, keep_graphs=False)
    random_state = torch.get_rng_state()
    with pytest.warns(RuntimeWarning, match="out of memory in backward"):
        step(some_images(), some_labels())
    assert model[4].calls == 3 + 4 + 10
    found = [new - old for new, old in zip(take_gradients(model, loss), held, strict=True)]
    assert difference(found, expected) < EXACT
    after = torch.get_rng_state()
    torch.set_rng_state(random_state)
    plain_step(model, loss, some_images().split(2), some_labels())
    assert torch.equal(torch.get_rng_state(), after)


def test_only_the_current_images_are_embedded_again() -> None:
    """An iterator continues where it was when memory ran out."""
    model, read = make(net(Holds(3, MemoryError()))), []

    def chunks() -> Iterator[Tensor]:
        for number, chunk in enumerate(some_images().split(5)):
            read.append(number)
            yield chunk

    step = LargeBatchStep(model, LOSSES["recall"](), 5, keep_graphs=False)
    random_state = torch.get_rng_state()
    with pytest.warns(RuntimeWarning, match="chunk_size is now 2"):
        out = step(chunks(), some_labels())
    assert read == [0, 1, 2, 3]
    assert out.chunks == 12
    found = take_gradients(model)
    torch.set_rng_state(random_state)
    parts = [part for chunk in some_images().split(5) for part in chunk.split(2)]
    plain_step(model, LOSSES["recall"](), parts, some_labels())
    assert difference(found, take_gradients(model)) < EXACT


@each_error
@pytest.mark.parametrize("chunk_size", [1, 3, "auto"])
def test_when_not_even_one_image_fits(error: Exception, chunk_size: int | str) -> None:
    model, loss = make(net(Holds(0, error))), make(Proxies)
    with (
        pytest.warns(RuntimeWarning, match="Out of memory"),
        pytest.raises(RunError, match=r"chunks of one image\. Use smaller images"),
    ):
        LargeBatchStep(model, loss, chunk_size)(some_images(), some_labels())
    assert all(gradient is None for gradient in take_gradients(model, loss))


def test_when_the_loss_does_not_fit() -> None:
    """Smaller chunks do not help, but not keeping graphs does."""
    model, proxies = make(mlp), make(Proxies)

    def loss(embeddings: Tensor, labels: Tensor) -> Tensor:
        if step.keep_graphs is not False or not enough:
            raise MemoryError
        return proxies(embeddings, labels)

    enough = True
    step = LargeBatchStep(model, loss, 6, keep_graphs=True)
    with pytest.warns(RuntimeWarning, match="graphs are no longer kept"):
        step(some_images(), some_labels())
    assert difference(take_gradients(model, proxies), expected_gradients(model, proxies, 6)) < EXACT
    enough = False
    with pytest.raises(RunError, match=r"Out of memory in the loss.*Use a smaller batch"):
        step(some_images(), some_labels())
    assert step.chunk_size == 6


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("no"), KeyError("memory")])
def test_other_errors_pass(error: Exception) -> None:
    step = LargeBatchStep(make(net(Holds(5, error))), LOSSES["recall"](), 6)
    with pytest.raises(type(error)) as caught:
        step(some_images(), some_labels())
    assert caught.value is error
    assert (step.chunk_size, step.keep_graphs) == (6, "auto")


# Automatic chunk size


def graph_of(model: nn.Module, images: Tensor) -> int:
    with GraphSize([*model.parameters(), *model.buffers(), images]) as graph:
        model(images)
    return graph.bytes


def test_automatic_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk may use half of the memory, regardless of the size of the tensor that it is a part of."""
    model, images, loss = make(conv_net), some_images(), make(Proxies)
    of_two = graph_of(model, images[:2])
    monkeypatch.setattr(large_batch, "available_memory", lambda device: 5 * of_two)
    for batch in (images, images.repeat(50, 1, 1, 1)[:20], iter(images.split(10))):
        random_state = torch.get_rng_state()
        step = LargeBatchStep(model, loss, "auto")
        step(batch, some_labels())
        assert step.chunk_size == 5
        after = torch.get_rng_state()
        torch.set_rng_state(random_state)
        torch.randint(2**62, ())
        assert torch.equal(torch.get_rng_state(), after)  # one number is drawn, as for a size that is given
        assert difference(take_gradients(model, loss), expected_gradients(model, loss, 5)) < EXACT
    monkeypatch.setattr(large_batch, "available_memory", lambda device: 10**12)
    step = LargeBatchStep(model, loss, "auto")
    step(images[:4], some_labels()[:4])
    assert step.chunk_size == large_batch.AUTOMATIC_CHUNK["cpu"]


@each_error
def test_automatic_chunk_size_where_two_images_do_not_fit(error: Exception) -> None:
    model = make(net(Holds(1, error)))
    step = LargeBatchStep(model, LOSSES["recall"](), "auto")
    expected = expected_gradients(model, LOSSES["recall"](), 1)
    with pytest.warns(RuntimeWarning, match="chunk_size is now 1"):
        step(some_images(), some_labels())
    assert step.chunk_size == 1
    assert difference(take_gradients(model), expected) < EXACT

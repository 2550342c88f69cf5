"""Kinds of images that the large-batch step accepts, and when it reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from shortlist.batches.by_size import Images
from shortlist.batches.large_batch import LargeBatchStep
from shortlist.errors import ModelError, RunError
from tests.batches.steps import (
    LOSSES,
    Proxies,
    conv_net,
    difference,
    dropping_conv_net,
    make,
    mlp,
    plain_step,
    some_images,
    some_labels,
    take_gradients,
)

EXACT = 1e-9


def some_sizes() -> list[Tensor]:
    """20 images of three sizes, mixed."""
    random = torch.Generator().manual_seed(4)
    return [torch.randn(3, 8 + i % 3, 10 - i % 2 * (i % 3), dtype=torch.float64, generator=random) for i in range(20)]


def gradients_of(
    model: nn.Module, images: Images | Iterator[Images], chunk_size: int, **options: object
) -> list[Tensor]:
    torch.manual_seed(3)
    out = LargeBatchStep(model, LOSSES["recall"](), chunk_size, **options)(images, some_labels())
    assert out.embeddings.shape == (20, 6)
    return take_gradients(model)


# Kinds of images


@pytest.mark.parametrize(
    ("kind", "chunk_size", "keep"),
    [(list, 1, False), (list, 1, True), (tuple, 6, False), (tuple, 6, 10**5), (list, 20, "auto")],
)
def test_images_of_different_sizes(kind: type, keep: bool | int | str, chunk_size: int) -> None:
    model = make(conv_net)
    out = plain_step(model, LOSSES["recall"](), [image.unsqueeze(0) for image in some_sizes()], some_labels())
    expected = take_gradients(model)
    assert difference(gradients_of(model, kind(some_sizes()), chunk_size, keep_graphs=keep), expected) < EXACT
    step = LargeBatchStep(model, LOSSES["recall"](), chunk_size)
    torch.testing.assert_close(step(some_sizes(), some_labels()).embeddings, out[1])  # in the order of the images


def test_images_of_different_sizes_with_dropout() -> None:
    """The random numbers are replayed for each size of a chunk."""
    model = make(dropping_conv_net)
    once = gradients_of(model, some_sizes(), 6, keep_graphs=True)
    twice = gradients_of(model, some_sizes(), 6, keep_graphs=False)
    assert all(torch.equal(one, other) for one, other in zip(once, twice, strict=True))


@pytest.mark.parametrize(
    ("kind", "keep"), [(torch.stack, False), (torch.stack, "auto"), (list, False), (list, True), (tuple, 10**5)]
)
def test_an_iterator_of_chunks(kind: Callable[..., Images], keep: bool | int | str) -> None:
    """It gives the same gradient as one tensor; chunks that are too large are split."""
    model, images = make(dropping_conv_net), some_images()
    expected = gradients_of(model, images, 6)
    chunks = [kind([*images[start : start + 6]]) for start in range(0, 20, 6)]
    for size in (6, 100):
        assert difference(gradients_of(model, iter(chunks), size, keep_graphs=keep), expected) < EXACT
    smaller = gradients_of(model, images, 3)
    assert difference(gradients_of(model, iter(chunks), 3, keep_graphs=keep), smaller) < EXACT
    assert difference(smaller, expected) > 1e-3  # other random numbers for dropout


def test_uint8_is_passed_to_the_model_unchanged() -> None:
    class Normalise(nn.Module):
        def forward(self, pixels: Tensor) -> Tensor:
            assert pixels.dtype == torch.uint8
            return pixels.double() / 127.5 - 1

    model = make(lambda: nn.Sequential(Normalise(), *mlp()))
    pixels = torch.randint(256, (20, 3, 8, 8), dtype=torch.uint8)
    LargeBatchStep(model, LOSSES["recall"](), 6, keep_graphs=False)(pixels, some_labels())
    assert model[2].weight.grad.abs().max() > 1e-4


# When an iterator is read


class Diary(nn.Module):
    """Records calls of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def forward(self, images: Tensor) -> Tensor:
        self.notes.append(f"embed {len(images)}" + (" with a graph" if torch.is_grad_enabled() else ""))
        return images


@pytest.mark.parametrize("chunk_size", [7, "auto"])
def test_an_iterator_is_read_once_and_chunk_by_chunk(chunk_size: int | str) -> None:
    model = make(lambda: nn.Sequential(Diary(), *mlp()))
    notes = model[0].notes

    def reads() -> Iterator[Tensor]:
        for chunk in some_images().split(7):
            notes.append("read")
            yield chunk
        notes.append("end")

    LargeBatchStep(model, LOSSES["recall"](), chunk_size, keep_graphs=False)(reads(), some_labels())
    trial = ["embed 2 with a graph"] if chunk_size == "auto" else []
    first = ["read", *trial, "embed 7", "read", "embed 7", "read", "embed 6", "end"]
    assert notes == [*first, "embed 7 with a graph", "embed 7 with a graph", "embed 6 with a graph"]


def test_kept_chunks_are_embedded_once() -> None:
    model = make(lambda: nn.Sequential(Diary(), *mlp()))
    LargeBatchStep(model, LOSSES["recall"](), 7, keep_graphs=True)(some_images(), some_labels())
    assert model[0].notes == ["embed 7 with a graph", "embed 7 with a graph", "embed 6 with a graph"]


def test_a_reused_buffer_is_refused() -> None:
    model, buffer = make(mlp), torch.empty(5, 3, 8, 8, dtype=torch.float64)
    chunks = (buffer.copy_(chunk) for chunk in some_images().split(5))
    with pytest.raises(ModelError, match="the images must not be modified"):
        LargeBatchStep(model, LOSSES["recall"](), 5, keep_graphs=False)(chunks, some_labels())


# Errors


@pytest.mark.parametrize("chunk_size", [6, "auto"])
@pytest.mark.parametrize("as_iterator", [False, True])
@pytest.mark.parametrize("number", [19, 23])
def test_wrong_number_of_labels(number: int, as_iterator: bool, chunk_size: int | str) -> None:
    images = some_images(number)
    parts = iter(images.split(6)) if as_iterator else images
    model, loss = make(mlp), make(Proxies)
    with pytest.raises(ValueError, match=r"(19|23|2. or more) images and 20 labels"):
        LargeBatchStep(model, loss, chunk_size)(parts, some_labels())
    assert take_gradients(model, loss) == [None] * 5


def test_images_without_end() -> None:
    def endless() -> Iterator[Tensor]:
        while True:
            yield some_images()

    with pytest.raises(ValueError, match="40 or more images and 20 labels"):
        LargeBatchStep(make(mlp), LOSSES["recall"](), 20)(endless(), some_labels())


@pytest.mark.parametrize("chunk_size", [6, "auto"])
@pytest.mark.parametrize("nothing", [[], iter([]), torch.empty(0, 3, 8, 8)], ids=["list", "iterator", "tensor"])
def test_no_images(nothing: Images, chunk_size: int | str) -> None:
    with pytest.raises(ValueError, match="0 images and 0 labels"):
        LargeBatchStep(mlp(), LOSSES["recall"](), chunk_size)(nothing, torch.empty(0, dtype=torch.long))


def test_errors_of_an_iterator_pass() -> None:
    def broken(error: Exception) -> Iterator[Tensor]:
        yield some_images(6)
        raise error

    model = make(mlp)
    step = LargeBatchStep(model, LOSSES["recall"](), 6)
    with pytest.raises(OSError, match="truncated"):
        step(broken(OSError("truncated")), some_labels())
    # Images cannot be read again, so a smaller chunk would only hide the error.
    with pytest.raises(RunError, match="while reading images") as caught:
        step(broken(MemoryError()), some_labels())
    assert isinstance(caught.value.__cause__, MemoryError)
    assert step.chunk_size == 6

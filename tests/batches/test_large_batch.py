"""The gradient of the large-batch step is that of one plain backward pass; other models and arguments are refused."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shortlist.batches import large_batch
from shortlist.batches.large_batch import LargeBatchStep
from shortlist.batches.memory import GraphSize, available_memory, is_out_of_memory
from shortlist.errors import ConfigError, ModelError, RunError
from tests.batches.steps import (
    LOSSES,
    MODELS,
    Proxies,
    Unit,
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
KEEP = ["none", "all", "some", "auto"]
RANDOM_MODELS = [name for name in MODELS if "dropout" in name or name == "transformer"]
each_model = pytest.mark.parametrize("model", MODELS)
each_keep = pytest.mark.parametrize("keep", KEEP)


def keep_graphs(keep: str, model: nn.Module, chunk: Tensor) -> bool | int | str:
    """The argument for a way of keeping graphs; "some" is enough memory for one and a half graphs."""
    if keep != "some":
        return {"none": False, "all": True, "auto": "auto"}[keep]
    with torch.random.fork_rng([]), GraphSize([*model.parameters(), *model.buffers(), chunk]) as graph:
        model(chunk)
    return graph.bytes * 3 // 2


def large_step(
    model: nn.Module, loss: nn.Module, images: Tensor, chunk_size: int, keep: str = "none", seed: int = 3
) -> tuple[large_batch.StepOutput, list[Tensor | None]]:
    torch.manual_seed(seed)
    step = LargeBatchStep(model, loss, chunk_size, keep_graphs=keep_graphs(keep, model, images[:chunk_size]))
    return step(images, some_labels()), take_gradients(model, loss)


def plain(model: nn.Module, loss: nn.Module, images: Tensor, chunk_size: int, seed: int = 3) -> list[Tensor | None]:
    torch.manual_seed(seed)
    plain_step(model, loss, images.split(chunk_size), some_labels())
    return take_gradients(model, loss)


# The gradient


CASES = [  # every model with every way of keeping graphs, and both with every size of chunks
    (model, keep, (1, 7, 64)[(first + second) % 3])
    for first, model in enumerate(MODELS)
    for second, keep in enumerate(KEEP)
]


@pytest.mark.parametrize(("model", "keep", "chunk_size"), CASES)
def test_gradient_is_that_of_one_backward_pass(model: str, keep: str, chunk_size: int) -> None:
    net, loss, images = make(MODELS[model]), LOSSES["recall"](), some_images()
    torch.manual_seed(3)
    value, embeddings = plain_step(net, loss, images.split(chunk_size), some_labels())
    expected, random_state = take_gradients(net, loss), torch.get_rng_state()
    out, found = large_step(net, loss, images, chunk_size, keep)
    assert difference(found, expected) < EXACT
    torch.testing.assert_close(out.loss, value)
    torch.testing.assert_close(out.embeddings, embeddings)
    assert not out.loss.requires_grad
    assert not out.embeddings.requires_grad
    assert out.chunks == -(-20 // chunk_size)
    assert out.kept == {"none": 0, "some": 1}.get(keep, out.chunks)
    assert torch.equal(torch.get_rng_state(), random_state)  # as if every image had been embedded once


@each_keep
@pytest.mark.parametrize("loss", LOSSES)
def test_any_loss_and_its_own_parameters(loss: str, keep: str) -> None:
    model, head, images = make(dropping_conv_net), make(LOSSES[loss], seed=5), some_images()
    expected, random_state = plain(model, head, images, 6), torch.get_rng_state()
    out, found = large_step(model, head, images, 6, keep)
    assert difference(found, expected) < EXACT
    assert torch.equal(torch.get_rng_state(), random_state)  # neither the model nor SiMix draws from it
    own = found[len(list(model.parameters())) :]
    assert bool(own) == ("prox" in loss or "triple" in loss)
    assert all(gradient is not None and gradient.abs().max() > 1e-3 for gradient in own)
    assert out.loss > 0


def test_without_random_layers_the_gradient_does_not_depend_on_chunks() -> None:
    model, loss, images = make(conv_net), LOSSES["recall"](), some_images()
    expected = plain(model, loss, images, len(images))
    assert difference(large_step(model, loss, images, 3)[1], expected) < EXACT
    # negative control: the gradients of the losses of single chunks do not add up to it
    for chunk, labels in zip(images.split(4), some_labels().split(4), strict=True):
        (loss(model(chunk), labels) / 5).backward()
    assert difference(take_gradients(model), expected) > 0.1


@pytest.mark.parametrize("model", RANDOM_MODELS)
def test_without_the_random_state_the_gradient_would_differ(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, loss, images = make(MODELS[model]), LOSSES["recall"](), some_images()
    expected = plain(net, loss, images, 6)
    chunk = large_batch._Chunk
    monkeypatch.setattr(large_batch, "_Chunk", lambda images, seed, *rest: chunk(images, seed + 1, *rest))
    with pytest.raises(ModelError, match=r"different vectors.*keep_graphs=True"):
        large_step(net, loss, images, 6)
    take_gradients(net)
    monkeypatch.setattr(LargeBatchStep, "_refuse_different_vectors", lambda *_: None)
    assert difference(large_step(net, loss, images, 6)[1], expected) > 1e-2
    assert difference(large_step(net, loss, images, 6, keep="all")[1], expected) < EXACT


def test_other_pixels_in_the_second_pass_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss = make(conv_net), LOSSES["recall"]()
    expected = plain(model, loss, some_images(), 6)
    images = some_images()

    def changes_pixels(embeddings: Tensor, labels: Tensor) -> Tensor:
        images.copy_(some_images(seed=2))
        return loss(embeddings, labels)

    with pytest.raises(ModelError, match="the images must not be modified"):
        LargeBatchStep(model, changes_pixels, 6, keep_graphs=False)(images, some_labels())
    for keep in (True, 10**9):
        images.copy_(some_images())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            LargeBatchStep(model, changes_pixels, 6, keep_graphs=keep)(images, some_labels())
    take_gradients(model)
    images.copy_(some_images())
    monkeypatch.setattr(LargeBatchStep, "_refuse_different_vectors", lambda *_: None)
    LargeBatchStep(model, changes_pixels, 6, keep_graphs=False)(images, some_labels())
    assert difference(take_gradients(model), expected) > 1e-2


class OtherAfter(nn.Module):
    """Multiplies vectors by a factor after some calls."""

    def __init__(self, calls: int, factor: float) -> None:
        super().__init__()
        self.calls, self.factor = calls, factor

    def forward(self, vectors: Tensor) -> Tensor:
        self.calls -= 1
        return vectors if self.calls >= 0 else vectors * self.factor


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, vectors: Tensor) -> Tensor:
        return vectors * self.factor


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("length", [1.0, 1e-3])
@pytest.mark.parametrize("factor", [0.9, float("nan"), float("inf")])
def test_a_model_that_cannot_be_replayed_is_refused(factor: float, length: float, autocast: torch.dtype | None) -> None:
    def step(calls: int, keep: bool) -> LargeBatchStep:
        model = make(lambda: nn.Sequential(mlp(), Scaled(length), OtherAfter(calls, factor)), torch.float32)
        return LargeBatchStep(model, LOSSES["recall"](), 6, keep_graphs=keep, autocast=autocast)

    images = some_images(dtype=torch.float32)
    with pytest.raises(ModelError, match="different vectors for the same images in the second pass"):
        step(calls=4, keep=False)(images, some_labels())
    step(calls=8, keep=False)(images, some_labels())
    step(calls=4, keep=True)(images, some_labels())


@pytest.mark.parametrize(("autocast", "factor"), [(None, 0.9995), (torch.bfloat16, 0.97)])
def test_differences_of_rounding_are_accepted(autocast: torch.dtype | None, factor: float) -> None:
    for length, change in ((1.0, factor), (1e3, factor), (0.0, 1.0)):  # zero vectors are equal, too
        model = make(lambda length=length, change=change: nn.Sequential(mlp(), Scaled(length), OtherAfter(4, change)))
        step = LargeBatchStep(model.float(), LOSSES["recall"](), 6, keep_graphs=False, autocast=autocast)
        step(some_images(dtype=torch.float32), some_labels())


@each_model
def test_which_graphs_are_kept_changes_no_bit(model: str) -> None:
    net, loss, images = make(MODELS[model], torch.float32), LOSSES["recall"](), some_images(dtype=torch.float32)
    (first, none), *others = (large_step(net, loss, images, 6, keep) for keep in KEEP)
    for out, gradients in others:
        assert torch.equal(out.embeddings, first.embeddings)
        assert torch.equal(out.loss, first.loss)
        assert all(torch.equal(one, other) for one, other in zip(gradients, none, strict=True))


class WritesOverItsValues(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        kept = features.sigmoid()  # whose backward pass needs its result
        result = kept * 2
        kept.add_(1)
        return result


@each_keep
def test_what_plain_backward_refuses_is_refused(keep: str) -> None:
    model, loss, images = make(lambda: mlp(WritesOverItsValues())), LOSSES["recall"](), some_images()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(model, loss, images, 6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        large_step(model, loss, images, 6, keep)


class Computer:
    """Memory that graphs of a model take, and that other processes may take; in units of the graph of four images."""

    def __init__(self, model: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.returned = 0.0, 0  # units without any graph; how often freed memory was returned to the system
        self._outputs: list[weakref.ref[Tensor]] = []
        with GraphSize([*model.parameters(), *model.buffers(), images]) as graph:
            model(images[:4])
        self._graph = graph.bytes
        model.register_forward_hook(lambda module, images, output: self._outputs.append(weakref.ref(output)))
        monkeypatch.setattr(large_batch, "available_memory", self._available)
        monkeypatch.setattr(large_batch, "return_freed_memory", self._return)

    def _available(self, device: torch.device) -> float:
        kept = sum(output.requires_grad for each in self._outputs if (output := each()) is not None)
        return (self.free - kept) * self._graph

    def _return(self, device: torch.device) -> None:
        self.returned += 1


def test_a_quarter_of_the_free_memory_is_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(conv_net)
    computer = Computer(model, some_images(), monkeypatch)
    step = LargeBatchStep(model, LOSSES["recall"](), 4)
    for free, kept in ((20.1, 5), (19.9, 4), (8.1, 2), (7.9, 1), (3.9, 0), (20.1, 5)):
        computer.free = free
        assert step(some_images(), some_labels()).kept == kept
    computer.free = 0
    step = LargeBatchStep(model, LOSSES["recall"](), "auto")
    assert step(some_images(), some_labels()).kept == 0
    assert step.chunk_size == 1


def test_memory_is_given_back_once_if_there_is_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it were returned in every step, each step would start with new pages and be slow."""
    model = make(conv_net)
    computer = Computer(model, some_images(), monkeypatch)
    step = LargeBatchStep(model, LOSSES["recall"](), 4)
    for free, returned in ((20.1, 0), (20.1, 0), (16.1, 0), (20.1, 0), (8.1, 1), (8.1, 1), (4.1, 1), (0, 2), (0, 2)):
        computer.free = free
        step(some_images(), some_labels())
        assert computer.returned == returned


def test_graphs_are_dropped_while_another_process_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss, images = make(conv_net, torch.float32), LOSSES["recall"](), some_images(dtype=torch.float32)
    _, expected = large_step(model, loss, images, 4, "none")
    computer = Computer(model, images, monkeypatch)

    def parts() -> Iterator[Tensor]:
        for number, part in enumerate(images.split(4)):
            computer.free = 20.1 if number < 3 else 4.1
            yield part

    torch.manual_seed(3)
    out = LargeBatchStep(model, loss, 4)(parts(), some_labels())
    assert (out.chunks, out.kept) == (5, 1)
    assert computer.returned == 2  # the graphs of the second and the third chunk
    assert all(torch.equal(one, other) for one, other in zip(take_gradients(model, loss), expected, strict=True))


def test_without_psutil_no_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without psutil, the free memory is unknown."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert available_memory(torch.device("cpu")) == 0
    assert LargeBatchStep(make(mlp), LOSSES["recall"](), 6)(some_images(), some_labels()).kept == 0


@pytest.mark.parametrize("message", ["CUBLAS_STATUS_ALLOC_FAILED when calling", "MPS backend out of memory (MPS 2 GB)"])
def test_memory_that_runs_out_on_a_gpu_is_recognised(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message))


def test_an_automatic_chunk_has_room_for_the_largest_images(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = make(conv_net), some_images()
    with GraphSize([*model.parameters(), *model.buffers()]) as graph:
        model(torch.stack([images[0], images[19]]))
    monkeypatch.setattr(large_batch, "available_memory", lambda device: 5.3 * graph.bytes)
    step = LargeBatchStep(model, LOSSES["recall"](), "auto")
    step([images[0], *(image[:, :4, :5] for image in images[1:19]), images[19]], some_labels())
    assert step.chunk_size == 5


@pytest.mark.parametrize("images", [some_images(1), [some_images(1)[0]], iter([some_images(1)])], ids=type)
def test_a_batch_of_one(images: Tensor | list[Tensor] | Iterator[Tensor]) -> None:
    model = make(mlp)
    out = LargeBatchStep(model, lambda vectors, labels: vectors[:, 0].sum(), "auto")(images, torch.zeros(1))
    found = take_gradients(model)
    plain_step(model, lambda vectors, labels: vectors[:, 0].sum(), [some_images(1)], torch.zeros(1))
    assert difference(found, take_gradients(model)) < EXACT
    assert out.chunks == 1


# The same as a plain backward pass


@each_keep
def test_gradients_add_up(keep: str) -> None:
    model, loss, images = make(mlp), make(Proxies), some_images()
    once = plain(model, loss, images, 6)
    run = partial(LargeBatchStep(model, loss, 6, keep_graphs=keep_graphs(keep, model, images[:6])), images)
    run(some_labels())
    run(some_labels())
    assert difference(take_gradients(model, loss), [gradient * 2 for gradient in once if gradient is not None]) < EXACT


@each_keep
def test_inside_no_grad(keep: str) -> None:
    model, loss, images = make(dropping_conv_net), make(Proxies), some_images()
    expected = plain(model, loss, images, 6)
    room = keep_graphs(keep, model, images[:6])
    torch.manual_seed(3)
    with torch.no_grad():
        LargeBatchStep(model, loss, 6, keep_graphs=room)(images, some_labels())
        assert not torch.is_grad_enabled()
    assert difference(take_gradients(model, loss), expected) < EXACT


@each_keep
def test_frozen_parameters_get_no_gradient(keep: str) -> None:
    model, loss, images = make(mlp), make(Proxies), some_images()
    model[1].requires_grad_(False)
    assert difference(large_step(model, loss, images, 6, keep)[1], plain(model, loss, images, 6)) < EXACT
    model.requires_grad_(False)
    room = True if keep == "some" else keep_graphs(keep, model, images)  # there is no graph to have a size
    out = LargeBatchStep(model, loss, 6, keep_graphs=room)(images, some_labels())
    found = take_gradients(model, loss)
    assert difference(found, plain(model, loss, images, 6)) < EXACT
    assert found[:-1] == [None] * 4
    assert out.kept == 0


@each_keep
def test_a_loss_that_does_not_depend_on_the_embeddings(keep: str) -> None:
    """The model gets no gradient, as from `backward`; with zeros, an optimizer would apply weight decay."""
    model, loss, images = make(mlp), make(Proxies), some_images()
    step = LargeBatchStep(
        model, lambda *_: loss.proxies.square().sum(), 6, keep_graphs=keep_graphs(keep, model, images[:6])
    )
    assert step(images, some_labels()).loss == loss.proxies.square().sum()
    assert take_gradients(model) == [None] * 4
    torch.testing.assert_close(loss.proxies.grad, 2 * loss.proxies.detach())
    constant = LargeBatchStep(model, lambda *_: torch.tensor(2.0), 6)(images, some_labels())
    assert constant.loss == 2
    assert take_gradients(model) == [None] * 4


# Normalisation by the batch


def test_batch_norm_in_training_mode_is_refused() -> None:
    model = make(conv_net).train()
    with pytest.raises(ModelError, match=r"BatchNorm2d '1' is in training mode.*Freeze it.*freeze_batch_norm=True"):
        LargeBatchStep(model, LOSSES["recall"](), 6)(some_images(), some_labels())
    assert take_gradients(model) == [None] * 8
    model[1].eval()
    LargeBatchStep(model, LOSSES["recall"](), 6)(some_images(), some_labels())


def test_batch_norm_without_running_statistics_is_refused() -> None:
    """It normalises by the batch even in eval mode."""
    model = make(lambda: mlp(nn.BatchNorm1d(16, track_running_stats=False))).eval()
    with pytest.raises(ModelError, match="has no running statistics"):
        LargeBatchStep(model, LOSSES["recall"](), 6)(some_images(), some_labels())


# Precision


def precise_and_rough(
    dtype: torch.dtype, scaler: torch.amp.GradScaler | None, keep: bool, outer: bool = False
) -> tuple[nn.Module, nn.Module, list[Tensor | None]]:
    """A model and a loss with gradients from a step in a lower precision, and the precise gradients."""
    model, loss, images = make(conv_net, torch.float32), make(Proxies, torch.float32), some_images(dtype=torch.float32)
    precise = plain(model, loss, images, 6)
    step = LargeBatchStep(model, loss, 6, keep_graphs=keep, autocast=dtype, scaler=scaler)
    with torch.autocast("cpu", dtype) if outer else nullcontext():  # whose cache of casts must not lose gradients
        out = step(images, some_labels())
    assert out.embeddings.dtype == torch.float32
    with torch.no_grad():
        error = (out.embeddings - model(images)).abs().max()
    low, high = (1e-3, 5e-2) if dtype == torch.bfloat16 else (5e-5, 1e-3)
    assert low < error < high  # the lower precision was used, and no other one
    return model, loss, precise


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_bfloat16(keep: bool, outer: bool) -> None:
    model, loss, precise = precise_and_rough(torch.bfloat16, None, keep, outer)
    rough = take_gradients(model, loss)
    assert 1e-5 < difference(rough, precise) < 0.05

    def plain_model(chunk: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(chunk).float()

    plain_step(plain_model, loss, some_images(dtype=torch.float32).split(6), some_labels())
    assert difference(rough, take_gradients(model, loss)) < 1e-5


@pytest.mark.parametrize("keep", [False, True])
def test_float16_with_a_scaler(keep: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    model, loss, precise = precise_and_rough(torch.float16, scaler, keep)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()])
    scaled = [parameter.grad.clone() for parameter in optimizer.param_groups[0]["params"]]
    scaler.unscale_(optimizer)
    found = take_gradients(model, loss)
    assert difference(found, precise) < 0.01
    assert difference(scaled, [gradient * 2.0**12 for gradient in found]) < 1e-6


def test_float16_without_a_scaler_is_refused() -> None:
    with pytest.raises(ValueError, match="pass scaler"):
        LargeBatchStep(mlp(), LOSSES["recall"](), autocast=torch.float16)


def test_the_model_ignores_autocast_of_the_caller() -> None:
    model, images = make(conv_net, torch.float32), some_images(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = LargeBatchStep(model, LOSSES["recall"](), 20)(images, some_labels())
    with torch.no_grad():
        torch.testing.assert_close(out.embeddings, model(images), atol=1e-6, rtol=0)


class _Product(torch.autograd.Function):
    """A matrix product whose backward pass is products of its own, which autocast would round."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(features, weight)
        return features @ weight

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor]:
        features, weight = ctx.saved_tensors
        return outer[0] @ weight.T, features.T @ outer[0]


class OwnProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, features: Tensor) -> Tensor:
        return _Product.apply(features, self.weight)


@pytest.mark.parametrize("keep", [False, True])
def test_backward_ignores_autocast_of_the_caller(keep: bool) -> None:
    model, loss, images = make(lambda: mlp(OwnProduct()), torch.float32), make(Proxies, torch.float32), some_images()
    images = images.float()
    expected = plain(model, loss, images, 6)
    with torch.autocast("cpu", torch.bfloat16):
        LargeBatchStep(model, loss, 6, keep_graphs=keep)(images, some_labels())
        rounded = images.flatten(1) @ images.flatten(1).T
    assert rounded.dtype == torch.bfloat16  # negative control: autocast was on
    assert difference(take_gradients(model, loss), expected) < 1e-5


# Wrong arguments


@pytest.mark.parametrize("chunk_size", [0, -1, 2.5, True, "all"])
def test_bad_chunk_size(chunk_size: object) -> None:
    with pytest.raises(ValueError, match=f"chunk_size must be at least 1.*not {chunk_size!r}"):
        LargeBatchStep(mlp(), LOSSES["recall"](), chunk_size)


@pytest.mark.parametrize("keep", [-1, float("nan"), "all", None])
def test_bad_keep_graphs(keep: object) -> None:
    with pytest.raises(ValueError, match=f"keep_graphs must be True.*not {keep!r}"):
        LargeBatchStep(mlp(), LOSSES["recall"](), keep_graphs=keep)


class Pair(nn.Module):
    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return vectors, vectors


def test_labels_that_are_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"labels must be a torch.Tensor, got list: use torch.tensor\(labels\)"):
        LargeBatchStep(make(mlp), LOSSES["recall"](), 6)(some_images(), some_labels().tolist())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "found"), [(lambda vectors, _: 1.0, "not float"), (lambda vectors, _: vectors, r"not of shape \(20, 6\)")]
)
def test_a_loss_that_returns_no_scalar(loss: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=f"The loss must return a tensor with one value, {found}"):
        LargeBatchStep(make(mlp), loss, 6)(some_images(), some_labels())


def test_inside_inference_mode() -> None:
    step, images, labels = LargeBatchStep(make(mlp), LOSSES["recall"](), 6), some_images(), some_labels()
    with torch.inference_mode(), pytest.raises(RunError, match=r"call it outside of torch\.inference_mode"):
        step(images, labels)
    step(images, labels)  # control


class Mean(nn.Module):
    def forward(self, vectors: Tensor) -> Tensor:
        return vectors.mean()


@pytest.mark.parametrize(
    ("last", "found"),
    [(Pair(), "tuple"), (nn.Flatten(0), r"\[36\]"), (Mean(), r"\[\]")],
    ids=["pair", "flat", "scalar"],
)
@pytest.mark.parametrize("as_list", [False, True])
def test_a_model_that_gives_no_vectors(last: nn.Module, found: str, as_list: bool) -> None:
    model = make(lambda: nn.Sequential(mlp(), Unit(), last))
    images = list(some_images()) if as_list else some_images()
    with pytest.raises(ModelError, match=f"one vector for each of 6 images; it returned {found}"):
        LargeBatchStep(model, LOSSES["recall"](), 6)(images, some_labels())

"""What every ranking loss shares: the checks at its door, its place in autograd, its shell as a module."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shortlist.ranking.inputs import check_database, check_temperature, check_vectors
from shortlist.ranking.precision import computed_dtype, full_precision
from shortlist.ranking.relevance import ListedPairs, Relevance, SameLabel
from shortlist.ranking.similarities import DotProducts, MixedProducts, Similarities
from shortlist.ranking.simix import SiMix, VirtualBatch
from shortlist.ranking.tiles import Engine, Head

IndicesTuple = tuple[Tensor, ...]


class Run(Protocol):
    """One pass over the similarities of a batch."""

    def __call__(self, similarities: Similarities, *, relevance: Relevance, backward: bool) -> Tensor:
        """The mean loss over the queries that have a positive. With `backward`, its gradient is pulled back as well."""
        ...


def ranking_loss(
    head: Head,
    embeddings: Tensor,
    labels: Tensor,
    *,
    similarity_temperature: float,
    virtual: VirtualBatch | None = None,
    count_query: bool = False,
    indices_tuple: IndicesTuple | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    engine: Engine | None = None,
) -> Tensor:
    """The mean of a head's loss over all queries that have a positive; 0 if none has. Differentiates once.

    Args:
        head: the loss, as a function of ranks.
        embeddings: (B, d) queries, used as given: whether to normalise is the model's business. Half precision is
            taken, the loss is computed in float32, or in float64 for float64.
        labels: (B,) integers; equal means positive.
        similarity_temperature: tau_2, of the sigmoid on similarity differences.
        virtual: SiMix's virtual examples, which join the batch as queries and as database.
        count_query: leave the query in its own ranking, as the authors' release does.
        indices_tuple: pytorch-metric-learning's mined pairs or triplets; only what they list takes part.
        ref_emb: (N, d) a database of its own. None: the batch is its own database, each query without itself.
        ref_labels: (N,) its labels.
        engine: how to run; the default decides by itself.

    Raises:
        ValueError, TypeError: on bad input, with what is wrong and where.
    """
    check_temperature(similarity_temperature, "similarity_temperature")
    run = partial((engine or Engine()).run, head, temperature=similarity_temperature)
    return streamed_loss(run, embeddings, labels, virtual, count_query, indices_tuple, ref_emb, ref_labels)


def streamed_loss(
    run: Run,
    embeddings: Tensor,
    labels: Tensor,
    virtual: VirtualBatch | None = None,
    count_query: bool = False,
    indices_tuple: IndicesTuple | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
) -> Tensor:
    """What a run over tiles of similarities gives, as a scalar that differentiates once; see `ranking_loss`."""
    check_vectors(embeddings, labels)
    labels = labels.long()
    check_database(embeddings, ref_emb, ref_labels, "ref_emb")
    if count_query and (ref_emb is not None or indices_tuple is not None):
        raise ValueError("count_query needs the batch to be its own database: leave out ref_emb and indices_tuple")
    if virtual is not None:
        if ref_emb is not None or indices_tuple is not None:
            raise ValueError("SiMix needs the batch to be its own database: leave out ref_emb and indices_tuple")
        virtual.check(labels)
        virtual = VirtualBatch(virtual.pairs.long(), virtual.alphas)
        labels = torch.cat((labels, labels[virtual.pairs[:, 0]]))
    relevance: Relevance
    if indices_tuple is not None:
        relevance = ListedPairs(indices_tuple, embeddings, embeddings if ref_emb is None else ref_emb)
    else:
        relevance = SameLabel(labels, None if ref_labels is None else ref_labels.long(), count_query)
    backward = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (embeddings, ref_emb)
    )
    run_here = partial(run, relevance=relevance, backward=backward)
    loss: Tensor = _StreamedLoss.apply(embeddings, ref_emb, virtual, run_here)
    return loss


class _StreamedLoss(torch.autograd.Function):
    """Loss and gradient come out of one stream in forward; backward only scales what forward found."""

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, references: Tensor | None, virtual: VirtualBatch | None, run: partial[Tensor]
    ) -> Tensor:
        dtype = computed_dtype(embeddings, references)
        queries, database = embeddings.to(dtype), None if references is None else references.to(dtype)
        if virtual is None:
            similarities: DotProducts | MixedProducts = DotProducts(queries, database, ctx.needs_input_grad[:2])
        else:
            similarities = MixedProducts(queries, virtual)
        with full_precision(embeddings.device):
            loss = run(similarities)
        gradients = similarities.query_gradient, None if references is None else similarities.database_gradient
        # Keep what backward needs and nothing else: a memory of embeddings may have changed by then.
        needed = zip((embeddings, references), gradients, strict=True)
        ctx.save_for_backward(*(None if gradient is None else each for each, gradient in needed), *gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        found: list[Tensor | None] = []
        for given, gradient in zip(ctx.saved_tensors[:2], ctx.saved_tensors[2:], strict=True):
            scaled = None if gradient is None else (outer[0] * gradient).to(given.dtype)
            found.append(_Once.apply(scaled, given) if scaled is not None and torch.is_grad_enabled() else scaled)
        return found[0], found[1], None, None


class _Once(torch.autograd.Function):
    """The gradient of a ranking loss as its users see it: a tensor that refuses to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, embeddings: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Tensor:
        raise RuntimeError(
            "a ranking loss differentiates once: its second derivative, as a gradient penalty needs it, is not "
            "available. Leave out create_graph=True, or take the penalty of another loss."
        )


class RankingLoss(nn.Module):
    """A head as a module with pytorch-metric-learning's call; inherit, and give it a head.

    Args:
        head: the loss, as a function of ranks.
        similarity_temperature: tau_2, of the sigmoid on similarity differences.
        simix: draws virtual examples for every batch; None for none.
        count_query: leave the query in its own ranking, as the authors' release does.
        engine: how to run; the default decides by itself.
    """

    def __init__(
        self,
        head: Head,
        similarity_temperature: float,
        simix: SiMix | None = None,
        count_query: bool = False,
        engine: Engine | None = None,
    ):
        super().__init__()
        self.head, self.simix, self.count_query, self.engine = head, simix, count_query, engine
        self.similarity_temperature = check_temperature(similarity_temperature, "similarity_temperature")

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """The loss, a scalar; see `ranking_loss` for the arguments."""
        return ranking_loss(
            self.head,
            embeddings,
            labels,
            similarity_temperature=self.similarity_temperature,
            virtual=None if self.simix is None else self.simix(labels),
            count_query=self.count_query,
            indices_tuple=indices_tuple,
            ref_emb=ref_emb,
            ref_labels=ref_labels,
            engine=self.engine,
        )

    def extra_repr(self) -> str:
        shown = ("head", "similarity_temperature", "simix", "count_query")
        return ", ".join(f"{name}={getattr(self, name)}" for name in shown)

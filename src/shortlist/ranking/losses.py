"""Parts shared by all ranking losses: input checks, the autograd function, and the module base class."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shortlist.ranking.batch_warnings import warn_if_not_normalised, warn_without_positives
from shortlist.ranking.inputs import check_database, check_temperature, check_vectors
from shortlist.ranking.precision import computed_dtype, full_precision
from shortlist.ranking.relevance import CountQuery, ListedPairs, Relevance, label_relevance
from shortlist.ranking.sharing import current_sharing
from shortlist.ranking.similarities import DotProducts, MixedProducts, Similarities
from shortlist.ranking.simix import SiMix, VirtualBatch
from shortlist.ranking.tail import LinearTail
from shortlist.ranking.tiles import Engine, Head

IndicesTuple = tuple[Tensor, ...]


class Run(Protocol):
    """One pass over all tiles of similarities of a batch."""

    def __call__(self, similarities: Similarities, *, relevance: Relevance, backward: bool) -> Tensor:
        """Compute the mean loss over the queries that have a positive.

        Args:
            similarities: Source of the tiles of similarities.
            relevance: Positives and competitors of each query.
            backward: Whether to accumulate the gradient in `similarities` as well.
        """
        ...


def ranking_loss(
    head: Head,
    embeddings: Tensor,
    labels: Tensor,
    *,
    similarity_temperature: float,
    virtual: VirtualBatch | None = None,
    count_query: CountQuery = False,
    indices_tuple: IndicesTuple | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    tail: LinearTail | None = None,
    engine: Engine | None = None,
) -> Tensor:
    """Compute the mean of a head's loss over all queries that have a positive.

    The result can be differentiated once; second derivatives are not available.

    Args:
        head: Loss as a function of ranks.
        embeddings: Queries of shape (B, d). They are not normalised here. The loss is computed in float64 for float64
            embeddings and in float32 for all others.
        labels: Integer labels of shape (B,). Items with equal labels are positives of each other. If items have several
            labels, of shape (B, L), padded with -1: items that share a label are positives of each other.
        similarity_temperature: Temperature tau_2 of the sigmoid on similarity differences.
        virtual: SiMix's virtual examples, which are added to the batch as queries and as database items.
        count_query: Whether a query competes in its own ranking, as in the authors' released code. "positive": it is
            also one of its own positives, as in the released code of Smooth-AP.
        indices_tuple: Mined pairs or triplets as in pytorch-metric-learning. Pairs that are not listed are ignored.
        ref_emb: Separate database of shape (N, d). Default: the batch is its own database, and a query is not in its
            own database.
        ref_labels: Labels of the database, of shape (N,).
        tail: Upper bound of the step function that takes the place of the sigmoid on similarity differences.
        engine: Execution settings. Default: chosen by device and batch size.

    Returns:
        The loss, a scalar; 0 if no query has a positive.

    Raises:
        ValueError: If an input has the wrong shape, device or value.
        TypeError: If an input has the wrong type or dtype.
    """
    check_temperature(similarity_temperature, "similarity_temperature")
    run = partial((engine or Engine()).run, head, temperature=similarity_temperature, tail=tail)
    return streamed_loss(run, embeddings, labels, virtual, count_query, indices_tuple, ref_emb, ref_labels)


def streamed_loss(
    run: Run,
    embeddings: Tensor,
    labels: Tensor,
    virtual: VirtualBatch | None = None,
    count_query: CountQuery = False,
    indices_tuple: IndicesTuple | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
) -> Tensor:
    """Check the inputs, and compute the loss by `run`, a pass over all tiles of similarities.

    Embeddings that are not L2-normalised and a batch without a positive pair cause a warning, once per process.

    See `ranking_loss` for the other arguments.
    """
    check_vectors(embeddings, labels)
    labels = labels.long()
    check_database(embeddings, ref_emb, ref_labels, "ref_emb")
    if count_query and (ref_emb is not None or indices_tuple is not None):
        raise ValueError("count_query needs the batch to be its own database: do not pass ref_emb or indices_tuple")
    warn_if_not_normalised(embeddings)
    if virtual is not None:
        if ref_emb is not None or indices_tuple is not None:
            raise ValueError("SiMix needs the batch to be its own database: do not pass ref_emb or indices_tuple.")
        virtual.check(labels)
        virtual = virtual._replace(pairs=virtual.pairs.long())
        labels = torch.cat((labels, virtual.shared_labels(labels)))
    relevance: Relevance
    if indices_tuple is not None:
        relevance = ListedPairs(indices_tuple, embeddings, embeddings if ref_emb is None else ref_emb)
    else:
        relevance = label_relevance(labels, None if ref_labels is None else ref_labels.long(), count_query)
    if not relevance.counts and indices_tuple is None:  # a miner may return no pairs
        warn_without_positives()
    backward = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (embeddings, ref_emb)
    )
    bound_run = partial(run, relevance=relevance, backward=backward)
    loss: Tensor = _StreamedLoss.apply(embeddings, ref_emb, virtual, bound_run, backward)
    return loss


class _StreamedLoss(torch.autograd.Function):
    """Computes loss and gradient in one pass in forward; backward only scales the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        references: Tensor | None,  # a separate database
        virtual: VirtualBatch | None,
        run: partial[Tensor],
        backward: bool,
    ) -> Tensor:
        dtype = computed_dtype(embeddings, references)
        queries, database = embeddings.to(dtype), None if references is None else references.to(dtype)
        needed = [backward and each for each in ctx.needs_input_grad[:2]]
        if virtual is None:
            similarities: DotProducts | MixedProducts = DotProducts(queries, database, needs_gradient=needed)
        else:
            similarities = MixedProducts(queries, virtual)
        sharing = current_sharing()
        with full_precision(embeddings.device):
            loss = sharing.sum(partial(run, similarities))
        # Save only what backward needs: autograd would refuse a memory of embeddings that has been overwritten by then.
        gradients = similarities.query_gradient, similarities.database_gradient
        saved: list[Tensor | None] = [None] * 4
        for place, (source, gradient) in enumerate(zip((embeddings, references), gradients, strict=True)):
            if needed[place] and source is not None and gradient is not None:
                saved[place], saved[place + 2] = source, sharing.sum_gradient(gradient, source)
        ctx.save_for_backward(*saved)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        results: list[Tensor | None] = []
        for source, gradient in zip(ctx.saved_tensors[:2], ctx.saved_tensors[2:], strict=True):
            scaled = None if gradient is None else (outer[0] * gradient).to(source.dtype)
            if scaled is not None and torch.is_grad_enabled():
                scaled = _OnceDifferentiable.apply(scaled, source)
            results.append(scaled)
        return *results, None, None, None


class _OnceDifferentiable(torch.autograd.Function):
    """Identity on the gradient of a ranking loss that raises an error when it is differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, embeddings: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Tensor:
        raise RuntimeError(
            "A ranking loss can be differentiated only once: second derivatives, which a gradient penalty needs, are "
            "not available. Omit create_graph=True, or compute the penalty with another loss."
        )


class RankingLoss(nn.Module):
    """Base class of modules with a head and the call signature of pytorch-metric-learning's losses.

    `CrossBatchMemory` and `DistributedLossWrapper` of that library accept only certain classes. Those in
    `shortlist.pytorch_metric_learning` are accepted, and `metric_loss_class` there derives such a class from your own.

    Args:
        head: Loss as a function of ranks.
        similarity_temperature: Temperature tau_2 of the sigmoid on similarity differences.
        simix: Generator of virtual examples for every batch, or None.
        count_query: Whether a query counts in its own ranking; see `ranking_loss`.
        engine: Execution settings. Default: chosen by device and batch size.
        tail: Upper bound of the step function that takes the place of the sigmoid on similarity differences.
    """

    def __init__(
        self,
        head: Head,
        similarity_temperature: float,
        simix: SiMix | None = None,
        count_query: CountQuery = False,
        engine: Engine | None = None,
        *,
        tail: LinearTail | None = None,
    ):
        super().__init__()
        self.head, self.simix, self.count_query, self.engine = head, simix, count_query, engine
        self.similarity_temperature = check_temperature(similarity_temperature, "similarity_temperature")
        self.tail = tail

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss, a scalar. See `ranking_loss` for the arguments."""
        batch: dict[str, Any] = {
            "embeddings": embeddings,
            "labels": labels,
            "similarity_temperature": self.similarity_temperature,
            "virtual": None if self.simix is None else self.simix(labels),
            "count_query": self.count_query,
            "indices_tuple": indices_tuple,
            "ref_emb": ref_emb,
            "ref_labels": ref_labels,
            "tail": self.tail,
            "engine": self.engine,
        }
        return ranking_loss(self.head_for(batch), **batch)

    def head_for(self, batch: Mapping[str, Any]) -> Head:
        """Return the head for a batch, given as the other arguments of `ranking_loss`."""
        return self.head

    def extra_repr(self) -> str:
        shown = {name: getattr(self, name) for name in ("head", "similarity_temperature", "simix", "count_query")}
        if self.tail is not None:
            shown["tail"] = self.tail
        return ", ".join(f"{name}={value}" for name, value in shown.items())

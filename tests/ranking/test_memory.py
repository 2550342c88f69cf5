"""A memory as a part of the database: compared with the literal formula, and its contents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shortlist.ranking import (
    EmbeddingMemory,
    Engine,
    LinearTail,
    RecallAtKLoss,
    SiMix,
    SmoothAPLoss,
    recall_at_k_loss,
    smooth_ap_loss,
)
from tests import reference
from tests.ranking.losses import assert_same, clusters, unit, value_and_gradient

label_lists = st.lists(st.integers(-2, 2), max_size=6)


@settings(max_examples=20, deadline=None)
@given(
    labels=label_lists.filter(len).map(torch.tensor),
    memory_labels=label_lists.map(lambda labels: torch.tensor(labels, dtype=torch.int64)),
    seed=st.integers(0, 10**6),
    tile_size=st.integers(1, 10),
    prune=st.booleans(),
    count_query=st.booleans(),
    tail=st.booleans(),
)
def test_it_is_the_literal_formula(
    labels: Tensor, memory_labels: Tensor, seed: int, tile_size: int, prune: bool, count_query: bool, tail: bool
) -> None:
    embeddings, memory = unit(len(labels), 3, seed=seed), (unit(len(memory_labels), 3, seed=seed + 1), memory_labels)
    if len(memory_labels) and not tail:  # the bound jumps at ties, which rounding may break
        memory[0][0] = embeddings[0]  # an older copy of an item is not the item itself
    literal = {"memory": memory, "tail": reference.linear_tail(0.05) if tail else None}
    options = {"memory": memory, "tail": LinearTail() if tail else None, "engine": Engine(tile_size, prune=prune)}
    want = value_and_gradient(reference.recall_at_k_loss, embeddings, labels, (1, 3), 2.0, 0.05, count_query, **literal)
    got = value_and_gradient(
        recall_at_k_loss, embeddings, labels, (1, 3), 2.0, 0.05, count_query=count_query, **options
    )
    assert_same(got, want)
    want = value_and_gradient(reference.smooth_ap_loss, embeddings, labels, 0.05, **literal)
    assert_same(value_and_gradient(smooth_ap_loss, embeddings, labels, 0.05, **options), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prune", [True, False])
def test_the_gradient_is_that_of_a_database_whose_memory_is_constant(dtype: torch.dtype, prune: bool) -> None:
    embeddings, labels = clusters(150, 4, 0.9, dtype=dtype), torch.arange(600) // 4
    memory = clusters(150, 4, 1.1, dtype=dtype), torch.arange(600) // 4
    engine = Engine(prune=prune)
    value, gradient = value_and_gradient(recall_at_k_loss, embeddings, labels, memory=memory, engine=engine)
    assert value.dtype == gradient.dtype == dtype
    every = torch.cat((embeddings, memory[0])).double()
    want, whole = value_and_gradient(
        lambda x: recall_at_k_loss(x[:600], labels, memory=(x[600:], memory[1]), engine=Engine(prune=False)), every
    )
    assert not whole[600:].any()  # no gradient reaches the memory
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(value.double(), want, rtol=0, atol=tolerance)
    torch.testing.assert_close(gradient.double(), whole[:600], rtol=0, atol=tolerance)


def test_gradcheck() -> None:
    embeddings, labels = unit(7, 4, seed=5).requires_grad_(), torch.tensor([0, 0, 1, 1, 1, 2, 3])
    memory = unit(5, 4, seed=6), torch.tensor([0, 3, 3, 9, 1])
    options = {"similarity_temperature": 0.3, "memory": memory}
    assert torch.autograd.gradcheck(lambda x: recall_at_k_loss(x, labels, (1, 2), **options), embeddings)
    assert torch.autograd.gradcheck(lambda x: smooth_ap_loss(x, labels, **options), embeddings)


@pytest.mark.parametrize("kind", [RecallAtKLoss, SmoothAPLoss])
def test_a_module_remembers_the_last_batches(kind: type[RecallAtKLoss | SmoothAPLoss]) -> None:
    """Batches of 4 in a memory of 10: at first it is empty, and then the third batch overwrites the first."""
    plain = kind(similarity_temperature=0.1)
    loss = kind(similarity_temperature=0.1, memory=EmbeddingMemory(10, 3).double())
    seen: list[tuple[Tensor, Tensor]] = []
    for step in range(5):
        embeddings, labels = unit(4, 3, seed=step), torch.tensor([0, 0, 1, 1]) + step % 2
        value = value_and_gradient(loss, embeddings, labels)
        if not seen:
            assert_same(value, value_and_gradient(plain, embeddings, labels), 0)
        else:
            last = torch.cat([each for each, _ in seen])[-10:], torch.cat([each for _, each in seen])[-10:]
            options = {"similarity_temperature": 0.1, "memory": last}
            literal = reference.smooth_ap_loss if kind is SmoothAPLoss else reference.recall_at_k_loss
            options |= {} if kind is SmoothAPLoss else {"k": (1, 2, 4, 8, 16)}
            assert_same(value, value_and_gradient(literal, embeddings, labels, **options))
        seen.append((embeddings, labels))


def test_the_memory_is_saved_and_is_not_filled_in_eval_mode() -> None:
    one, other = (RecallAtKLoss(memory=EmbeddingMemory(10, 3)) for _ in range(2))
    batch = unit(4, 3, dtype=torch.float32), torch.tensor([0, 0, 1, 1])
    one(*batch)
    other.load_state_dict(one.state_dict())
    assert one(*batch) == other(*batch) != RecallAtKLoss()(*batch)
    one.eval()(*batch)
    assert one.memory is not None
    assert one.memory.stored == 8
    assert len(one.memory.items()[1]) == 8


def test_the_loss_can_be_differentiated_after_the_batch_was_stored() -> None:
    loss = RecallAtKLoss(memory=EmbeddingMemory(4, 3))
    for step in range(3):
        embeddings = unit(4, 3, seed=step, dtype=torch.float32).requires_grad_()
        value = loss(embeddings, torch.tensor([0, 0, 1, 1]))
        value.backward()
        assert embeddings.grad is not None


def test_invalid_arguments() -> None:
    embeddings, labels = unit(4, 3), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match="size of a memory must be at least 1, got 0"):
        EmbeddingMemory(0, 3)
    with pytest.raises(ValueError, match="A memory of size 3 cannot hold a batch of 4"):
        RecallAtKLoss(memory=EmbeddingMemory(3, 3))(embeddings, labels)
    with pytest.raises(ValueError, match="do not use it with ref_emb, mined pairs or SiMix"):
        RecallAtKLoss(memory=EmbeddingMemory(9, 3), simix=SiMix())(embeddings, labels)
    with pytest.raises(ValueError, match="do not use it with ref_emb, mined pairs or SiMix"):
        RecallAtKLoss(memory=EmbeddingMemory(9, 3))(embeddings, labels, ref_emb=embeddings, ref_labels=labels)
    with pytest.raises(ValueError, match="queries have 3 dimensions but the database 2"):
        recall_at_k_loss(embeddings, labels, memory=(unit(2, 2), torch.tensor([0, 1])))

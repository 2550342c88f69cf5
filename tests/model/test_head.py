"""The head of an embedder: the layers after the pooling, and corrections of fixed weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, normalize

from shortlist.model import CorrectedLinear, Embedder


@pytest.mark.parametrize("options", [{}, {"layer_norm": False, "l2_pooled": True}, {"dim": None}])
def test_pooling_and_head_are_the_embedder(options: dict[str, object]) -> None:
    embedder = Embedder("test_resnet", **{"dim": 8, **options}).eval()
    images = torch.randint(256, (3, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        pooled = embedder.pooled_features(images)
        assert torch.equal(pooled, embedder.pooling(embedder.features(images)))
        assert torch.equal(embedder.head()(pooled), embedder(images))
        expected = nn.functional.normalize(pooled) if embedder.config.l2_pooled else embedder.layer_norm(pooled)
        assert torch.equal(embedder.head().linear_input(pooled), expected)


def test_a_head_shares_its_layers() -> None:
    embedder = Embedder("test_resnet", dim=8)
    assert [id(each) for each in embedder.head().parameters()] == [id(each) for each in embedder.parts()["head"]]


def test_another_head_on_the_same_backbone() -> None:
    embedder = Embedder("test_resnet", dim=8).eval()
    layer = nn.Linear(embedder.layout.channels, 8)
    other = embedder.with_head(embedder.layer_norm, layer)
    images = torch.randint(256, (3, 3, 64, 64), dtype=torch.uint8)
    assert other.backbone is embedder.backbone
    assert other.linear is layer
    assert embedder.linear is not layer
    with torch.no_grad():
        assert torch.equal(other(images), normalize(layer(embedder.layer_norm(embedder.pooled_features(images)))))


def test_the_digest_of_features_does_not_depend_on_the_head() -> None:
    embedder = Embedder("test_resnet", dim=8)
    before = embedder.pooled_digest()
    with torch.no_grad():
        embedder.linear.weight += 1
    assert embedder.pooled_digest() == before
    same = Embedder("test_resnet", dim=4, layer_norm=False)
    same.backbone.load_state_dict(embedder.backbone.state_dict())
    assert same.pooled_digest() == before
    digests = {before, Embedder("test_resnet", dim=8, mean=(0, 0, 0)).pooled_digest()}
    with torch.no_grad():
        embedder.pooling.p += 1
    digests.add(embedder.pooled_digest())
    next(embedder.backbone.parameters()).data += 1
    assert len(digests | {embedder.pooled_digest()}) == 4


@pytest.mark.parametrize("rank", [None, 2])
def test_a_correction_of_fixed_weights(rank: int | None) -> None:
    """W0 + D, or W0 + A B, by hand; initially W0."""
    plain = nn.Linear(6, 4)
    layer, features = CorrectedLinear(plain, rank), torch.randn(5, 6)
    fixed, bias = plain.weight.detach().clone(), plain.bias.detach()
    assert torch.equal(layer(features), linear(features, fixed, bias))
    with torch.no_grad():
        layer.left.normal_()
    added = layer.left if layer.right is None else layer.left @ layer.right
    assert torch.linalg.matrix_rank(layer.weight - fixed) == (4 if rank is None else 2)
    expected = linear(features, fixed + added, bias)
    torch.testing.assert_close(layer(features), expected)
    merged = layer.merged()
    assert type(merged) is nn.Linear
    assert torch.equal(merged(features), layer(features))
    layer(features).sum().backward()
    assert {name for name, each in layer.named_parameters() if each.grad is not None} == (
        {"bias", "left"} if rank is None else {"bias", "left", "right"}
    )
    assert torch.equal(layer.initial, fixed)

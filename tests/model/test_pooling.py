import math

import pytest
import torch
from torch import nn

from shortlist.model import Average, ClassToken, GeM, Max


def literal_gem(values: list[float], p: float, eps: float) -> float:
    return (sum(max(value, eps) ** p for value in values) / len(values)) ** (1 / p)


@pytest.mark.parametrize("p", [1.0, 2.5, 3.0, 7.0])
def test_gem_equals_its_formula(p):
    maps = torch.randn(2, 3, 4, 5, dtype=torch.float64)  # negative values too: they are raised to eps
    found = GeM(p=p, eps=1e-3).double()(maps)
    for image in range(2):
        for channel in range(3):
            expected = literal_gem(maps[image, channel].flatten().tolist(), p, 1e-3)
            assert found[image, channel].item() == pytest.approx(expected, rel=1e-12)


def test_tokens_and_maps_give_the_same_result():
    maps = torch.rand(2, 3, 4, 5)
    tokens = maps.flatten(2).transpose(1, 2)
    for pooling in (GeM(), Average(), Max()):
        torch.testing.assert_close(pooling(maps), pooling(tokens))


def test_average_max_and_class_token():
    tokens = torch.randn(2, 6, 3)
    torch.testing.assert_close(Average()(tokens), torch.stack([image.mean(0) for image in tokens]))
    assert torch.equal(Max()(tokens), torch.stack([image.max(0).values for image in tokens]))
    assert torch.equal(ClassToken()(tokens), torch.stack([image[0] for image in tokens]))


def test_gem_is_between_average_and_maximum():
    maps = torch.rand(2, 3, 4, 5)
    torch.testing.assert_close(GeM(p=1)(maps), Average()(maps))
    torch.testing.assert_close(GeM(p=500)(maps), Max()(maps), rtol=0.01, atol=0)
    assert not torch.allclose(GeM(p=3)(maps), Average()(maps), rtol=0.01)


def test_gem_gradients_are_those_of_the_formula():
    maps = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    gem = GeM(eps=1e-2).double()
    literal_p = gem.p.detach().clone().requires_grad_()
    weights = torch.randn(2, 3, dtype=torch.float64)
    literal = maps.clamp(min=1e-2).pow(literal_p).mean((2, 3)).pow(1 / literal_p)
    expected = torch.autograd.grad((literal * weights).sum(), (maps, literal_p))
    found = torch.autograd.grad((gem(maps) * weights).sum(), (maps, gem.p))
    assert found[1].abs().item() > 1e-3
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("p", [3.0, 20.0])
def test_a_dead_channel_gives_finite_gradients(p):
    maps = torch.zeros(1, 1, 3, 3, requires_grad=True)
    gem = GeM(p=p)
    gem(maps).sum().backward()
    assert torch.isfinite(maps.grad).all()
    assert torch.isfinite(gem.p.grad).all()
    if p == 20:  # the formula as it stands does not
        literal = torch.nn.Parameter(torch.tensor(p))
        maps.clamp(min=1e-6).pow(literal).mean((2, 3)).pow(1 / literal).sum().backward()
        assert not math.isfinite(literal.grad.item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_pooled_in_float32(dtype):
    maps = (torch.rand(2, 3, 8, 8) * 200).to(dtype)  # 200^3 is beyond float16
    for pooling in (GeM(), Average(), Max()):
        found = pooling(maps)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, pooling(maps.float()))
    assert not torch.isfinite(maps.half().pow(3)).all()


def test_p_can_be_fixed():
    assert isinstance(GeM().p, nn.Parameter)
    fixed = GeM(learnable=False)
    assert list(fixed.parameters()) == []
    assert "p" in fixed.state_dict()


def test_invalid_input_is_reported():
    with pytest.raises(ValueError, match="p and eps must be positive"):
        GeM(p=0)
    with pytest.raises(ValueError, match="not features of shape"):
        Average()(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="requires tokens"):
        ClassToken()(torch.zeros(2, 3, 4, 4))

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

from shortlist.errors import ModelError
from shortlist.model import Average, Embedder, GeM, Max


def pixels(number: int = 3, height: int = 64, width: int = 64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (number, 3, height, width), dtype=torch.uint8, generator=generator)


def batch_norms(module: nn.Module) -> list[nn.BatchNorm2d]:
    return [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]


@pytest.mark.parametrize(
    ("backbone", "pooling"),
    [
        ("test_resnet", "gem"),
        ("test_efficientnet", "average"),
        ("test_vit", "gem"),
        ("test_vit", "max"),
        ("test_mambaout", "gem"),
    ],
)
def test_vectors_have_unit_length_and_the_requested_dimension(backbone, pooling):
    vectors = Embedder(backbone, dim=16, pooling=pooling)(pixels(5))
    assert vectors.shape == (5, 16)
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(5))
    assert (vectors[0] - vectors[1]).abs().max() > 1e-4


@pytest.mark.parametrize(("pooling", "module"), [("gem", GeM()), ("average", Average()), ("max", Max())])
def test_the_layers_are_applied_in_order(pooling, module):
    embedder = Embedder("test_resnet", dim=8, pooling=pooling).eval()
    images = pixels()
    with torch.no_grad():
        embedder.layer_norm.bias.normal_()
        normalised = (images / 255 - embedder.mean) / embedder.std
        maps = embedder.backbone.forward_features(normalised)
        vectors = embedder.linear(embedder.layer_norm(module(maps)))
        torch.testing.assert_close(embedder(images), vectors / vectors.norm(dim=1, keepdim=True))


def test_l2_pooled_normalises_pooled_features():
    embedder = Embedder("test_resnet", dim=8, layer_norm=False, l2_pooled=True).eval()
    plain = Embedder("test_resnet", dim=8, layer_norm=False).eval()
    plain.load_state_dict(embedder.state_dict())
    images = pixels()
    with torch.no_grad():
        pooled = embedder.pooling(embedder.features(images))
        torch.testing.assert_close(plain.head().linear_input(pooled), pooled)
        prepared = embedder.head().linear_input(pooled)
        torch.testing.assert_close(prepared, pooled / pooled.norm(dim=1, keepdim=True))
        torch.testing.assert_close(embedder(images), nn.functional.normalize(embedder.linear(prepared)))
        assert (embedder(images) - plain(images)).abs().max() > 1e-4  # the bias counts more
    with pytest.raises(ModelError, match="replaces the layer norm"):
        Embedder("test_resnet", l2_pooled=True)


def test_patches_of_a_vit_are_pooled_without_its_class_token():
    images = pixels()
    for pooling, choose in (("average", lambda tokens: tokens[:, 1:].mean(1)), ("token", lambda tokens: tokens[:, 0])):
        embedder = Embedder("test_vit", dim=None, pooling=pooling, layer_norm=False).eval()
        with torch.no_grad():
            expected = choose(embedder.features(images))
            torch.testing.assert_close(embedder(images), nn.functional.normalize(expected))


def test_register_tokens_are_neither_patches_nor_class_tokens():
    embedder = Embedder("test_vit2", dim=8)
    assert embedder.layout.prefix_tokens == 1
    with pytest.raises(ModelError, match="'test_vit2' has no class token"):
        Embedder("test_vit2", dim=8, pooling="token")


def test_all_layers_before_the_classifier_are_used():
    embedder = Embedder("mobilenetv3_small_050", dim=8, image_size=32)  # has a convolution after its own pooling
    embedder(pixels(2, 32, 32)).sum().backward()
    assert [name for name, value in embedder.named_parameters() if value.grad is None] == []


def test_a_backbone_that_flattens_its_maps(monkeypatch):
    built = []
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *a, **k: built.append(create(*a, **k)) or built[-1])
    embedder = Embedder("convmixer_768_32", dim=8, image_size=28)
    assert len(built) == 1
    assert embedder.features(pixels(1, 28, 28)).shape == (1, 768, 4, 4)


def test_a_backbone_whose_head_cannot_be_removed():
    embedder = Embedder("efficientvit_b0", dim=8, image_size=64)
    embedder(pixels(2)).sum().backward()
    without = {name for name, value in embedder.named_parameters() if value.grad is None}
    assert without == {name for name, value in embedder.named_parameters() if not value.requires_grad}
    assert without
    assert all(name.startswith("backbone.head.") for name in without)


def test_without_linear_layer():
    embedder = Embedder("test_resnet", dim=None, layer_norm=False)
    assert embedder.dim == 96
    assert embedder(pixels()).shape == (3, 96)
    assert embedder.parts()["head"] == []


@pytest.mark.parametrize("backbone", ["test_resnet", "test_vit"])
def test_images_of_different_sizes(backbone):
    embedder = Embedder(backbone, dim=8).eval()
    for height, width in ((64, 64), (96, 64), (160, 224)):
        assert embedder(pixels(2, height, width)).shape == (2, 8)


def test_unsupported_image_sizes_are_reported():
    embedder = Embedder("test_vit", dim=8)
    with pytest.raises(ModelError, match=r"'test_vit' does not support images of 70 x 64 .* multiples of 16"):
        embedder(pixels(1, 70, 64))
    with pytest.raises(ModelError, match=r"100 x 100 .* multiples of 16"):
        Embedder("test_vit", image_size=100)
    padded = Embedder("test_vit", dim=8, image_size=100, backbone_args={"dynamic_img_pad": True})
    assert padded(pixels(1, 70, 64)).shape == (1, 8)


def test_a_backbone_of_one_size_is_built_for_the_size_given():
    embedder = Embedder("mixer_s32_224", dim=8, image_size=64)
    assert embedder.data_config.input_size == (3, 64, 64)
    assert embedder(pixels()).shape == (3, 8)
    with pytest.raises(ModelError, match=r"does not support images of 96 x 64 .* built for 64 x 64"):
        embedder(pixels(1, 96, 64))


def test_uint8_is_normalised_and_floats_are_not():
    embedder = Embedder("test_efficientnet", dim=8, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7)).eval()
    images = pixels()
    kept = images.clone()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)))
    by_hand = (images.float() / 255 - mean) / std
    assert torch.equal(embedder.normalise(images), by_hand)
    assert torch.equal(embedder(images), embedder(by_hand))
    assert not torch.allclose(embedder(images), embedder(images / 255))
    assert torch.equal(images, kept)
    assert embedder.data_config.mean == (0.1, 0.2, 0.3)


def test_normalisation_is_that_of_timm_by_default():
    expected = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg("test_efficientnet").to_dict())
    embedder = Embedder("test_efficientnet")
    assert embedder.data_config.mean == embedder.config.mean == expected["mean"]
    assert embedder.data_config.std == expected["std"]
    assert embedder.data_config.interpolation == expected["interpolation"]
    assert embedder.data_config.crop_pct == expected["crop_pct"]
    assert embedder.data_config.input_size == expected["input_size"]


def test_frozen_batch_norm_stays_frozen_and_trains_its_scale():
    for backbone in ("test_resnet", "test_efficientnet"):  # plain BatchNorm, and timm's with an activation inside
        embedder = Embedder(backbone, dim=8).train()
        layers = batch_norms(embedder)
        before = [(layer.running_mean.clone(), layer.running_var.clone()) for layer in layers]
        embedder(pixels()).sum().backward()
        assert layers
        assert embedder.training
        for layer, (mean, variance) in zip(layers, before, strict=True):
            assert not layer.training
            assert torch.equal(layer.running_mean, mean)
            assert torch.equal(layer.running_var, variance)
            assert layer.weight.grad is not None


def test_batch_norm_that_is_not_frozen_learns_its_statistics():
    embedder = Embedder("test_resnet", dim=8, freeze_batch_norm=False).train()
    first = batch_norms(embedder)[0]
    before = first.running_mean.clone()
    embedder(pixels())
    assert first.training
    assert not torch.equal(first.running_mean, before)


def test_stochastic_depth_only_while_training():
    embedder = Embedder("test_vit", dim=8, drop_path_rate=0.5)
    images = pixels()
    assert not torch.equal(embedder.train()(images), embedder(images))
    assert torch.equal(embedder.eval()(images), embedder(images))


def test_autocast_reaches_the_backbone_and_not_the_head():
    embedder = Embedder("test_resnet", dim=8).eval()
    images = pixels()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        features = embedder.features(images)
        vectors = embedder(images)
        in_halves = embedder.linear(embedder.layer_norm(embedder.pooling(features)))
    assert features.dtype == torch.bfloat16
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
    expected = embedder.linear(embedder.layer_norm(embedder.pooling(features.float())))
    torch.testing.assert_close(vectors, nn.functional.normalize(expected), rtol=0, atol=1e-6)
    assert (vectors - nn.functional.normalize(in_halves.float())).abs().max() > 1e-4
    torch.testing.assert_close(vectors, embedder(images), rtol=0, atol=0.05)


def test_float64():
    embedder = Embedder("test_resnet", dim=8).eval()
    vectors = copy.deepcopy(embedder).double()(pixels())
    assert vectors.dtype == torch.float64
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3, dtype=torch.float64), rtol=1e-14, atol=0)
    torch.testing.assert_close(vectors.float(), embedder(pixels()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backbone", ["test_resnet", "test_vit"])
def test_parts_are_all_parameters_once(backbone):
    embedder = Embedder(backbone, dim=8)
    parts = embedder.parts()
    assert list(parts) == ["backbone", "pooling", "head"]
    listed = [id(parameter) for part in parts.values() for parameter in part]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(parameter) for parameter in embedder.parameters()}
    assert [id(p) for p in parts["pooling"]] == [id(embedder.pooling.p)]
    assert len(parts["head"]) == 4


def test_copies_and_pickles_are_equal_and_separate():
    embedder = Embedder("test_resnet", dim=8).eval()
    images = pixels()
    expected = embedder(images)
    for twin in (copy.deepcopy(embedder), pickle.loads(pickle.dumps(embedder))):
        assert torch.equal(twin(images), expected)
        with torch.no_grad():
            twin.linear.weight.zero_()
    assert torch.equal(embedder(images), expected)


def test_compiles_as_one_graph():
    embedder = Embedder("test_resnet", dim=8).eval()
    compiled = torch.compile(embedder, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(pixels()), embedder(pixels()))


def test_convolutions_are_channels_last():
    convolution = next(m for m in Embedder("test_resnet", dim=8).modules() if isinstance(m, nn.Conv2d))
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)


def test_invalid_tensors_are_reported():
    embedder = Embedder("test_resnet", dim=8)
    with pytest.raises(ValueError, match=r"must be a non-empty tensor \(B, 3, H, W\)"):
        embedder(pixels()[0])
    with pytest.raises(ValueError, match="non-empty"):
        embedder(pixels(0))
    with pytest.raises(TypeError, match=r"not torch.int64"):
        embedder(pixels().long())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backbone": "resnet5O"}, r"no backbone 'resnet5O'; the nearest names are: .*resnet50"),
        ({"backbone": "resnet50.a9_in1k"}, r"no weights 'a9_in1k' for 'resnet50'; known: .*a1_in1k"),
        ({"backbone": "hf-hub:timm/resnet50"}, r"no backbone 'hf-hub"),
        ({"pooling": "gme"}, r"Unknown pooling 'gme'; did you mean 'gem'\?"),
        ({"pooling": "token"}, r"'test_resnet' has no class token .* use 'gem', 'average' or 'max'"),
        ({"dim": 0}, r"dim must be at least 1"),
        ({"image_size": 0}, r"image_size must be"),
        ({"drop_path_rate": 1.5}, r"drop_path_rate must be"),
        ({"mean": (0.5, 0.5)}, r"mean must be three numbers"),
        ({"std": (0.5, 0.0, 0.5)}, r"std must be positive"),
        ({"backbone_args": {"num_classes": 3}}, r"must not contain 'num_classes'"),
        ({"backbone_args": {"act_layer": nn.GELU}}, r"must be JSON-compatible"),
        ({"backbone_args": {"no_such_thing": 1}}, r"cannot build 'test_resnet' with .*'no_such_thing'"),
        ({"backbone": "crossvit_tiny_240"}, r"neither feature maps nor tokens"),
    ],
)
def test_invalid_arguments_are_reported(arguments, message):
    with pytest.raises(ModelError, match=message):
        Embedder(**{"backbone": "test_resnet", **arguments})

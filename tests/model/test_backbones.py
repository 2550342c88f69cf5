"""The backbones of the recipes exist in timm, with the expected tokens, image sizes and normalisation."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

from shortlist.errors import ModelError
from shortlist.model import Embedder

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
RESNET = {"layers": [1, 1, 1, 1]}
VIT = {"depth": 1, "embed_dim": 24, "num_heads": 2}
REGNET = {"depth": 13, "w0": 24, "wa": 36.44, "wm": 2.49, "group_size": 8}

# name, what makes it tiny, mean and std, class and register tokens, an image size besides the usual one
BACKBONES = [
    ("resnet50.tv_in1k", RESNET, IMAGENET, 0, (48, 33)),
    ("resnet101.tv_in1k", RESNET, IMAGENET, 0, (48, 33)),
    ("vit_base_patch32_224.augreg_in21k", VIT, HALF, 1, (96, 64)),
    ("vit_base_patch16_224.augreg_in21k", VIT, HALF, 1, (96, 64)),
    ("vit_base_patch16_clip_quickgelu_224.openai", VIT, CLIP, 1, (96, 64)),
    ("vit_base_patch32_clip_quickgelu_224.openai", VIT, CLIP, 1, (96, 64)),
    ("vit_base_patch16_clip_224.laion2b", VIT, CLIP, 1, (96, 64)),
    ("vit_base_patch14_dinov2.lvd142m", VIT, IMAGENET, 1, (98, 70)),
    ("vit_base_patch14_reg4_dinov2.lvd142m", VIT, IMAGENET, 5, (98, 70)),
    ("regnety_160.swag_lc_in1k", REGNET, IMAGENET, 0, (48, 33)),
]


@pytest.mark.parametrize(
    ("name", "tiny", "statistics", "prefix", "other"), BACKBONES, ids=[each[0] for each in BACKBONES]
)
def test_backbones_of_recipes(
    name: str, tiny: dict[str, Any], statistics: tuple[object, object], prefix: int, other: tuple[int, int]
) -> None:
    assert name in timm.list_models(pretrained=True)  # with the weights of this tag
    side = 224 if prefix else 40  # convolutions take any
    embedder = Embedder(name, dim=4, pooling="gem", image_size=side, backbone_args=tiny).eval()
    assert (embedder.data_config.mean, embedder.data_config.std) == statistics
    assert embedder.layout.prefix_tokens == prefix
    assert embedder.layout.class_token == (prefix > 0)
    with torch.no_grad():
        for size in ((side, side), other):
            assert embedder(torch.randint(256, (2, 3, *size), dtype=torch.uint8)).isfinite().all()
    if prefix:
        tokens = Embedder(name, dim=None, layer_norm=False, pooling="token", image_size=224, backbone_args=tiny).eval()
        image = torch.randint(256, (1, 3, *other), dtype=torch.uint8)
        with torch.no_grad():
            expected = nn.functional.normalize(tokens.features(image)[:, 0])
            torch.testing.assert_close(tokens(image), expected)


def test_patches_of_14_refuse_other_sizes_and_say_what_to_do() -> None:
    embedder = Embedder("vit_base_patch14_dinov2.lvd142m", dim=4, image_size=224, backbone_args=VIT).eval()
    with pytest.raises(ModelError, match="multiples of 14, or pad the last patches"):
        embedder(torch.zeros(1, 3, 224, 225, dtype=torch.uint8))
    padded = {**VIT, "dynamic_img_pad": True}
    filled = Embedder("vit_base_patch14_dinov2.lvd142m", dim=4, image_size=224, backbone_args=padded).eval()
    with torch.no_grad():
        assert filled(torch.zeros(1, 3, 224, 225, dtype=torch.uint8)).isfinite().all()


def test_openais_clip_was_trained_with_another_gelu() -> None:
    """The weights were trained with the activation of the model whose name contains quickgelu."""
    quick = timm.create_model("vit_base_patch16_clip_quickgelu_224.openai", pretrained=False, **VIT)
    plain = timm.create_model("vit_base_patch16_clip_224.openai", pretrained=False, **VIT)
    assert "quick" in type(quick.blocks[0].mlp.act).__name__.lower()
    assert "quick" not in type(plain.blocks[0].mlp.act).__name__.lower()
    assert quick.pretrained_cfg["hf_hub_id"] == plain.pretrained_cfg["hf_hub_id"]

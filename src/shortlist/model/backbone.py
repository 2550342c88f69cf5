"""A timm backbone without its classifier, and what its features look like."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import timm
import torch
from timm.data.config import resolve_model_data_config
from torch import Tensor, nn

from shortlist.errors import ModelError


@dataclass(frozen=True)
class DataConfig:
    """How a backbone wants its images: the defaults for transforms."""

    input_size: tuple[int, int, int]
    interpolation: str
    crop_pct: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Layout:
    """What a backbone's features look like."""

    channels: int
    tokens: bool  # (B, N, C), as of a ViT; otherwise maps
    maps_last: bool  # maps come as (B, H, W, C)
    prefix_tokens: int  # class and register tokens, before those of the patches
    class_token: bool
    whole: bool  # features are what the model returns; otherwise what its forward_features does


def create_backbone(
    name: str, image_size: int | None, arguments: Mapping[str, Any]
) -> tuple[nn.Module, Layout, DataConfig, dict[str, Any]]:
    """Build a timm model with random weights and no classifier or pooling, and look at what it returns.

    The last that is returned is what timm's `create_model` took, besides the name.

    Families differ in what they can be asked, so the most is asked first: position embeddings that are resampled to
    any image size, then none of that, then the one size that was given; and a few cannot leave their pooling away.
    """
    _check_name(name)
    sizes = [{"dynamic_img_size": True}, {}] + ([] if image_size is None else [{"img_size": image_size}])
    problem: Exception | None = None
    for pooling in ({"global_pool": ""}, {}):
        for size in sizes:
            options = {"num_classes": 0, **pooling, **size, **arguments}
            try:
                backbone = timm.create_model(name, pretrained=False, **options)
                config = _data_config(backbone)
                height, width = (image_size, image_size) if image_size else config.input_size[1:]
                layout = _look(name, backbone, config.input_size[1:], torch.zeros(1, 3, height, width), bool(pooling))
            except ModelError as error:  # it was built and does not do: more telling than that it was not built
                problem = problem if isinstance(problem, ModelError) else error
            except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                problem = problem or (None if size else error)
            else:
                return backbone, layout, replace(config, input_size=(3, height, width)), options
    if isinstance(problem, ModelError):
        raise problem
    given = f" with {dict(arguments)}" if arguments else ""
    raise ModelError(f"timm cannot build {name!r}{given}: {problem or 'no reason given'}") from problem


def unpooled(backbone: nn.Module, layout: Layout, images: Tensor) -> Tensor:
    """Features of normalised images: maps (B, C, H, W), or tokens (B, N, C) with the prefix tokens first."""
    features: Tensor = backbone(images) if layout.whole else backbone.forward_features(images)  # type: ignore[operator]
    return features.permute(0, 3, 1, 2) if layout.maps_last else features


def size_problem(
    name: str, backbone: nn.Module, made_for: tuple[int, int], images: Tensor, error: Exception
) -> str | None:
    """What to tell about an error that comes from the size of the images; None where it comes from something else."""
    height, width = images.shape[2:]
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, AssertionError | RuntimeError | ValueError):
        return None
    if isinstance(error, RuntimeError) and (
        (height, width) == made_for or not any(word in str(error) for word in ("size", "shape"))
    ):
        return None
    message = f"the backbone {name!r} cannot take images of {height} x {width} pixels ({error}); "
    patch = getattr(getattr(backbone, "patch_embed", None), "patch_size", None)
    if getattr(backbone, "dynamic_img_size", False) and patch is not None and (height % patch[0] or width % patch[1]):
        return message + (
            f"use sides that are multiples of {patch[0]}, "
            "or let it fill up the last patches with backbone_args={'dynamic_img_pad': True}"
        )
    return message + f"it was made for {made_for[0]} x {made_for[1]}: use these, or another backbone"


def _check_name(name: str) -> None:
    architecture, _, tag = name.partition(".")
    known = timm.list_models()
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, known, n=3, cutoff=0.5)
        hint = f"the nearest names: {', '.join(near)}" if near else "timm.list_models() lists the names"
        raise ModelError(f"timm {timm.__version__} has no backbone {name!r}; {hint}")
    tags = [full.partition(".")[2] for full in timm.list_models(f"{architecture}.*", pretrained=True)]
    if tag and tag not in tags:
        raise ModelError(
            f"timm {timm.__version__} has no weights {tag!r} for {architecture!r}; known: {', '.join(tags) or 'none'}"
        )


def _data_config(backbone: nn.Module) -> DataConfig:
    found = resolve_model_data_config(backbone)  # type: ignore[no-untyped-call]
    return DataConfig(
        input_size=tuple(found["input_size"]),
        interpolation=found["interpolation"],
        crop_pct=found["crop_pct"],
        mean=tuple(found["mean"]),
        std=tuple(found["std"]),
    )


def _look(name: str, backbone: nn.Module, made_for: tuple[int, int], image: Tensor, whole: bool) -> Layout:
    """Show the backbone an image of the size it will get, and see what comes out."""
    backbone.eval()
    try:
        with torch.no_grad():
            features = backbone(image) if whole else backbone.forward_features(image)  # type: ignore[operator]
    except (AssertionError, RuntimeError, ValueError) as error:
        problem = size_problem(name, backbone, made_for, image, error)
        raise ModelError(problem or f"the backbone {name!r} does not run: {error}") from error
    if whole and isinstance(features, Tensor) and features.ndim == 2:  # it flattens what it was not to pool
        return _look(name, backbone, made_for, image, whole=False)
    layout = _layout(name, backbone, features, whole)
    if not whole:
        _freeze_unused(backbone, layout, image)
    backbone.train()
    return layout


def _freeze_unused(backbone: nn.Module, layout: Layout, image: Tensor) -> None:
    """No gradients for what comes after the features: many processes would wait for them for ever."""
    parameters = list(backbone.parameters())
    gradients = torch.autograd.grad(unpooled(backbone, layout, image).sum(), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)


def _layout(name: str, backbone: nn.Module, features: object, whole: bool) -> Layout:
    if not isinstance(features, Tensor) or features.ndim not in (3, 4):
        what = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ModelError(f"the backbone {name!r} gives {what}, neither feature maps nor tokens: use another one")
    tokens = features.ndim == 3
    maps_last = not tokens and getattr(backbone, "output_fmt", None) == "NHWC"
    has_class_token = getattr(backbone, "has_class_token", None)
    if has_class_token is None:
        has_class_token = getattr(backbone, "cls_token", None) is not None
    prefix = getattr(backbone, "num_prefix_tokens", None)
    prefix_tokens = (int(has_class_token) if prefix is None else prefix) if tokens else 0
    if tokens and features.shape[1] <= prefix_tokens:
        raise ModelError(f"the backbone {name!r} gives a class token and none of its patches: use another one")
    return Layout(
        channels=features.shape[-1 if tokens or maps_last else 1],
        tokens=tokens,
        maps_last=maps_last,
        prefix_tokens=prefix_tokens,
        class_token=tokens and has_class_token,
        whole=whole,
    )

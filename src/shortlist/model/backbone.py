"""Build timm backbones without classifiers, or user-defined models, and determine the layout of their features."""

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
from shortlist.imports import call, import_object


@dataclass(frozen=True)
class DataConfig:
    """Image preprocessing that a backbone expects, which transforms use as defaults."""

    input_size: tuple[int, int, int]
    interpolation: str
    crop_pct: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Layout:
    """Layout of the features of a backbone."""

    channels: int
    tokens: bool  # (B, N, C), as in a ViT; otherwise feature maps
    channels_last: bool  # feature maps are (B, H, W, C) instead of (B, C, H, W)
    prefix_tokens: int  # number of class and register tokens before the patch tokens
    class_token: bool  # whether the first token is a class token
    from_forward: bool  # features are the output of forward(); otherwise of forward_features()


def create_backbone(
    name: str, image_size: int | None, arguments: Mapping[str, Any]
) -> tuple[nn.Module, Layout, DataConfig, dict[str, Any]]:
    """Build a timm model with random weights, without classifier and pooling, and inspect its features.

    Model families support different options, so several combinations are tried, the most general first: position
    embeddings that are resampled to any image size, no size option, and a fixed `image_size`. Each is tried without
    pooling first, and then with pooling, which a few models cannot omit.

    Args:
        name: Name of a timm model, with or without a tag.
        image_size: Side of the images in pixels, or None for the default of the model.
        arguments: Further arguments for `timm.create_model`.

    Returns:
        The model, the layout of its features, its preprocessing, and the arguments that `create_model` accepted.

    Raises:
        ModelError: The model does not exist, or no combination of options works.
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
                layout = _inspect(
                    name, backbone, config.input_size[1:], torch.zeros(1, 3, height, width), bool(pooling)
                )
            except ModelError as error:  # it was built but is unusable: more informative than a failure to build
                problem = problem if isinstance(problem, ModelError) else error
            except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                problem = problem or (None if size else error)
            else:
                return backbone, layout, replace(config, input_size=(3, height, width)), options
    if isinstance(problem, ModelError):
        raise problem
    given = f" with {dict(arguments)}" if arguments else ""
    raise ModelError(f"timm cannot build {name!r}{given}: {problem or 'no reason given'}") from problem


def build_module(reference: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build a user-defined model from the reference of a function or class, `package.module:name`.

    Raises:
        ConfigError: The function cannot be imported, or fails.
        ModelError: It does not return a module.
    """
    build = import_object(reference, "`backbone`")
    module = None if isinstance(build, nn.Module) else call(build, arguments, reference, "`backbone_args`")
    if not isinstance(module, nn.Module):
        what = "a module already" if module is None else f"a function that returns {type(module).__name__}"
        raise ModelError(f"{reference} is {what}: name a class, or a function that builds and returns an nn.Module.")
    return module


def inspect_module(name: str, module: nn.Module, image_size: int | None) -> tuple[Layout, DataConfig]:
    """Run a user-defined model on images, and return the layout of its output and its preprocessing.

    Raises:
        ModelError: It fails, or does not return a vector per image.
    """
    config = _data_config(module)
    height, width = (image_size, image_size) if image_size else config.input_size[1:]
    first = next(module.parameters(), torch.empty(0))
    image = torch.zeros(2, 3, height, width, device=first.device, dtype=first.dtype)
    module.eval()
    try:
        with torch.no_grad():
            vectors = module(image)
    except Exception as error:  # it is the user's code
        problem = f"{type(error).__name__}: {error}"
        raise ModelError(f"{name} fails for images of {height} x {width} pixels with {problem}") from error
    if not isinstance(vectors, Tensor) or vectors.ndim != 2 or len(vectors) != 2 or not vectors.is_floating_point():
        what = tuple(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
        raise ModelError(
            f"{name} must map images (B, 3, H, W) to vectors (B, d), but for two images it returns {what}."
        )
    layout = Layout(vectors.shape[1], False, False, 0, class_token=False, from_forward=True)
    return layout, replace(config, input_size=(3, height, width))


def extract_features(backbone: nn.Module, layout: Layout, images: Tensor) -> Tensor:
    """Compute features of normalised images: maps (B, C, H, W), or tokens (B, N, C) with the prefix tokens first.

    A user-defined model returns vectors (B, d) instead.
    """
    features: Tensor = backbone(images) if layout.from_forward else backbone.forward_features(images)  # type: ignore[operator]
    return features.permute(0, 3, 1, 2) if layout.channels_last else features


def explain_size_error(
    name: str, backbone: nn.Module, native_size: tuple[int, int], images: Tensor, error: Exception
) -> str | None:
    """Return a message for an error that the image size caused, or None if the error has another cause."""
    height, width = images.shape[2:]
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, AssertionError | RuntimeError | ValueError):
        return None
    if isinstance(error, RuntimeError) and (
        (height, width) == native_size or not any(word in str(error) for word in ("size", "shape"))
    ):
        return None
    message = f"The backbone {name!r} does not support images of {height} x {width} pixels ({error}); "
    patch = getattr(getattr(backbone, "patch_embed", None), "patch_size", None)
    if getattr(backbone, "dynamic_img_size", False) and patch is not None and (height % patch[0] or width % patch[1]):
        return message + (
            f"use sides that are multiples of {patch[0]}, "
            "or pad the last patches with backbone_args={'dynamic_img_pad': True}."
        )
    return message + f"it was built for {native_size[0]} x {native_size[1]}: use this size, or another backbone."


def _check_name(name: str) -> None:
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=3, cutoff=0.5)
        hint = f"the nearest names are: {', '.join(near)}" if near else "timm.list_models() lists all names"
        raise ModelError(f"timm {timm.__version__} has no backbone {name!r}; {hint}.")
    if not tag:
        return
    tags = [full.partition(".")[2] for full in timm.list_models(f"{architecture}.*", pretrained=True)]
    if tag not in tags:
        raise ModelError(
            f"timm {timm.__version__} has no weights {tag!r} for {architecture!r}; known: {', '.join(tags) or 'none'}."
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


def _inspect(name: str, backbone: nn.Module, native_size: tuple[int, int], image: Tensor, from_forward: bool) -> Layout:
    """Run the backbone on an image of the expected size, and determine the layout of its features."""
    backbone.eval()
    try:
        with torch.no_grad():
            features = backbone(image) if from_forward else backbone.forward_features(image)  # type: ignore[operator]
    except (AssertionError, RuntimeError, ValueError) as error:
        problem = explain_size_error(name, backbone, native_size, image, error)
        raise ModelError(problem or f"The backbone {name!r} does not run: {error}") from error
    if from_forward and isinstance(features, Tensor) and features.ndim == 2:  # it flattens although pooling is off
        return _inspect(name, backbone, native_size, image, from_forward=False)
    layout = _layout(name, backbone, features, from_forward)
    if not from_forward:
        _freeze_unused(backbone, layout, image)
    backbone.train()
    return layout


def _freeze_unused(backbone: nn.Module, layout: Layout, image: Tensor) -> None:
    """Freeze parameters after the features, because distributed training would wait for their gradients forever."""
    parameters = list(backbone.parameters())
    gradients = torch.autograd.grad(extract_features(backbone, layout, image).sum(), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)


def _layout(name: str, backbone: nn.Module, features: object, from_forward: bool) -> Layout:
    if not isinstance(features, Tensor) or features.ndim not in (3, 4):
        what = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ModelError(
            f"The backbone {name!r} returns {what}, which is neither feature maps nor tokens: use another one."
        )
    tokens = features.ndim == 3
    channels_last = not tokens and getattr(backbone, "output_fmt", None) == "NHWC"
    has_class_token = getattr(backbone, "has_class_token", None)
    if has_class_token is None:
        has_class_token = getattr(backbone, "cls_token", None) is not None
    prefix = getattr(backbone, "num_prefix_tokens", None)
    prefix_tokens = (int(has_class_token) if prefix is None else prefix) if tokens else 0
    if tokens and features.shape[1] <= prefix_tokens:
        raise ModelError(f"The backbone {name!r} returns a class token but no patch tokens: use another one.")
    return Layout(
        channels=features.shape[-1 if tokens or channels_last else 1],
        tokens=tokens,
        channels_last=channels_last,
        prefix_tokens=prefix_tokens,
        class_token=tokens and has_class_token,
        from_forward=from_forward,
    )

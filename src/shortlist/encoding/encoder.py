"""Everything that determines the vector of an image: the embedder, its image transform, and the scales."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from shortlist.batches.by_size import by_size
from shortlist.data import Transform
from shortlist.data.images import as_image, load_crop
from shortlist.data.transforms import transform_image
from shortlist.encoding.pretrained import TRANSFORMS, is_timm, open_pretrained
from shortlist.errors import ConfigError, ModelError, RunError
from shortlist.files import read_json, write_json
from shortlist.model import Embedder, MultiScale
from shortlist.progress import Display, default_display

# Path of a file, contents of a file, PIL image, tensor (3, H, W), or array (H, W, 3); see `as_image`
ImageLike = Path | str | bytes | Image.Image | Tensor | NDArray[Any]
ENCODER_FILE = "encoder.json"


@dataclass(frozen=True, eq=False)
class Encoder:
    """Maps images to unit vectors, with the preprocessing that the model was evaluated with.

    `from_run` opens the encoder of a trained run, and `from_pretrained` any timm model or an exported package.

    Args:
        embedder: The model, in evaluation mode and on its device.
        transform: Deterministic preprocessing of an image.
        scales: Resolutions at which an image is embedded; see `MultiScale`.
        batch_size: Number of images per forward pass.
        runtime: Function that computes the vectors of uint8 images (B, 3, H, W) in place of `network`, on the CPU; see
            `in_onnx_runtime`. It is not saved. Default: PyTorch computes them.

    Example:
        >>> encoder = Encoder.from_pretrained("test_resnet", pretrained=False)
        >>> encoder.encode([Image.new("RGB", (80, 60)), torch.zeros(3, 60, 80)]).shape
        torch.Size([2, 96])
    """

    embedder: Embedder
    transform: Transform
    scales: tuple[float, ...] = (1.0,)
    batch_size: int = 32
    runtime: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)

    @cached_property
    def network(self) -> nn.Module:
        """Module that maps uint8 images (B, 3, H, W) to unit vectors (B, d)."""
        return self.embedder if self.scales == (1.0,) else MultiScale(self.embedder, self.scales)

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""
        return self.embedder.dim

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the vectors. Vectors with different fingerprints are not comparable."""
        settings = {name: value for name, value in self.settings().items() if name != "batch_size"}
        return hashlib.sha256(f"{self.embedder.digest()} {json.dumps(settings, sort_keys=True)}".encode()).hexdigest()

    @classmethod
    def from_run(
        cls, path: Path | str, *, model: nn.Module | None = None, device: torch.device | str | None = None
    ) -> Encoder:
        """Open the encoder of a finished run, or one that `save` wrote.

        Args:
            path: Folder of the run.
            model: If the run was trained with a module that was given in Python, a module of the same architecture,
                whose weights are replaced.
            device: Device to move it to. Default: the GPU, if there is one.

        Raises:
            ModelError: The folder contains no finished run.
        """
        folder = Path(path)
        if not (folder / ENCODER_FILE).is_file() and (folder / "config.yaml").is_file():
            raise ModelError(f"The run in {folder} is not finished: resume it first.")
        return cls.load(folder, model=model).to(device)

    @classmethod
    def from_pretrained(
        cls,
        name: Path | str,
        *,
        pretrained: bool | str | Path = True,
        pooling: str | None = None,
        image_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> Encoder:
        """Open a pretrained model: a timm model, or a package exported by shortlist.

        Args:
            name: Name of a timm model (`resnet50.a1_in1k`), also as `timm:NAME`; folder that `shortlist export
                --package` wrote; or such a package on the Hugging Face Hub, as `OWNER/NAME`. Code in a package is not
                executed. `timm:NAME@WEIGHTS` also names the weights: a file, or `none` for random weights.
            pretrained: Weights of a timm model, as in `Embedder`: True for those that timm publishes, or a file.
            pooling: Pooling of a timm model. Default: the class token if there is one, otherwise the average.
            image_size: Side of the images in pixels. Default: that of the timm model.
            device: Device to move it to. Default: the GPU, if there is one.

        Raises:
            ModelError: The model is unknown, or its weights are not available.
            ConfigError: An argument has no effect on a package.
        """
        chosen = pretrained is not True or pooling is not None or image_size is not None
        if chosen and not is_timm(str(name)) and (Path(name).is_dir() or "/" in str(name)):
            raise ConfigError(f"{name} is a package: `pretrained`, `pooling` and `image_size` are for timm models.")
        if Path(name, ENCODER_FILE).is_file():
            return cls.from_run(name, device=device)
        return cls(*open_pretrained(str(name), pretrained, pooling, image_size)).to(device)

    def to(self, device: torch.device | str | None = None) -> Encoder:
        """Move the model to a device, by default the GPU if there is one, and return the encoder itself."""
        if device is None:
            from accelerate import Accelerator

            device = Accelerator().device
        self.embedder.to(device)
        return self

    def encode(
        self,
        images: ImageLike | Iterable[ImageLike],
        batch_size: int | None = None,
        *,
        display: Display | None = None,
    ) -> Tensor:
        """Encode images.

        Args:
            images: One image or several: paths, file contents, PIL images, tensors (3, H, W) or arrays (H, W, 3), in
                any mixture; or a batch as a tensor (n, 3, H, W) or an array (n, H, W, 3). All of them are resized and
                cropped in the same way. Pixels are uint8 or from 0 to 1, and not normalised.
            batch_size: Number of images per forward pass. Default: `batch_size` of the encoder.
            display: Shows the progress if there is more than one batch.

        Returns:
            Unit vectors in the order of the images, (n, d) float32 on the CPU.

        Raises:
            ImageError: An image cannot be read.
            DataError: The shape or type of a tensor or array is not that of an image.
        """
        chosen: list[Any] = [images] if is_single(images) else list(images)  # type: ignore[arg-type]
        size = self.batch_size if batch_size is None else batch_size
        if size < 1:
            raise ConfigError(f"`batch_size` must be at least 1, not {size}.")
        shown = Display() if len(chosen) <= size else display or default_display()
        vectors = [torch.empty(0, self.dim)]
        with shown.task("encoding", "images") as advance:
            for start in range(0, len(chosen), size):
                vectors.append(self._encode_batch(chosen[start : start + size]))
                advance(min(start + size, len(chosen)), len(chosen))
        return torch.cat(vectors)

    def _encode_batch(self, images: list[ImageLike]) -> Tensor:
        device = next(self.embedder.parameters()).device
        pixels = [self._pixels(image).to(device) for image in images]
        embed = self.runtime or self.network
        with torch.inference_mode():
            found = by_size(embed, pixels if self.transform.size is None else torch.stack(pixels))
        return found.float().cpu()

    def _pixels(self, image: ImageLike) -> Tensor:
        """Load and preprocess one image, (3, H, W) uint8."""
        unused = Random(0)  # the transform is deterministic
        if isinstance(image, bytes):
            return load_crop("(given as bytes)", self.transform, unused, content=io.BytesIO(image))
        if isinstance(image, Path | str):
            return load_crop(image, self.transform, unused)
        return transform_image(as_image(image), self.transform, unused)

    def save(self, folder: Path | str) -> Path:
        """Write the embedder and `encoder.json` to a folder, and return the folder."""
        folder = self.embedder.save(folder)
        write_json(folder / ENCODER_FILE, self.settings())
        return folder

    @classmethod
    def load(
        cls, folder: Path | str, settings: Mapping[str, Any] | None = None, *, model: nn.Module | None = None
    ) -> Encoder:
        """Load an encoder that `save` wrote, on the CPU.

        Args:
            folder: Folder with the embedder and `encoder.json`. If `settings` are given, a run's folder is enough.
            settings: Settings to use instead of those in `encoder.json`.
            model: See `from_run`.

        Raises:
            ModelError: A file is missing or damaged.
        """
        embedder, file = Embedder.load(folder, model), Path(folder) / ENCODER_FILE
        found = read_settings(file) if settings is None else settings
        try:
            transform = TRANSFORMS[found["transform"]](**found["images"])
            return cls(embedder, transform, tuple(found["scales"]), found["batch_size"])
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{file} is damaged, or written by another version of shortlist ({error!r}).") from error

    def settings(self) -> dict[str, Any]:
        """Return everything except the embedder, as JSON-serializable values."""
        kind = next(name for name, kind in TRANSFORMS.items() if isinstance(self.transform, kind))
        images = asdict(self.transform)  # type: ignore[call-overload]
        return {"transform": kind, "images": images, "scales": list(self.scales), "batch_size": self.batch_size}


def read_settings(file: Path) -> dict[str, Any]:
    """Read the settings of an encoder, which `Encoder.save` wrote to encoder.json.

    Raises:
        ModelError: The file is missing or damaged.
    """
    if not file.is_file():
        raise ModelError(f"{file.name}, which defines the image preprocessing, was not found in {file.parent}.")
    try:
        found: dict[str, Any] = read_json(file, dict[str, Any])
    except (OSError, RunError) as error:
        raise ModelError(str(error)) from error
    return found


def is_single(images: ImageLike | Iterable[ImageLike]) -> bool:
    """Return whether the argument is a single image, not several images or a batch."""
    if isinstance(images, Tensor | np.ndarray):
        return images.ndim < 4
    return isinstance(images, Path | str | bytes | Image.Image)

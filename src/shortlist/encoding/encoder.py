"""Everything that determines the vector of an image: the embedder, its image transform, and the scales."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from shortlist.batches.sizes import by_size
from shortlist.data import FitTransform, TestTransform, Transform
from shortlist.data.images import load_crop, upright_rgb
from shortlist.data.transforms import apply_crop
from shortlist.errors import ModelError
from shortlist.files import write_text_atomically
from shortlist.model import Embedder, MultiScale

ImageLike = Path | str | bytes | Image.Image  # path of a file, contents of a file, or a decoded image
ENCODER_FILE = "encoder.json"
_TRANSFORMS: dict[str, type[TestTransform] | type[FitTransform]] = {"square": TestTransform, "fit": FitTransform}


@dataclass(frozen=True, eq=False)
class Encoder:
    """Maps images to unit vectors, with the preprocessing that the model was evaluated with.

    Args:
        embedder: The model, in evaluation mode and on its device.
        transform: Deterministic preprocessing of an image.
        scales: Resolutions at which an image is embedded; see `MultiScale`.
        batch_size: Number of images per forward pass.
    """

    embedder: Embedder
    transform: Transform
    scales: tuple[float, ...] = (1.0,)
    batch_size: int = 64

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

    def encode(self, images: Sequence[ImageLike]) -> Tensor:
        """Encode a few images in one forward pass.

        Args:
            images: Paths, file contents or PIL images.

        Returns:
            Unit vectors, (n, d) float32 on the CPU.

        Raises:
            ImageError: An image cannot be read.
        """
        device = next(self.embedder.parameters()).device
        pixels = [self._pixels(image).to(device) for image in images]
        with torch.inference_mode():
            return by_size(self.network, pixels if self.transform.size is None else torch.stack(pixels)).float().cpu()

    def _pixels(self, image: ImageLike) -> Tensor:
        """Load and preprocess one image, (3, H, W) uint8."""
        unused = Random(0)  # the transform is deterministic
        if isinstance(image, Image.Image):
            upright = upright_rgb(image)
            return apply_crop(upright, self.transform.crop(*upright.size, unused), self.transform.interpolation)
        if isinstance(image, bytes):
            return load_crop("(given as bytes)", self.transform, unused, content=io.BytesIO(image))
        return load_crop(image, self.transform, unused)

    def save(self, folder: Path | str) -> Path:
        """Write the embedder and `encoder.json` to a folder, and return the folder."""
        folder = self.embedder.save(folder)
        write_text_atomically(folder / ENCODER_FILE, json.dumps(self.settings(), indent=2) + "\n")
        return folder

    @classmethod
    def load(cls, folder: Path | str, settings: Mapping[str, Any] | None = None) -> Encoder:
        """Load what `save` wrote, on the CPU.

        Args:
            folder: Folder with the embedder and `encoder.json`. If `settings` are given, a run's folder is enough.
            settings: Settings to use instead of those in `encoder.json`.

        Raises:
            ModelError: A file is missing or damaged.
        """
        embedder, file = Embedder.load(folder), Path(folder) / ENCODER_FILE
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if settings is None else settings
            transform = _TRANSFORMS[found["sees"]](**found["images"])
            return cls(embedder, transform, tuple(found["scales"]), found["batch_size"])
        except FileNotFoundError:
            raise ModelError(f"there is no {ENCODER_FILE} in {folder}, which defines the image preprocessing") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{file} is damaged ({error!r})") from error

    def settings(self) -> dict[str, Any]:
        """Return everything except the embedder, as JSON-serializable values."""
        kind = next(name for name, kind in _TRANSFORMS.items() if isinstance(self.transform, kind))
        images = asdict(self.transform)  # type: ignore[call-overload]
        return {"sees": kind, "images": images, "scales": list(self.scales), "batch_size": self.batch_size}

"""Images to vectors, just as a run was measured: its embedder, what that sees of an image, and at which scales."""

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
from shortlist.data.transforms import cut
from shortlist.errors import ModelError
from shortlist.files import write_text_atomically
from shortlist.model import Embedder, MultiScale
from shortlist.model.checkpoint import digest

Picture = Path | str | bytes | Image.Image  # a file, what is in a file, or an image that is decoded already
FILE = "encoder.json"
_TRANSFORMS: dict[str, type[TestTransform] | type[FitTransform]] = {"square": TestTransform, "fit": FitTransform}


@dataclass(frozen=True, eq=False)
class Encoder:
    """All that decides which vector an image gets.

    Args:
        embedder: in evaluation mode, on its device.
        transform: what the embedder sees of an image; nothing of it is random.
        scales: resolutions, as of `MultiScale`.
        batch_size: images at a time, as far as its memory allows.
    """

    embedder: Embedder
    transform: Transform
    scales: tuple[float, ...] = (1.0,)
    batch_size: int = 64

    @cached_property
    def network(self) -> nn.Module:
        """uint8 images (B, 3, H, W) -> unit vectors (B, d)."""
        return self.embedder if self.scales == (1.0,) else MultiScale(self.embedder, self.scales)

    @property
    def dim(self) -> int:
        return self.embedder.dim

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the vectors: vectors of different fingerprints cannot be compared."""
        weights = digest(_on_cpu(self.embedder), self.embedder.config.to_dict())
        decides = {name: value for name, value in self.settings().items() if name != "batch_size"}
        return hashlib.sha256(f"{weights} {json.dumps(decides, sort_keys=True)}".encode()).hexdigest()

    def encode(self, pictures: Sequence[Picture]) -> Tensor:
        """Unit vectors of a few pictures, (n, d) float32 in the CPU's memory.

        Raises:
            ImageError: one cannot be read.
        """
        device = next(self.embedder.parameters()).device
        seen = [self._pixels(picture).to(device) for picture in pictures]
        images = seen if self.transform.size is None else torch.stack(seen)
        with torch.inference_mode():
            return by_size(self.network, images).float().cpu()

    def _pixels(self, picture: Picture) -> Tensor:
        nothing_random = Random(0)
        if isinstance(picture, Image.Image):
            upright = upright_rgb(picture)
            return cut(upright, self.transform.crop(*upright.size, nothing_random), self.transform.interpolation)
        if isinstance(picture, bytes):
            return load_crop("(given as bytes)", self.transform, nothing_random, content=io.BytesIO(picture))
        return load_crop(picture, self.transform, nothing_random)

    def save(self, folder: Path | str) -> Path:
        """Write the embedder and `encoder.json` into a folder; return the folder."""
        folder = self.embedder.save(folder)
        write_text_atomically(folder / FILE, json.dumps(self.settings(), indent=2) + "\n")
        return folder

    @classmethod
    def load(cls, folder: Path | str, settings: Mapping[str, Any] | None = None) -> Encoder:
        """What `save` wrote, on the CPU.

        Args:
            folder: the folder; a run's will do where settings are given.
            settings: in place of the folder's own.

        Raises:
            ModelError: a file is missing or damaged.
        """
        embedder, file = Embedder.load(folder), Path(folder) / FILE
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if settings is None else settings
            transform = _TRANSFORMS[found["sees"]](**found["images"])
            return cls(embedder, transform, tuple(found["scales"]), found["batch_size"])
        except FileNotFoundError:
            raise ModelError(f"there is no {FILE} in {folder}, which says what the embedder sees of an image") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{file} is damaged ({error!r})") from error

    def settings(self) -> dict[str, Any]:
        """All but the embedder, ready for JSON."""
        kind = next(name for name, kind in _TRANSFORMS.items() if isinstance(self.transform, kind))
        images = asdict(self.transform)  # type: ignore[call-overload]
        return {"sees": kind, "images": images, "scales": list(self.scales), "batch_size": self.batch_size}


def _on_cpu(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}

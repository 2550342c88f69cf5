"""Images and folders of images for tests."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

# Cars196 and Omniglot are for research use only and not part of this repository; tests skip if they are not found.
REAL_IMAGES = Path(os.environ.get("SHORTLIST_REAL_IMAGES", Path(__file__).parents[3] / "shared" / "data"))
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"  # for Ghostscript


def picture(width: int = 24, height: int = 18, seed: int = 0) -> Image.Image:
    """Return a smooth colour image, different for each seed, that JPEG changes very little."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def write(file: Path, image: Image.Image | None = None, **options: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    (image or picture(seed=sum(str(file).encode()))).save(file, **options)
    return file


def class_folders(root: Path, sizes: dict[str, int], ending: str = "jpg") -> Path:
    """Write root/NAME/0.jpg, 1.jpg, ... for each class name and its number of images, and return the root."""
    seed = 0
    for name, size in sizes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(size):
            write(root / name / f"{number}.{ending}", picture(seed=seed))
            seed += 1
    return root

"""A small gallery, whose model has random weights."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from PIL import Image

from shortlist.data import TestTransform, open_catalog
from shortlist.encoding import Encoder
from shortlist.gallery.gallery import Gallery
from shortlist.model import Embedder
from tests.data.pictures import picture
from tests.training.runs import class_folders

CLASSES, IMAGES = 6, 12  # images per class


def small_gallery(root: Path, classes: int = CLASSES, images: int = IMAGES) -> Gallery:
    """Create images in root/images, and their gallery in root/gallery.

    Args:
        root: An empty folder.
        classes: Number of classes.
        images: Number of images per class.
    """
    torch.manual_seed(0)
    encoder = Encoder(Embedder("test_efficientnet", dim=16).eval(), TestTransform(32, 36))
    gallery = Gallery.create(root / "gallery", encoder)
    gallery.add(open_catalog(class_folders(root / "images", classes, images)))
    return gallery


def remove_labels(gallery: Gallery) -> None:
    gallery.store.change(labels={item.id: None for item in gallery.items(limit=1000)})


def png(width: int = 40, height: int = 30, seed: int = 0) -> bytes:
    return encoded(picture(width, height, seed), "PNG")


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format=kind, **options)
    return out.getvalue()

"""Rebuilding a gallery with another model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shortlist.data import Catalog
from shortlist.encoding.encoder import Encoder
from shortlist.gallery.gallery import Added, Gallery, index
from shortlist.gallery.store import GalleryError, Item
from shortlist.locations import as_url
from shortlist.progress import Display


def rebuild(
    gallery: Gallery,
    encoder: Encoder,
    location: Path | str,
    *,
    model: Path | str | None = None,
    kind: str | None = None,
    workers: int | None = None,
    display: Display | None = None,
) -> tuple[Gallery, Added]:
    """Embed all images of a gallery with another model, as another gallery, in which they have the same ids and labels.

    If the process is killed, the next call continues. Called again when the gallery has changed, it makes the same
    changes to the other gallery: only images that are new or have changed are embedded.

    Args:
        gallery: The gallery, which is not changed.
        encoder: Encoder that computes the vectors.
        location: Where the new gallery is; see `Gallery.open`.
        model: See `Gallery.create`.
        kind: Kind of index; see `Gallery.create`. Default: as was requested for the gallery.
        workers: Number of processes that decode images. Default: chosen by the number of cores and images.
        display: Shows the progress.

    Returns:
        The new gallery, and the number of images by what was done with them.

    Raises:
        GalleryError: The gallery is empty, or the location is in use by a gallery of another model.
    """
    items = gallery.items(limit=len(gallery))
    if not items:
        raise GalleryError(f"the gallery {gallery.name} has no images")
    ids = {as_url(item.path): item.id for item in reversed(items)}
    return index(
        encoder,
        catalog_of(gallery.name, items),
        location,
        model=model,
        kind=kind or gallery.store.requested_kind,
        workers=workers,
        ids=ids,
        prune="",
        display=display,
    )


def catalog_of(name: str, items: list[Item]) -> Catalog:
    """Return images of a gallery as a catalog. The class name "" means that an image has no label."""
    classes = sorted({item.label or "" for item in items})
    numbers = {each: number for number, each in enumerate(classes)}
    return Catalog(
        name=name,
        root=Path(),
        paths=np.array([as_url(item.path) for item in items], dtype=object),
        labels=np.array([numbers[item.label or ""] for item in items], dtype=np.int64),
        class_names=tuple(classes),
        splits=np.full(len(items), ""),
    )

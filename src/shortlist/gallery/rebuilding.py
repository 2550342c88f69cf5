"""Rebuild a gallery with another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from shortlist.data import Catalog
from shortlist.data.tables import object_array
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
    min_score: float | None = None,
    display: Display | None = None,
) -> tuple[Gallery, Added]:
    """Embed all images of a gallery with another model, and write them to a new gallery.

    The images keep their ids, labels and fields. The minimum score of the gallery is kept only if the model is the
    same, because the scores of another model differ. If the process is killed, the next call resumes. If the gallery
    has changed since, another call applies the changes to the new gallery: only new and changed images are embedded.

    Args:
        gallery: The gallery, which is not changed.
        encoder: Encoder that computes the vectors.
        location: Location of the new gallery; see `Gallery.open`.
        model: See `Gallery.create`.
        kind: Kind of index; see `Gallery.create`. Default: the kind that was requested for the gallery.
        workers: Number of processes that decode images. Default: chosen by the number of cores and images.
        min_score: Minimum score of the new gallery, if it has none and none is kept.
        display: Shows the progress.

    Returns:
        The new gallery, and the numbers of added, replaced, unchanged and removed images.

    Raises:
        GalleryError: The gallery is empty, or the location is in use by a gallery of another model.
    """
    items = gallery.items(limit=len(gallery))
    if not items:
        raise GalleryError(f"the gallery {gallery.name} has no images")
    kept = gallery.min_score if encoder.fingerprint == gallery.store.fingerprint else None
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
        default_min_score=min_score if kept is None else kept,
        display=display,
    )


def catalog_of(name: str, items: Sequence[Item]) -> Catalog:
    """Return images of a gallery as a catalog, with their labels and fields."""
    columns = dict.fromkeys(column for item in items for column in item.fields)
    fields = {column: object_array([item.fields.get(column) for item in items]) for column in columns}
    catalog = labelled_catalog(name, [as_url(item.path) for item in items], [item.labels for item in items])
    return replace(catalog, fields=fields or None)


def labelled_catalog(name: str, paths: Sequence[str], labels: Sequence[Sequence[str]]) -> Catalog:
    """Return images with any number of labels as a catalog. The class name "" means that an image has no label."""
    labels = [each or ("",) for each in labels]
    classes = tuple(sorted({label for each in labels for label in each}))
    numbers = {each: number for number, each in enumerate(classes)}
    sets = [tuple(numbers[label] for label in each) for each in labels]
    return Catalog(
        name=name,
        root=Path(),
        paths=object_array(paths),
        labels=np.array([each[0] for each in sets], dtype=np.int64),
        class_names=classes,
        splits=np.full(len(paths), ""),
        label_sets=object_array(sets) if any(len(each) > 1 for each in sets) else None,
    )

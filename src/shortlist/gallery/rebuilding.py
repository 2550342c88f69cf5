"""Rebuild a gallery with another model."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from shortlist.data import Catalog
from shortlist.data.catalog import object_array
from shortlist.data.folders import UNLABELLED
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
        raise GalleryError(f"The gallery {gallery.name} has no images.")
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


def describe_min_score(gallery: Gallery, before: float, location: Path | str) -> str:
    """Describe the minimum score of a gallery that replaces one with another minimum score.

    Args:
        gallery: The gallery.
        before: Minimum score of the previous gallery.
        location: Location of the gallery, or its name, for the command that sets a minimum score.
    """
    if gallery.min_score is not None:
        now = f"The minimum score of {gallery.name} is {gallery.min_score:g}"
        return f"{now}; that of the previous gallery is {before:g}."
    return (
        f"{gallery.name} has no minimum score, so searches return all results. The previous gallery has {before:g}, "
        "but the scores of different models cannot be compared. To set one: "
        f"shortlist gallery set {shlex.quote(str(location))} --min-score SCORE"
    )


def catalog_of(name: str, items: Sequence[Item]) -> Catalog:
    """Return images of a gallery as a catalog, with their labels and fields."""
    columns = dict.fromkeys(column for item in items for column in item.fields)
    fields = {column: object_array([item.fields.get(column) for item in items]) for column in columns}
    classes = [item.labels or (UNLABELLED,) for item in items]
    return Catalog.from_classes(name, Path(), [as_url(item.path) for item in items], classes, fields=fields or None)

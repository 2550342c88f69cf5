"""Tests that compare galleries: the same queries, with the vectors and the model of each gallery."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shortlist.data import Catalog, open_collection
from shortlist.errors import DataError
from shortlist.gallery import Gallery
from shortlist.gallery.rebuilding import catalog_of
from shortlist.locations import absolute_path
from shortlist.progress import Display
from shortlist.report.analysis import EmbeddedTest
from shortlist.training.run_evaluation import embed_test

CUT_OFFS = (1, 5, 10)


def open_gallery_test(
    paths: Mapping[str, Path], queries: Path | str | None, display: Display, *, label_separator: str | None = None
) -> dict[str, EmbeddedTest]:
    """Open a test of galleries: the same queries, and the labelled images that all galleries have in common.

    Args:
        paths: Folders or names of the galleries.
        queries: Labelled images, as in `open_collection`. None: each labelled image of the galleries searches for the
            other images with its label.
        display: Shows the progress.
        label_separator: Separator of several labels of a query, as in `open_collection`.

    Raises:
        DataError: The galleries have no labelled images in common, or the queries have none of their labels.
    """
    galleries = {name: Gallery.open(path) for name, path in paths.items()}
    items = {name: {i.path: i for i in each.items(limit=len(each)) if i.label} for name, each in galleries.items()}
    first = next(iter(items.values()))
    common = [path for path in first if all(path in each for each in items.values())]
    if not common:
        raise DataError(f"{' and '.join(paths)} have no labelled images in common, so they cannot be compared.")
    catalog = catalog_of(f"{len(common):,} images of {next(iter(paths))}", [first[path] for path in common])
    query_images = None if queries is None else open_collection(queries, label_separator=label_separator)
    tests: dict[str, EmbeddedTest] = {}
    for name, gallery in galleries.items():
        with closing(gallery):
            vectors = torch.from_numpy(np.array(gallery.store.vectors([items[name][path].id for path in common])))
            tests[name] = EmbeddedTest(catalog, CUT_OFFS, vectors)
            if query_images is not None:
                tests[name] = _with_queries(tests[name], query_images, _embed(query_images, gallery, display))
    return tests


def _embed(queries: Catalog, gallery: Gallery, display: Display) -> Tensor:
    with display.task(f"embedding {queries.name} with {gallery.name}", "images") as progress:
        return embed_test(gallery.encoder, queries, None, None, progress).cpu()


def _with_queries(test: EmbeddedTest, queries: Catalog, vectors: Tensor) -> EmbeddedTest:
    """Return a test in which these images are the queries, and the images of `test` are searched."""
    known = test.catalog
    if not set(queries.class_names) & set(known.class_names):
        raise DataError(f"No label of {queries.name} is one of {known.name}: the queries need the same labels.")
    paths = [*known.paths, *(absolute_path(queries.file(each)) for each in range(len(queries)))]
    labels = [each.label_names(row) for each in (known, queries) for row in range(len(each))]
    roles = np.repeat(["gallery", "query"], [len(known), len(queries)])
    catalog = Catalog.from_classes(f"{len(queries):,} queries of {queries.name}", Path(), paths, labels, roles=roles)
    return EmbeddedTest(catalog, test.k, torch.cat([test.vectors, vectors.float()]))

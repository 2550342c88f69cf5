"""Measure the effect of whitening on features before any training: Cars196, EfficientNet-Lite0 with ImageNet weights.

    python benchmarks/whitening.py DATA            30 images per class at 112 pixels, embedded once: a few minutes
    python benchmarks/whitening.py DATA --quick    4 images per class, to test the script; nothing is written

Whitening is learned on the 98 training classes and evaluated on the 98 test classes. The shrinkage is chosen within the
training classes: learned on the first half of them, and evaluated on the second half. For comparison, the script also
evaluates the pooled features (GeM) themselves, and a linear layer with its usual random initial weights. The results
are written to results/whitening.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from shortlist.data import Catalog, TestTransform, half_validation, open_catalog
from shortlist.encoding import embed_images
from shortlist.evaluation import evaluate
from shortlist.model import Embedder, pair_whitening, pca_whitening
from shortlist.model.weights import LITE0_BACKBONE, LITE0_PACKAGE
from shortlist.progress import display_for
from shortlist.training.folder import write_text_atomically
from shortlist.training.initial_whitening import sample_images

RESULTS = Path(__file__).parent / "results" / "whitening.json"
SHRINKAGES = (0.0, 0.01, 0.03, 0.1, 0.3)
METRICS = ("r@1", "r@8", "mAP", "mAP@R")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of Cars196")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    catalog = open_catalog("cars196", root=options.root, on_missing="skip")
    each = 4 if options.quick else 30
    catalog = catalog.subset(np.sort(sample_images(catalog.labels, each * len(catalog.classes()), seed=0)))
    features = pooled_features(catalog)
    splits = half_validation(catalog).splits
    first, second, test = (np.isin(splits, names) for names in (["train"], ["validation"], ["test"]))
    results = [
        *measured("validation", features, catalog, first, second),
        *measured("test", features, catalog, first | second, test),
    ]
    if not options.quick:
        facts = {
            "command": "python benchmarks/whitening.py DATA",
            "backbone": LITE0_BACKBONE,
            "images": len(catalog),
            "catalog": catalog.fingerprint(),
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        write_text_atomically(RESULTS, json.dumps({**facts, "results": results}, indent=2) + "\n")


def pooled_features(catalog: Catalog) -> Tensor:
    """Return the pooled features, (n, 1280), L2-normalised."""
    embedder = Embedder(LITE0_BACKBONE, dim=None, layer_norm=False, pretrained=LITE0_PACKAGE)
    with display_for(sys.stderr).task(f"embedding {len(catalog):,} images") as progress:
        return embed_images(embedder, catalog, TestTransform(112, 128), batch_size=32, progress=progress)


def measured(name: str, features: Tensor, catalog: Catalog, learn: Any, test: Any) -> Iterator[dict[str, Any]]:
    """Evaluate every case, learned on some images, on other images."""
    labels = torch.from_numpy(catalog.labels[learn])
    for case, weight, bias in cases(features[learn], labels):
        vectors = normalize(linear(features[test], weight, bias))
        found = evaluate(vectors, catalog.subset(test), k=(1, 8)).metrics
        print(name, *case.values(), *(f"{metric} {found[metric]}" for metric in METRICS), sep="\t", flush=True)
        yield {"measured on": name, **case, **{metric: vars(found[metric]) for metric in METRICS}}


def cases(features: Tensor, labels: Tensor) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
    """Yield the description, the weight and the bias of each case."""
    channels = features.shape[1]
    yield {"way": "pooled", "dim": channels, "shrinkage": None}, torch.eye(channels), torch.zeros(channels)
    for dim in (dim for dim in (channels, 512, 128) if dim < len(features)):
        torch.manual_seed(0)
        layer = nn.Linear(channels, dim)
        yield {"way": "random", "dim": dim, "shrinkage": None}, layer.weight.detach(), layer.bias.detach()
        for shrinkage in SHRINKAGES:
            case = {"dim": dim, "shrinkage": shrinkage}
            yield {"way": "pca", **case}, *pca_whitening(features, dim, shrinkage)
            if shrinkage or len(features) - len(labels.unique()) > channels:
                yield {"way": "pairs", **case}, *pair_whitening(features, labels, dim, shrinkage)


if __name__ == "__main__":
    main()

"""The number of a run: on its own test classes, or on other images."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator

from shortlist.data import BENCHMARKS, open_catalog
from shortlist.errors import RunError
from shortlist.model import Embedder
from shortlist.retrieval import Evaluation, embed_images, evaluate
from shortlist.training.display import Display
from shortlist.training.folder import RunFolder
from shortlist.training.parts import build_transforms
from shortlist.training.plan import decoding_workers, open_images


def evaluate_run(
    path: Path | str, data: str | None = None, *, root: Path | None = None, display: Display | None = None
) -> Evaluation:
    """Evaluate a run's embedder.

    Args:
        path: the run's folder.
        data: other images than the run's own; where they have no splits, all of them are the test.
        root: as in `open_catalog`.
        display: for progress.
    """
    folder, display = RunFolder.open(Path(path)), display or Display()
    config = folder.config()
    embedder = open_embedder(folder).to(Accelerator().device)
    if data is None:
        catalog, _ = open_images(config, display, folder)
    else:
        catalog = open_catalog(data, root=root, on_missing=config.data.on_missing, train_share=0)
    test = catalog.split("test")
    _, transform = build_transforms(config, embedder)
    with display.task(f"embedding {len(test):,} images") as progress:
        vectors = embed_images(embedder, test, transform, workers=decoding_workers(config), progress=progress)
    benchmark = BENCHMARKS.get(data or config.data.source)
    k = config.evaluation.k or (benchmark.k if benchmark else (1, 2, 4, 8))
    return evaluate(vectors, test, k=k, bootstrap=config.evaluation.bootstrap)


def open_embedder(folder: RunFolder) -> Embedder:
    """A finished run's embedder.

    Raises:
        RunError: the run is not finished.
    """
    if not (folder.path / "embedder.json").exists():
        raise RunError(
            f"The run in {folder.path} is not finished, so it has no embedder yet. "
            f"Finish it: shortlist train --resume {folder.path}"
        )
    return Embedder.load(folder.path)

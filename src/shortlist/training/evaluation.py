"""The number of a run: on its own test classes, or on other images."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator

from shortlist.errors import RunError
from shortlist.model import Embedder
from shortlist.retrieval import Evaluation, embed_images, evaluate
from shortlist.training.display import Display
from shortlist.training.folder import RunFolder
from shortlist.training.parts import build_transforms
from shortlist.training.plan import decoding_workers, open_images, reported_k


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
    if data is not None:
        other = {"source": data, "root": root, "train_share": 0.0}
        config = config.model_copy(update={"data": config.data.model_copy(update=other)})
    catalog, _ = open_images(config, display, folder if data is None else None)
    test = catalog.split("test")
    _, transform = build_transforms(config, embedder)
    with display.task(f"embedding {len(test):,} images") as progress:
        vectors = embed_images(embedder, test, transform, workers=decoding_workers(config), progress=progress)
    return evaluate(vectors, test, k=reported_k(config), bootstrap=config.evaluation.bootstrap)


def open_embedder(folder: RunFolder) -> Embedder:
    """A finished run's embedder.

    Raises:
        RunError: the run is not finished.
    """
    if not (folder.path / "embedder.json").exists():
        raise RunError(
            f"The run in {folder.path} is not finished, so it has no embedder yet. Finish it: {folder.resume_command}"
        )
    return Embedder.load(folder.path)

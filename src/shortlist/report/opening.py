"""A finished run, opened to be looked at: what was measured, and the vectors of what it was tested on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shortlist.config import CONFIG_KEYS, RunConfig
from shortlist.data import Catalog
from shortlist.encoding import Encoder
from shortlist.errors import RunError, translate_arguments
from shortlist.evaluation import Evaluation
from shortlist.files import read_json
from shortlist.progress import Display
from shortlist.training import RunFolder, open_encoder
from shortlist.training.datasets import EvalSet
from shortlist.training.plan import decoding_workers
from shortlist.training.run_evaluation import embed_test


@dataclass(frozen=True, eq=False)
class Tested:
    """What a run was tested on: the images, the cut-offs, and a vector for each image, (n, d) on the run's device."""

    catalog: Catalog
    k: tuple[int, ...]
    vectors: Tensor


def open_finished(path: Path | str) -> tuple[RunFolder, RunConfig, Encoder]:
    """A run's folder, its config, and what gives images their vectors.

    Raises:
        RunError: there is no run, or it is not finished.
    """
    folder = RunFolder.open(Path(path))
    config = folder.config()
    if not folder.evaluation_file.exists():
        raise RunError(f"The run in {folder.path} is not finished. Finish it: {folder.resume_command}")
    return folder, config, open_encoder(folder.path)


@translate_arguments(CONFIG_KEYS)
def open_test(folder: RunFolder, config: RunConfig, encoder: Encoder, eval_set: EvalSet, display: Display) -> Tested:
    """The vectors that the run left when it was tested; images are embedded again where those are gone or changed."""
    with display.task(f"embedding {eval_set.name}", "images") as progress:
        vectors = embed_test(encoder, eval_set.catalog, decoding_workers(config), folder, progress)
    return Tested(eval_set.catalog, eval_set.k, vectors.to(next(encoder.embedder.parameters()).device))


def read_evaluations(file: Path) -> list[Evaluation]:
    """Those of an evaluation.json; none where there is no such file."""
    if not file.exists():
        return []
    return [Evaluation.from_dict(each) for each in read_json(file)]

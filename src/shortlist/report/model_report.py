"""The report of a model on labelled images that do not belong to a run: its metrics, results and failures."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch

from shortlist import __version__
from shortlist.encoding.pretrained import TIMM
from shortlist.evaluation import evaluate
from shortlist.files import check_writable
from shortlist.progress import Display, default_display
from shortlist.report.analysis import EmbeddedTest
from shortlist.report.pages import Thumbnails, write_page
from shortlist.report.run_report import MAX_COMPARED_IMAGES, catalog_counts, look_alike_section, result_sections
from shortlist.report.terminal_tables import counts
from shortlist.training.datasets import EvalImages
from shortlist.training.folder import device_name
from shortlist.training.run_evaluation import embed_labelled


def write_model_report(name: Path | str, images: EvalImages, out: Path | str, display: Display | None = None) -> Path:
    """Write the report of any model on labelled images: on the test split, or on all images if there are no splits.

    Args:
        name: Name of the model, as in `open_encoder`.
        images: The images; `images.data` is a name or path, as in `open_catalog`.
        out: HTML file to write.
        display: Shows the progress.

    Returns:
        The file.

    Raises:
        ConfigError: The file cannot be written.
        DataError: The images cannot be opened.
        ShortlistError: The model cannot be opened.
    """
    display, file, thumbnails = display or default_display(), Path(out), Thumbnails()
    check_writable(file)
    encoder, eval_set, vectors = embed_labelled(name, images, display)
    with display.task(f"ranking {eval_set.name}") as progress:
        measured = evaluate(vectors, eval_set.catalog, k=eval_set.k, progress=progress)
    test = EmbeddedTest(eval_set.catalog, eval_set.k, vectors.to(next(encoder.embedder.parameters()).device))
    facts = {
        "model": str(name),
        "images": f"{images.data}: {catalog_counts(eval_set.catalog)}",
        "remarks": "; ".join(eval_set.remarks),
        "device": device_name(),
        "versions": f"shortlist {__version__}, torch {torch.__version__}",
        "fingerprint": encoder.fingerprint,
    }
    given = {"--root": images.root, "--label-separator": images.label_separator, "--on-missing": images.on_missing}
    options = [f"{option}={value}" for option, value in given.items() if value is not None]
    sections = result_sections(thumbnails, test, 1, display)
    return write_page(
        file,
        "report.html",
        thumbnails,
        title=Path(name).absolute().name.removeprefix(TIMM),
        sections=["Numbers", "Results", "Failures", "Look-alikes", "What was run"],
        alike=look_alike_section(thumbnails, eval_set.catalog, display, [sections]),
        compared=MAX_COMPARED_IMAGES,
        evaluations=[(measured, None)],
        counts=counts,
        tests=[sections],
        facts=[(key, text, key == "fingerprint") for key, text in facts.items() if text],
        command=shlex.join(["shortlist", "report", str(name), str(images.data), *options, "-o", "NEW.html"]),
    )

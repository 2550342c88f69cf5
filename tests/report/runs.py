"""Runs to look at, and how to read a page about them."""

from __future__ import annotations

import csv
from pathlib import Path

from shortlist.training import RunFolder, train
from tests.report.test_markup import Texts
from tests.training.runs import class_folders, config

NASTY = "z </script><img src=x onerror=alert(1)>"  # a test class


def images_with_a_nasty_class(root: Path) -> Path:
    """A table of the images of 12 classes, the last of which is called something that a page must not run."""
    folders = sorted(class_folders(root / "images").iterdir())
    with (root / "images.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        for folder in folders:
            label = NASTY if folder == folders[-1] else folder.name
            writer.writerows([[str(image.relative_to(root)), label] for image in sorted(folder.iterdir())])
    return root / "images.csv"


def trained(source: Path, path: Path, *overrides: str) -> RunFolder:
    return train(config(source, "training.epochs=2", "evaluation.before=true", *overrides), path)


def read(file: Path) -> tuple[str, Texts]:
    """A page's text without its style and script, and its elements."""
    page = Texts(file.read_text(encoding="utf-8"))
    return " ".join(" ".join(page.texts).split()), page

"""Small trained runs, and a parser for the pages about them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import yaml

from shortlist.training import RunFolder
from shortlist.training import train_run as train
from tests.report.test_pages import Texts
from tests.training.runs import class_folders, fast_config, write_config

NASTY = "z </script><img src=x onerror=alert(1)>"  # name of a test class
NASTY_FILE = "javascript:alert(2) \"'><svg onload=alert(3)>.png"  # and of an image in it
CopyRun = Callable[..., RunFolder]  # the fixture `copy_run`


def images_with_a_nasty_class(root: Path) -> Path:
    """Write a table of images of 12 classes. No page may execute the names of the last one and of an image of it."""
    folders = sorted(class_folders(root / "images").iterdir())
    (folders[-1] / "5.png").rename(folders[-1] / NASTY_FILE)
    with (root / "images.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        for folder in folders:
            label = NASTY if folder == folders[-1] else folder.name
            writer.writerows([[str(image.relative_to(root)), label] for image in sorted(folder.iterdir())])
    return root / "images.csv"


def remove_class(source: Path, name: str) -> None:
    """Remove the images in a folder from a table of images."""
    rows = source.read_text(encoding="utf-8").splitlines(keepends=True)
    source.write_text("".join(row for row in rows if f"/{name}/" not in row), encoding="utf-8")


def trained(source: Path, path: Path, *overrides: str) -> RunFolder:
    return train(fast_config(source, "training.epochs=2", "evaluation.before=true", *overrides), path)


def change_config(run: RunFolder, key: str, value: object) -> None:
    """Set a key such as data.source in the configuration of a finished run."""
    values = yaml.safe_load(run.config_file.read_text(encoding="utf-8"))
    section, name = key.split(".")
    values[section][name] = value
    write_config(run, yaml.safe_dump(values, allow_unicode=True))


def read(file: Path) -> tuple[str, Texts]:
    """Return the text of a page with normalised white space, and its elements."""
    page = Texts(file.read_text(encoding="utf-8"))
    return " ".join(" ".join(page.texts).split()), page

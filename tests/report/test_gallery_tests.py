"""Comparing galleries of two models on the same queries."""

# ruff: noqa: F811 - fixtures of the encoder

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from shortlist.data import Catalog
from shortlist.encoding import Encoder
from shortlist.errors import ConfigError, DataError
from shortlist.gallery import Gallery
from shortlist.gallery.store import Row
from shortlist.report import compare_runs, write_comparison
from shortlist.report.terminal_tables import print_comparison
from tests.encoding.conftest import encoder, shared_images  # noqa: F401

LABELS = ["ant", "bee", "cat"] * 12


def gallery(folder: Path, encoder: Encoder, noise: float, rows: range) -> np.ndarray:
    """Create a gallery whose vectors are those of their labels plus noise. Returns its vectors."""
    random = np.random.default_rng(0)
    centres = np.eye(3, encoder.dim)[[sorted(set(LABELS)).index(each) for each in LABELS]]
    vectors = (centres + noise * random.normal(size=centres.shape)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    store = Gallery.create(folder, encoder).store
    with store.changing():
        store.change([Row(f"/{each}.png", LABELS[each], 1, 1) for each in rows], vectors[rows.start : rows.stop])
        store.change([Row("/unlabelled.png", None, 1, 1)], vectors[:1])
    return vectors


def recall_at_1(vectors: np.ndarray, labels: list[str]) -> float:
    similarities = vectors @ vectors.T
    np.fill_diagonal(similarities, -2)
    return float(np.mean([labels[best] == own for best, own in zip(similarities.argmax(1), labels, strict=True)]))


def test_each_image_searches_for_the_others(
    encoder: Encoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only images that both galleries have are used, so that both have the same queries."""
    old = gallery(tmp_path / "old", encoder, 0.6, range(36))
    new = gallery(tmp_path / "new", encoder, 0.05, range(2, 36))
    comparison = compare_runs([tmp_path / "old", tmp_path / "new"])
    (test,) = comparison.tests
    assert test.queries["r@1"] == 34
    expected = {name: recall_at_1(each[2:], LABELS[2:]) for name, each in (("old", old), ("new", new))}
    assert expected["old"] < 0.9 < expected["new"]
    assert {name: each["r@1"] for name, each in test.means.items()} == pytest.approx(expected)
    assert test.differences["new"]["r@1"].significant
    note = "on images that it was trained on: to compare the models on new images, use --queries"
    page = write_comparison(comparison, tmp_path / "page.html").read_text(encoding="utf-8")
    print_comparison(comparison)
    for text in (page, capsys.readouterr().out, comparison.to_dict()["remarks"][0]):
        assert note in text
    texts = re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)
    assert not re.findall(r"\bruns?\b", texts, re.IGNORECASE)
    assert "<h2>Galleries</h2>" in page


def test_queries_of_the_user(encoder: Encoder, shared_images: Catalog, tmp_path: Path) -> None:
    """Queries are embedded by the model of each gallery, and search only its images."""
    for name in ("old", "new"):
        Gallery.build(encoder, shared_images.subset(range(1, len(shared_images))), tmp_path / name, workers=0)
    comparison = compare_runs([tmp_path / "old", tmp_path / "new"], queries=shared_images.root)
    (test,) = comparison.tests
    assert (comparison.remarks(), "remarks" in comparison.to_dict()) == ([], False)
    assert test.queries["r@1"] == len(shared_images)
    found = Gallery.open(tmp_path / "old").search(shared_images.file(0), 1)[0].item.label
    first_is_right = found == shared_images.class_names[shared_images.labels[0]]
    right = len(shared_images) - 1 + first_is_right  # all other queries are in the galleries
    assert test.means["old"]["r@1"] == test.means["new"]["r@1"] == pytest.approx(right / len(shared_images))
    rows = [f"{shared_images.file(row)},{shared_images.label_names(row)[0]}|{row}" for row in range(len(shared_images))]
    (tmp_path / "queries.csv").write_text("\n".join(["path,label", *rows]))
    given = {"queries": tmp_path / "queries.csv", "label_separator": "|"}
    (several,) = compare_runs([tmp_path / "old", tmp_path / "new"], **given).tests
    assert several.means["old"] == test.means["old"]


def test_refusals(encoder: Encoder, shared_images: Catalog, tmp_path: Path) -> None:
    gallery(tmp_path / "old", encoder, 0.1, range(3))
    gallery(tmp_path / "new", encoder, 0.1, range(3, 6))
    with pytest.raises(DataError, match="old and new have no labelled images in common"):
        compare_runs([tmp_path / "old", tmp_path / "new"])
    with pytest.raises(ConfigError, match="run is not a gallery"):
        compare_runs([tmp_path / "old", tmp_path / "run"])
    with pytest.raises(ConfigError, match="`queries` are for galleries"):
        compare_runs([tmp_path / "run", tmp_path / "other"], queries="images")
    gallery(tmp_path / "third", encoder, 0.1, range(3))
    with pytest.raises(DataError, match="No label of images is one of"):
        compare_runs([tmp_path / "old", tmp_path / "third"], queries=shared_images.root)

"""Training on images with several labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from shortlist.errors import ConfigError
from shortlist.progress import default_display
from shortlist.report.run_report import write_report
from shortlist.training import EvalImages, evaluate_run, make_plan, train_run
from tests.training.runs import class_folders, fast_config

ONE = "training={epochs: null, steps: 1}"
SEVERAL = ("data.label_separator=|", "data.validation=none", "batch={size: 6, per_class: 3, chunk_size: 6}")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of four classes, of which the two of a split also have a common label."""
    root = tmp_path_factory.mktemp("several labels")
    files = sorted(class_folders(root / "images", classes=4, images=4).rglob("*.png"))
    splits = [("train", "even")] * 8 + [("test", "odd")] * 8
    rows = [
        f"{file.relative_to(root)},{file.parent.name}{f'|{common}' if number % 2 else ''},{split}"
        for number, (file, (split, common)) in enumerate(zip(files, splits, strict=True))
    ]
    (root / "images.csv").write_text("\n".join(["path,label,split", *rows]))
    return root / "images.csv"


def test_a_run(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss gets all labels, and the test counts images that share one."""
    from shortlist.training import learner

    seen = []
    compute = learner.Learner._compute_loss
    monkeypatch.setattr(
        learner.Learner,
        "_compute_loss",
        lambda self, vectors, labels: seen.append(labels) or compute(self, vectors, labels),
    )
    run = train_run(fast_config(table, ONE, "loss.simix=true", *SEVERAL), tmp_path / "run")
    assert seen[0].shape == (6, 2)
    assert (seen[0] == -1).any()
    (measured,) = run.evaluations()
    assert (measured.queries, measured.left_out) == (8, 0)
    with pytest.raises(ConfigError, match=r"contains the training images of the run, .* of the run \('\|'\)\. Omit it"):
        evaluate_run(run.path, EvalImages(table, label_separator=";"))
    other = table.with_name("other.csv")
    other.write_text(table.read_text().replace("|", ";"))
    (same,) = evaluate_run(run.path, EvalImages(other, label_separator=";"))
    assert same.metrics == measured.metrics
    assert same.metrics != evaluate_run(run.path, EvalImages(other))[0].metrics
    page = write_report(run.path).read_text(encoding="utf-8")
    assert "class 02, odd" in page


def test_losses_that_need_one_label(table: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss\.name=pml\.TripletMarginLoss needs images with one label each"):
        make_plan(fast_config(table, ONE, *SEVERAL, "loss={name: pml.TripletMarginLoss}"), default_display())

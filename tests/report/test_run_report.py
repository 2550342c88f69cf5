"""The report of a run: its content, and its behaviour if something is missing."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from shortlist.errors import RunError
from shortlist.files import read_json, write_json
from shortlist.model import Embedder
from shortlist.report import run_report
from shortlist.report.analysis import EmbeddedTest
from shortlist.report.pages import Thumbnails
from shortlist.report.run_report import look_alike_section, report_after_training, result_sections, write_report
from shortlist.training import Display, RunFolder, make_plan, run_evaluation
from tests.evaluation.test_evaluate import catalog, points
from tests.report.runs import NASTY, CopyRun, change_config, read, remove_class, trained
from tests.training.runs import write_config

NO_TEST = ("data.train_share=1", "data.validation=none", "training.epochs=1")


class Listener(Display):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str, **facts: object) -> None:
        self.messages.append(text)


@pytest.fixture(scope="module")
def finished(copy_run: CopyRun, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return copy_run(tmp_path_factory.mktemp("runs") / "Ein <Lauf> & mehr")


@pytest.fixture
def run(copy_run: CopyRun, tmp_path: Path) -> RunFolder:
    """A run that a test may change."""
    return copy_run(tmp_path / "run")


@pytest.fixture
def images(run: RunFolder, source: Path, tmp_path: Path) -> Path:
    """A copy of the images of `run` that a test may change: the table next to their folder."""
    moved = Path(shutil.copytree(source.parent, tmp_path / "images")) / source.name
    change_config(run, "data.source", str(moved))
    return moved


@pytest.fixture(scope="module")
def page(finished: RunFolder) -> Path:
    return write_report(finished.path)


class TestPage:
    def test_the_page_is_in_the_folder_of_the_run(self, page: Path, finished: RunFolder) -> None:
        assert page == finished.path / "report.html"

    def test_numbers_are_those_of_the_evaluation(self, page: Path, finished: RunFolder) -> None:
        text, _ = read(page)
        (after,), (before,) = (
            json.loads(file.read_text()) for file in (finished.evaluation_file, finished.before_file)
        )
        for name, estimate in after["metrics"].items():
            assert name in text
            value, low, high = (100 * estimate[part] for part in ("value", "low", "high"))
            assert f"[{low:.1f}, {high:.1f}]" in text
            assert f"{value:.1f}" in text
        assert f"before training it was {100 * before['metrics']['r@1']['value']:.1f} %" in text

    def test_the_recommended_minimum_score(
        self, page: Path, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "No minimum score is recommended" in read(page)[0]  # too few queries would find anything
        copy = RunFolder(shutil.copytree(finished.path, tmp_path / "run"))
        assert copy.recommended_min_score() is None
        for enough, is_recommended in ((0.0, True), (1.1, False)):
            monkeypatch.setattr("shortlist.report.thresholds.MIN_FOUND", enough)
            text, _ = read(write_report(copy.path))
            score = copy.recommended_min_score()
            assert (score is not None, "No minimum score is recommended" in text) == (
                is_recommended,
                not is_recommended,
            )
            if score is not None:
                assert f"With a minimum score of {score:.3f} , a query whose class is not in the gallery" in text
                assert json.loads(copy.min_score_file.read_text())["false_match_rate"] == 0.05  # of 36 queries

    def test_a_minimum_score_that_cannot_be_written(self, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("shortlist.training.folder.write_json", full)
        with pytest.raises(OSError, match="No space left"):
            run.recommend_min_score((0.5, 0.01))
        monkeypatch.setattr(os, "access", lambda *_: False)
        run.recommend_min_score((0.5, 0.01))  # a report of the run of somebody else

    def test_images_that_look_the_same(self, page: Path, finished: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "None: no image for validation or test looks like a training image." in read(page)[0]
        plan = make_plan(finished.config(), Listener(), finished)
        train, test = (np.flatnonzero(plan.catalog.splits == split) for split in ("train", "test"))
        pairs = [((int(test[0]), int(train[0])), True), ((int(test[1]), int(test[-1])), False)] * 30
        monkeypatch.setattr(run_report, "find_look_alikes", lambda *_, **__: pairs)
        thumbnails = Thumbnails()
        found = look_alike_section(thumbnails, plan.catalog, Listener())
        assert (found.num_leaks, found.num_classes, len(found.leaks), len(found.classes)) == (30, 30, 24, 24)
        assert [each.path for each in found.leaks[0]] == [plan.catalog.paths[train[0]], plan.catalog.paths[test[0]]]
        assert len(thumbnails.images) == 4
        monkeypatch.setattr(run_report, "MAX_COMPARED_IMAGES", 10)
        assert look_alike_section(thumbnails, plan.catalog, Listener()) is None

    def test_training_images_with_almost_the_same_vector(self, finished: RunFolder, tmp_path: Path) -> None:
        text, _ = read(write_report(finished.path, tmp_path / "page.html", training_images=True))
        vectors = [np.load(finished.path / "vectors" / f"images{each}.npy") for each in ("", "-train")]
        expected = int(((vectors[0] @ vectors[1].T).max(1) >= 0.98).sum())
        assert re.search(rf"{expected} test images? ha(s|ve) a similarity of at least 0.98 to a training image", text)
        assert "--training-images" not in text

    def test_every_curve_is_drawn(self, page: Path) -> None:
        _, found = read(page)
        plots = [each["aria-label"] or "" for name, each in found.elements if name == "svg" and "data-points" in each]
        for title in ("loss", "validation r@1", "learning rate", "images per second", "GeM's p"):
            assert any(label.startswith(f"{title}:") for label in plots), title
        assert any(label.startswith("Rank of the first correct result") for label in plots)
        assert any(label.startswith("Similarities of positive and negative pairs") for label in plots)

    def test_every_class_is_shown_with_its_results(self, page: Path) -> None:
        _, found = read(page)
        cards = [each for name, each in found.elements if name == "article"]
        assert {each["data-class"] for each in cards} == {f"class {number:02}" for number in range(6, 11)} | {NASTY}
        groups = [set(json.loads(each["data-groups"] or "")) for each in cards]
        assert set.union(*groups) == {"random", "worst", "best", "every class"}
        assert sum("every class" in each for each in groups) == 6
        results = [each["class"] for name, each in found.elements if name == "li" and each.get("class")]
        assert len(results) >= 10 * len(cards)
        assert set(results) == {"right", "wrong"}

    def test_each_thumbnail_is_stored_once(self, page: Path) -> None:
        content = page.read_text(encoding="utf-8")
        (data,) = re.findall(r'id="pictures">(.*?)</script>', content)
        pictures = json.loads(data)
        _, found = read(page)
        asked = [int(each["data-picture"] or -1) for name, each in found.elements if name == "img"]
        assert set(asked) == set(range(len(pictures)))
        assert len(asked) > len(pictures)
        assert len(pictures) <= 36  # test images
        assert content.count(pictures[0]) == 1

    def test_everything_has_an_alternative_text(self, page: Path) -> None:
        _, found = read(page)
        assert all(each.get("alt") for name, each in found.elements if name == "img")
        assert all(each.get("aria-label") or "aria-hidden" in each for name, each in found.elements if name == "svg")

    def test_names_are_escaped(self, page: Path) -> None:
        _, found = read(page)
        assert [name for name, _ in found.elements].count("script") == 2
        assert not [each for _, each in found.elements if "onerror" in each or "src" in each]
        assert "Ein <Lauf> & mehr" in read(page)[0]
        assert NASTY in read(page)[0]

    def test_what_was_run(self, page: Path, finished: RunFolder) -> None:
        text, _ = read(page)
        facts = json.loads(finished.facts_file.read_text())
        assert f"torch {facts['versions']['torch']}" in text
        assert "18 images of 3 classes, 6 per class" in text  # training, and validation
        assert "36 images of 6 classes, 6 per class" in text
        assert "backbone: test_vit" in text
        assert f"shortlist train '{finished.config_file}' --run NEW" in text

    def test_loads_nothing_from_the_network(self, page: Path) -> None:
        _, found = read(page)
        targets = [each[key] or "" for _, each in found.elements for key in ("src", "href") if key in each]
        assert targets
        assert all(target.startswith("#section-") for target in targets)
        ids = {each["id"] for _, each in found.elements if "id" in each}
        assert {target[1:] for target in targets} <= ids


class TestVariants:
    def test_another_file(self, run: RunFolder, tmp_path: Path) -> None:
        file = write_report(run.path, tmp_path / "new folder" / "page.html")
        assert file == tmp_path / "new folder" / "page.html"
        assert file.is_file()
        assert not (run.path / "report.html").exists()

    def test_left_out_classes_and_images(self, source: Path, tmp_path: Path) -> None:
        images = Path(shutil.copytree(source.parent, tmp_path / "images"))
        for number in range(1, 6):
            (images / "images" / "class 00" / f"{number}.png").unlink()  # one image left is too few
        (images / "images" / "class 03" / "0.png").write_text("no image")
        settings = ("data.on_missing=skip", "data.validation=none", "training.epochs=1", "evaluation.before=false")
        run = trained(images / "images.csv", tmp_path / "run", *settings)
        text, _ = read(write_report(run.path))
        assert "1 (too few images for a batch): class 00" in text
        assert "5 (skipped because of data.on_missing=skip): images/class 00/1.png" in text
        assert "1 (skipped): images/class 03/0.png" in text

    def test_the_same_picture_in_two_classes(self, run: RunFolder, images: Path) -> None:
        folders = images.parent / "images"
        shutil.copyfile(folders / "class 07" / "0.png", folders / "class 08" / "3.png")
        text, page = read(write_report(run.path))
        assert "1 pair of images has equal pixels and different labels" in text
        assert "images/class 08/3.png" in text
        _, _, alike = text.partition("Pairs of images in two classes")
        assert alike.startswith(" None, except for the pairs that are shown above")
        tooltips = [each.get("title") for _, each in page.elements if each.get("class") == "path"]
        assert "images/class 08/3.png" in tooltips
        assert f"To write the report with this list: shortlist report {run.path} --training-images" in text

    def test_more_classes_than_are_shown(self) -> None:
        test = EmbeddedTest(catalog([number // 2 for number in range(50)]), (1,), points(50))
        groups = result_sections(Thumbnails(), test, 10, Display()).queries.groups
        assert groups[-1] == ("every class", "one of each of 20 classes", 20)

    def test_error_reductions(self, run: RunFolder, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "rror reduction" not in read(page)[0]
        (tested,) = json.loads(run.evaluation_file.read_text())
        monkeypatch.setattr(
            run_report, "reductions_to_previous_best", lambda config, results: {tested["data"]: {"r@1": -12.34}}
        )
        text, _ = read(write_report(run.path))
        assert "-12.3" in text
        assert "relative to the best earlier method" in text


class TestMissingParts:
    def test_no_test_images(self, copy_run: CopyRun, tmp_path: Path) -> None:
        run = copy_run(tmp_path / "run", *NO_TEST)
        text, found = read(write_report(run.path))
        assert "The run had no test images" in text
        assert "This run had no tests." in text
        assert "This run had no validation." in text
        assert not [each for name, each in found.elements if name == "article"]

    def test_a_final_run_shows_the_results_of_the_run_that_it_repeats(
        self, copy_run: CopyRun, finished: RunFolder, page: Path, tmp_path: Path
    ) -> None:
        final = copy_run(tmp_path / "run-final", *NO_TEST)
        text = final.config_file.read_text(encoding="utf-8")
        assert "\nrepeats: null\n" in text
        (after,), (before,) = finished.evaluations(), finished.evaluations(before=True)
        for origin, exists in ((finished.path, True), (tmp_path / "gone", False)):
            repeats = f"\nrepeats: {json.dumps(str(origin))}\n"
            write_config(final, text.replace("\nrepeats: null\n", repeats))
            shown, found = read(write_report(final.path))
            assert re.search(rf"This run repeats {origin.name} with all classes. No class was left for a test", shown)
            assert f"repeats {origin} , with all classes".replace(" ,", ",") in shown
            assert (f"{100 * after.values['r@1']:.1f} % of 36 queries" in shown) is exists
            assert (f"before training it was {100 * before.values['r@1']:.1f} %" in shown) is exists
            links = [each["href"] for name, each in found.elements if name == "a" and each["href"][0] != "#"]
            assert bool(links) is exists
            assert all((final.path / unquote(link)).samefile(page) for link in links)

    def test_images_that_are_gone(self, run: RunFolder, tmp_path: Path) -> None:
        change_config(run, "data.source", str(tmp_path / "gone.csv"))
        shown, found = read(write_report(run.path))
        assert "The images cannot be opened, so no results are shown" in shown
        assert "gone.csv" in shown
        assert "r@1" in shown
        assert "for all steps, without validation and tests" in shown
        assert not [each for name, each in found.elements if name == "article"]

    def test_images_that_have_changed(self, run: RunFolder, images: Path) -> None:
        vectors = {file.name: file.read_bytes() for file in run.vectors.glob("*.npy")}
        remove_class(images, "class 00")  # changes the split, so that training classes would be tested
        shown, found = read(write_report(run.path))
        assert "The images have changed since the training, so no results are shown." in shown
        assert "r@1" in shown
        assert not [each for name, each in found.elements if name == "article"]
        assert {file.name: file.read_bytes() for file in run.vectors.glob("*.npy")} == vectors

    def test_vectors_that_are_gone(self, run: RunFolder) -> None:
        before = write_report(run.path).read_text(encoding="utf-8")
        shutil.rmtree(run.vectors)
        assert write_report(run.path).read_text(encoding="utf-8") == before
        assert run.vectors.is_dir()

    def test_an_unknown_version_and_no_test_before_training(self, run: RunFolder) -> None:
        facts = read_json(run.facts_file)
        facts["versions"]["shortlist"] = None
        write_json(run.facts_file, facts)
        run.before_file.unlink()
        text, _ = read(write_report(run.path))
        assert "shortlist None" not in text
        assert "before training" not in text

    def test_a_read_only_run_is_not_embedded_again(
        self, run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def embeds(*_: object, **__: object) -> None:
            raise AssertionError("an image was embedded")

        monkeypatch.setattr(Embedder, "forward", embeds)
        # The superuser may write everywhere.
        monkeypatch.setattr(run_evaluation.os, "access", lambda path, _: Path(path) != run.path)
        assert write_report(run.path, tmp_path / "page.html").is_file()
        shutil.rmtree(run.vectors)
        with pytest.raises(AssertionError, match="an image was embedded"):  # the control
            write_report(run.path, tmp_path / "page.html")

    def test_an_unfinished_run(self, run: RunFolder) -> None:
        run.evaluation_file.unlink()
        with pytest.raises(RunError, match=r"is not finished.*shortlist train --resume"):
            write_report(run.path)

    def test_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match="No run found"):
            write_report(tmp_path)


class TestAfterTraining:
    def test_prints_the_path(self, run: RunFolder) -> None:
        display = Listener()
        report_after_training(run, display)
        assert display.messages == [f"The report is {run.path / 'report.html'}."]

    def test_a_failure_is_a_message(self, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run_report, "result_sections", lambda *_: 1 / 0)
        display = Listener()
        report_after_training(run, display)
        (message,) = display.messages
        assert "could not be written (ZeroDivisionError" in message
        assert f"shortlist report {run.path}" in message
        assert not (run.path / "report.html").exists()

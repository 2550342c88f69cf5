"""`shortlist report` and `shortlist compare`, and the report that `train` writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shortlist import report
from shortlist.errors import RunError
from shortlist.report import run_report
from tests.report.runs import trained
from tests.test_cli import FAST, Call, assert_error, call  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def two(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("two")
    run = Path(shutil.copytree(folders / "run", root / "run"))
    return run, trained(folders / "images", root / "other", "data.validation=none").path


def messages(out: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.splitlines()]


class TestReport:
    def test_path_of_the_file(self, call: Call, two: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
        code, out, err = call("report", two[0], "--json")
        assert (code, err) == (0, "")
        assert messages(out)[-1]["report"] == str(two[0] / "report.html")
        code, out, _ = call("report", two[0], "-o", "Übersicht.html")
        assert (code, out.splitlines()[-1]) == (0, "The report is Übersicht.html.")
        assert (tmp_path / "Übersicht.html").read_text(encoding="utf-8").startswith("<!doctype html>")

    def test_mistakes(self, call: Call, folders: Path, tmp_path: Path) -> None:  # noqa: F811
        assert_error(call("report", tmp_path), "No run found in")
        assert_error(call("report", "nowhere"), "No run found in nowhere")
        assert_error(call("report", folders / "run", "-o", tmp_path), "is a folder")

    def test_train_writes_the_report(self, call: Call, folders: Path, tmp_path: Path) -> None:  # noqa: F811
        code, out, _ = call("train", "tiny.yaml", f"data.source={folders / 'images'}", "--run", "run", *FAST, "--json")
        assert code == 0
        assert [each["report"] for each in messages(out) if "report" in each] == ["run/report.html"]
        (tmp_path / "run" / "report.html").unlink()
        assert call("train", "--resume", "run")[0] == 0
        assert (tmp_path / "run" / "report.html").is_file()

    def test_train_succeeds_if_the_report_fails(
        self,
        call: Call,  # noqa: F811
        folders: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(run_report, "write_report", lambda *_, **__: 1 / 0)
        code, out, _ = call("train", "tiny.yaml", f"data.source={folders / 'images'}", "--run", "run", *FAST)
        assert code == 0
        assert "The report could not be written" in out
        assert out.splitlines()[-1] == "The run is in run."


class TestCompare:
    def test_table_and_page(self, call: Call, two: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
        code, out, err = call("compare", *two)
        assert code == 0
        assert "R-precision" in out
        assert "other" in out
        assert err.splitlines()[-1] == "The page is comparison.html."
        assert (tmp_path / "comparison.html").is_file()
        _, _, err = call("compare", *two)
        replaced = "The page is comparison.html, which replaced an earlier file; --out writes to another one."
        assert err.splitlines()[-1] == replaced

    def test_json(self, call: Call, two: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
        code, out, _ = call("compare", *two, "--json")
        assert code == 0
        found = json.loads(out)
        assert found["first"] == "run"
        assert not list(tmp_path.glob("*.html"))
        assert call("compare", *two, "--json", "-o", "page.html")[0] == 0
        assert (tmp_path / "page.html").is_file()

    def test_mistakes(self, call: Call, two: tuple[Path, Path]) -> None:  # noqa: F811
        assert_error(call("compare", two[0]), "at least two runs")
        assert_error(call("compare", two[0], two[0]), "given twice")
        assert_error(call("compare", two[0], "nowhere"), "No run found in nowhere")
        assert_error(call("compare", *two, "--json", "-o", two[0]), "is a folder")

    def test_groups(self, call: Call, two: tuple[Path, Path]) -> None:  # noqa: F811
        code, out, err = call("compare", two[0], "--with", two[1], "-o", "page.html")
        assert code == 0, err
        assert "by seed" in out
        assert Path("page.html").is_file()
        code, out, _ = call("compare", "--json", two[0], "--with", two[1].with_name("oth*"))
        assert code == 0
        assert list(json.loads(out)["groups"]) == ["run", "other"]

    def test_each_with_starts_a_group(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        def stop(groups: list[list[str]], display: object) -> None:
            raise RunError(str(groups))

        monkeypatch.setattr(report, "compare_groups", stop)
        _, _, err = call("compare", "a", "b", "--with", "c", "d", "-o", "page", "--with", "e", "f")
        assert err == "Error: [['a', 'b'], ['c', 'd'], ['e', 'f']]\n"
        assert call("compare", "a", "--with")[0] == 2

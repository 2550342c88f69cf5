"""Reports and comparisons in Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from markupsafe import escape
from playwright.sync_api import Browser, Page

from shortlist.report.comparison import compare_runs, write_comparison
from shortlist.report.run_report import write_report
from tests.browser import started_browser
from tests.report.runs import NASTY, NASTY_FILE, CopyRun


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(browser: Browser, copy_run: CopyRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report and a comparison. Nothing is trained if there is no browser."""
    root = tmp_path_factory.mktemp("runs")
    runs = [copy_run(root / "one"), copy_run(root / "two | 2", "training.seed=1")]
    comparison = write_comparison(compare_runs([run.path for run in runs]), root / "comparison.html")
    return {"report": write_report(runs[0].path), "comparison": comparison}


@pytest.fixture(scope="module")
def problems() -> list[str]:
    """Errors, messages and requests of the page during the current test."""
    return []


@pytest.fixture(scope="module")
def opened(browser: Browser, problems: list[str]) -> Page:
    """One tab for all tests, because opening one is slow."""
    found = browser.new_page()
    found.on("console", lambda message: problems.append(message.text))
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("dialog", lambda dialog: problems.append(dialog.message) or dialog.dismiss())
    found.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else problems.append(request.url)
    )
    return found


@pytest.fixture
def page(opened: Page, problems: list[str]) -> Iterator[Page]:
    problems.clear()
    opened.set_viewport_size({"width": 1200, "height": 800})
    opened.emulate_media(media="screen", color_scheme="light")
    yield opened
    opened.goto("about:blank")  # all events of the page have arrived after this
    assert problems == []  # no script in a name was executed, and nothing was loaded from the network


def shown(page: Page) -> list[str]:
    return page.locator(".card:visible").evaluate_all("cards => cards.map(card => card.dataset.class)")


@pytest.mark.parametrize("name", ["report", "comparison"])
class TestBoth:
    def test_screens_of_any_width_and_colour_scheme(self, pages: dict[str, Path], page: Page, name: str) -> None:
        page.goto(pages[name].as_uri())
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == 390  # it does not scroll sideways
        colours = []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            style = "getComputedStyle(document.body)"
            colours.append([page.evaluate(f"{style}.{part}") for part in ("color", "backgroundColor")])
        assert colours[0] != colours[1]

    def test_pictures_and_their_marks(self, pages: dict[str, Path], page: Page, name: str) -> None:
        page.goto(pages[name].as_uri())
        widths = page.locator("img").evaluate_all("images => images.map(image => image.naturalWidth)")
        assert len(widths) > 100
        assert min(widths) > 0
        looks = [
            page.locator(f".results .{kind} .frame").first.evaluate(
                "frame => [getComputedStyle(frame).borderTopStyle, getComputedStyle(frame, '::after').backgroundImage]"
            )
            for kind in ("right", "wrong")
        ]
        assert looks[0][0] != looks[1][0]  # right and wrong results differ also without colour
        assert looks[0][1] != looks[1][1]

    def test_hostile_names_are_shown(self, pages: dict[str, Path], page: Page, name: str) -> None:
        """As text; `page` checks that nothing is executed."""
        page.goto(pages[name].as_uri())
        assert NASTY in page.locator(".card .class").all_text_contents()
        titles = page.locator("[title]").evaluate_all("elements => elements.map(element => element.title)")
        assert [title for title in titles if title.endswith(f"/{NASTY_FILE}")]

    def test_hostile_names_that_are_executed_are_noticed(
        self, pages: dict[str, Path], page: Page, problems: list[str], tmp_path: Path, name: str
    ) -> None:
        """Negative control: the same pages with a name that is not escaped."""
        content, file = pages[name].read_text(encoding="utf-8"), tmp_path / "page.html"
        for before, hostile, message in (('<p class="class">', NASTY, "1"), ("/", NASTY_FILE, "3")):
            changed = content.replace(f"{before}{escape(hostile)}", f"{before}{hostile}", 1)
            assert changed != content
            file.write_text(changed, encoding="utf-8")
            page.goto(file.as_uri())
            page.goto("about:blank")  # all events of the page have arrived after this
            assert message in problems
            problems.clear()


class TestReport:
    def test_queries_are_filtered_by_group_and_by_class(self, pages: dict[str, Path], page: Page) -> None:
        page.goto(pages["report"].as_uri())
        first = shown(page)
        page.get_by_role("button", name="one of every class").click()
        assert sorted(shown(page)) == sorted(["class 06", "class 07", "class 08", "class 09", "class 10", NASTY])
        assert page.get_by_role("button", name="one of every class").get_attribute("aria-pressed") == "true"
        page.get_by_role("button", name="random").click()
        assert shown(page) == first
        field = page.get_by_label("class")
        field.fill(NASTY)
        assert set(shown(page)) == {NASTY}
        field.fill("CLASS 0")
        assert set(shown(page)) == {"class 06", "class 07", "class 08", "class 09"}
        field.fill("nonsense")
        assert shown(page) == []
        assert "None of the" in page.locator(".chooser output").inner_text()
        field.fill("")
        assert len(shown(page)) == 12

    def test_values_by_pointer_and_by_keyboard(self, pages: dict[str, Path], page: Page) -> None:
        page.goto(pages["report"].as_uri())
        plot, output = page.locator(".plot svg").first, page.locator(".plot output").first
        plot.hover()
        assert output.inner_text().startswith("step ")
        page.mouse.move(0, 0)
        assert output.inner_text() == ""
        plot.focus()
        page.keyboard.press("ArrowRight")
        assert output.inner_text().startswith("step 1: ")
        page.keyboard.press("ArrowRight")
        assert output.inner_text().startswith("step 2: ")
        page.keyboard.press("End")
        assert output.inner_text().startswith("step 6: ")

    def test_links_and_printing(self, pages: dict[str, Path], page: Page) -> None:
        page.goto(pages["report"].as_uri())
        page.get_by_role("link", name="What was run").click()
        page.get_by_role("heading", name="What was run").wait_for()
        assert page.url.endswith("#section-6")
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.locator(".chooser").first.is_visible()
        assert page.locator(".card:visible").count() == 12


def test_queries_of_a_comparison_are_filtered_by_group(pages: dict[str, Path], page: Page) -> None:
    page.goto(pages["comparison"].as_uri())
    for group in ("two | 2 worse", "two | 2 better", "random"):
        button = page.get_by_role("button", name=group)
        button.click()
        assert len(shown(page)) == int(button.locator("small").inner_text())
    assert page.locator(".card:visible").first.locator(".ranking").count() == 2

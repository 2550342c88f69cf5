"""The search page in Chromium."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from shortlist.data import open_catalog
from shortlist.gallery.gallery import Gallery
from shortlist.serve import Limits
from tests.browser import PATIENCE, started_browser
from tests.serve.galleries import CLASSES, IMAGES, png, remove_labels, small_gallery
from tests.serve.servers import TOKEN, serving_here

ALL = CLASSES * IMAGES
OURS = ("http://127.0.0.1:", "blob:", "data:", "about:blank")
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as found:
        yield found


@pytest.fixture(scope="module")
def server(gallery: Gallery) -> Iterator[str]:
    """The URL of a server."""
    with serving_here(gallery, Limits(bytes=300_000)) as address:
        yield address


@pytest.fixture(scope="module")
def problems() -> list[str]:
    """Errors of the page and requests to other sites during the current test."""
    return []


@pytest.fixture(scope="module")
def usual_page(browser: Browser, server: str, problems: list[str]) -> Iterator[Page]:
    """One tab for most tests, because opening one is slow."""
    page = new_page(browser, problems)
    yield page
    page.context.close()  # closes its connections, so that the server can end


@pytest.fixture
def open_page(browser: Browser, server: str, usual_page: Page, problems: list[str]) -> Iterator[Open]:
    """Open a path of the page, in a new tab if there are options. The test fails if there is a problem."""
    problems.clear()
    others = []

    def open_it(path: str = "/", address: str = server, **options: object) -> Page:
        page = usual_page
        if options:
            page = new_page(browser, problems, **options)
            others.append(page)
        page.goto(address + path)
        return page

    yield open_it
    for page in others:
        page.context.close()
    usual_page.unroute_all()
    usual_page.goto("about:blank")  # all events of the page have arrived after this
    assert not problems


def new_page(browser: Browser, problems: list[str], **options: object) -> Page:
    usual = {"viewport": {"width": 1200, "height": 800}, "reduced_motion": "reduce"}
    context = browser.new_context(**{**usual, **options})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message) or dialog.dismiss())
    page.on("console", lambda entry: problems.append(entry.text) if _is_problem(entry.type, entry.text) else None)
    page.on("request", lambda request: None if request.url.startswith(OURS) else problems.append(request.url))
    return page


def _is_problem(kind: str, text: str) -> bool:
    """Whether an entry of the console is an error, a warning or advice, except for refusals of the server."""
    return (kind in ("error", "warning") and not re.search("status of [45]", text)) or text.startswith("[DOM]")


def cards(page: Page) -> Locator:
    return page.locator(".card")


def name_of(gallery: Gallery, item: int) -> str:
    return "/".join(gallery.item(item).path.parts[-2:])


def file(name: str = "mine.png", content: bytes | None = None, kind: str = "image/png") -> dict[str, object]:
    return {"name": name, "mimeType": kind, "buffer": png() if content is None else content}


def give(page: Page, what: dict[str, object], by: str) -> None:
    """Dispatch the events of dragging and dropping a file, or of pasting it."""
    page.evaluate(
        """([name, kind, content, by]) => {
            const given = new DataTransfer();
            const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
            given.items.add(new File([bytes], name, {type: kind}));
            const options = {bubbles: true, cancelable: true};
            if (by === "paste") {
                document.body.dispatchEvent(new ClipboardEvent("paste", {...options, clipboardData: given}));
            } else {
                for (const kind of ["dragenter", "dragover", by]) {
                    document.body.dispatchEvent(new DragEvent(kind, {...options, dataTransfer: given}));
                }
            }
        }""",
        [what["name"], what["mimeType"], base64.b64encode(what["buffer"]).decode(), by],
    )


def expect_found(page: Page, number: int = 20) -> None:
    expect(page.locator("#query")).to_be_visible()
    expect(cards(page)).to_have_count(number)
    expect(page.locator("#status")).to_contain_text(f"{number} result")
    expect(page.locator("#progress")).to_be_hidden()
    scores = [float(text) for text in page.locator(".score").all_inner_texts()]
    assert scores == sorted(scores, reverse=True)


def wait_for_pictures(page: Page) -> None:
    page.wait_for_function(
        """() => [...document.images]
            .filter((image) => image.checkVisibility() && image.getBoundingClientRect().top < innerHeight)
            .every((image) => image.complete && image.naturalWidth > 0)"""
    )


def test_all_images_are_shown_page_by_page(open_page: Open) -> None:
    page = open_page()
    expect(cards(page)).to_have_count(60)
    expect(page.locator("#gallery-name")).to_have_text(f"gallery · {ALL} images")
    expect(page.locator("#status")).to_have_text(f"60 of {ALL} images")
    wait_for_pictures(page)
    page.locator("#more").scroll_into_view_if_needed()
    expect(cards(page)).to_have_count(ALL)
    expect(page.locator("#more")).to_be_hidden()
    expect(page).to_have_title("gallery · shortlist")


def test_search_with_a_chosen_file(open_page: Open) -> None:
    page = open_page()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Search with an image").click()
    chooser.value.set_files(file())
    expect_found(page)
    expect(page.locator("#query-name")).to_have_text("mine.png")
    expect(page.locator("#query-kind")).to_have_text("Your image")
    wait_for_pictures(page)
    assert not page.locator(".card.same").count()  # the label of an upload is unknown
    page.go_back()
    expect(page.locator("#query")).to_be_hidden()
    page.go_forward()  # the page has kept the image
    expect_found(page)
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("not stored")
    expect(cards(page)).to_have_count(60)
    with page.expect_file_chooser() as chooser:
        page.locator("#drop").click()
    chooser.value.set_files(file())
    expect_found(page)


def test_search_with_a_dropped_and_with_a_pasted_image(open_page: Open, gallery: Gallery) -> None:
    page = open_page()
    expect(cards(page)).to_have_count(60)
    give(page, file(), by="dragover")
    expect(page.locator("#curtain")).to_be_visible()
    give(page, file("other.png", gallery.item(30).path.read_bytes()), by="drop")
    expect_found(page)
    expect(page.locator("#curtain")).to_be_hidden()
    expect(page.locator(".score").first).to_have_text("1.000")
    assert cards(page).first.get_attribute("data-id") == "30"
    give(page, file("pasted.png"), by="paste")
    expect(page.locator("#query-name")).to_have_text("pasted.png")
    expect_found(page)


def test_an_image_that_is_given_before_the_gallery_has_loaded(open_page: Open, server: str) -> None:
    page = open_page("/docs")
    held: list[Route] = []
    page.route("**/api/gallery*", lambda route: held.append(route))
    with page.expect_request("**/api/gallery*"):
        page.goto(server)
    page.locator("#home").click()  # there is nothing to show yet
    page.set_input_files("#file", file())
    expect(page.get_by_role("alert")).to_be_hidden()
    held.pop().continue_()
    expect_found(page)
    expect(page.locator("#query-name")).to_have_text("mine.png")


def test_an_aborted_request_shows_no_error(open_page: Open) -> None:
    page = open_page()
    page.route("**/api/items?*offset=60*", lambda route: None)  # is never answered
    with page.expect_request("**/api/items?*offset=60*"):
        page.locator("#more").scroll_into_view_if_needed()
    page.locator("#label").fill("class 02")
    expect(cards(page)).to_have_count(IMAGES)
    expect(page.locator("#status")).to_have_text(f"{IMAGES} images")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_click_through_and_back(open_page: Open, gallery: Gallery) -> None:
    page = open_page()
    cards(page).nth(7).click()
    expect_found(page)
    expect(page).to_have_url(re.compile(r"\?item=7$"))
    expect(page.locator("#query-name")).to_have_text(name_of(gallery, 7))
    expect(page.locator("#query-label")).to_have_text("class 00")
    expected = gallery.similar(7, 20)
    found = [int(card.get_attribute("data-id") or -1) for card in cards(page).all()]
    assert found == [hit.item.id for hit in expected]
    same = sum(hit.item.label == "class 00" for hit in expected)
    expect(page.locator(".card.same")).to_have_count(same)
    expect(page.locator("#verdict")).to_have_text(f"✓ {same} of 20 have the same label")
    assert "same label" in (page.locator(".card.same").first.get_attribute("aria-label") or "")
    cards(page).nth(2).click()
    expect(page).to_have_url(re.compile(rf"\?item={found[2]}$"))
    expect_found(page)
    page.go_back()
    expect(page.locator("#query-name")).to_have_text(name_of(gallery, 7))
    page.go_back()
    expect(page.locator("#query")).to_be_hidden()
    expect(cards(page)).to_have_count(60)


def test_back_restores_the_scroll_position(open_page: Open) -> None:
    page = open_page()
    page.locator("#more").scroll_into_view_if_needed()
    expect(cards(page)).to_have_count(ALL)
    page.evaluate("scrollTo(0, 900)")
    cards(page).nth(50).click()
    expect_found(page)
    assert page.evaluate("scrollY") == 0
    page.go_back()
    expect(cards(page)).to_have_count(ALL)
    page.wait_for_function("scrollY > 500")


def test_the_number_of_results(open_page: Open) -> None:
    page = open_page("/?item=3&k=5")
    expect_found(page, 5)
    page.locator("#k").fill("31")
    expect_found(page, 31)
    expect(page).to_have_url(re.compile("k=31"))
    cards(page).first.click()
    expect(page).to_have_url(re.compile("k=31"))  # it is kept
    expect_found(page, 31)


def test_nothing_is_similar_enough(open_page: Open, gallery: Gallery) -> None:
    scores = [hit.score for hit in gallery.similar(3, 20)]
    gallery.set_min_score(round((scores[4] + scores[5]) / 2, 6))
    try:
        page = open_page("/?item=3")
        expect_found(page)
        expect(page.locator("#heading")).to_have_text("Most similar")
        expect(page.locator(".card.weak")).to_have_count(15)
        expect(page.locator("#status")).to_have_text(f"20 results, 15 below the minimum score {gallery.min_score}")
        expect(page.locator("#verdict")).to_contain_text("of 5 have the same label")
        page.locator("#min-score").fill("1")
        page.locator("#min-score").press("Enter")
        expect(page.locator("#heading")).to_have_text("Nothing similar enough")
        expect(page.locator(".card.weak")).to_have_count(20)
        assert "not similar enough" in (cards(page).first.get_attribute("aria-label") or "")
        expect(page).to_have_url(re.compile("min_score=1$"))
        page.locator("#min-score").fill("")
        page.locator("#min-score").press("Enter")
        expect(page.locator(".card.weak")).to_have_count(0)
    finally:
        gallery.set_min_score(None)


def test_results_of_one_label(open_page: Open) -> None:
    page = open_page("/?item=3")
    expect_found(page)
    page.locator("#label").fill("class 04")
    expect_found(page, IMAGES)
    assert set(page.locator(".card .label").all_inner_texts()) == {"class 04"}
    page.get_by_role("button", name="Any label").click()
    expect_found(page)
    page.locator("#label").fill("nothing of the kind")
    page.locator("#label").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("No image of the gallery has the label “nothing of the kind”")
    expect(cards(page)).to_have_count(20)
    page.locator("#label").fill("S 0")
    page.locator("#label").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text(f"{CLASSES} labels contain “S 0”")
    page.locator("#label").press("Escape")
    expect(page.locator("#label")).to_have_value("")
    page.locator("#label").fill("S 05")  # contained in one label only
    page.locator("#label").press("Enter")
    expect_found(page, IMAGES)
    expect(page.locator("#label")).to_have_value("class 05")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_labels_are_suggested_and_filter_all_images(open_page: Open) -> None:
    page = open_page()
    expect(cards(page)).to_have_count(60)
    page.locator("#label").press_sequentially("S 0")
    expect(page.locator("#labels option")).to_have_count(CLASSES)
    page.locator("#label").press_sequentially("3")
    assert page.locator("#labels option").evaluate_all("found => found.map(each => each.value)") == ["class 03"]
    page.locator("#label").fill("")
    page.locator("#label").press_sequentially("class 02")
    expect(cards(page)).to_have_count(IMAGES)
    expect(page.locator("#heading")).to_have_text("class 02")
    expect(page.locator("#status")).to_have_text(f"{IMAGES} images")
    give(page, file(), by="drop")  # the label still filters the results
    expect_found(page, IMAGES)


BAD_FILES = [
    (file("notes.txt", b"words", "text/plain"), "notes.txt is not an image"),
    (file("photo.png", b"words"), "photo.png: This file is not an image"),
    (file("half.png", png()[:100]), "half.png: The image is damaged"),
    (file("huge.png", b"x" * 400_000), "huge.png is too large"),
    (file("empty.png", b""), "empty.png: The file is empty"),
]


def test_bad_files_are_refused_and_the_results_remain(open_page: Open, gallery: Gallery) -> None:
    page = open_page("/?item=3")
    expect_found(page)
    for bad, message in BAD_FILES:
        page.set_input_files("#file", bad)
        expect(page.get_by_role("alert")).to_contain_text(message)
        expect_found(page)
        expect(page.locator("#query-name")).to_have_text(name_of(gallery, 3))
    page.set_input_files("#file", file())
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#query-name")).to_have_text("mine.png")


def test_an_item_that_does_not_exist(open_page: Open) -> None:
    page = open_page("/?item=5000")
    expect(page.get_by_role("alert")).to_contain_text("5000")


def test_keyboard_navigation(open_page: Open) -> None:
    page = open_page()
    expect(cards(page)).to_have_count(60)
    columns = page.evaluate("getComputedStyle(document.getElementById('list')).gridTemplateColumns.split(' ').length")
    assert columns > 2
    page.keyboard.press("ArrowRight")
    expect(cards(page).nth(0)).to_be_focused()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(cards(page).nth(columns + 1)).to_be_focused()
    assert cards(page).nth(columns + 1).evaluate("card => getComputedStyle(card).outlineStyle") == "solid"
    outline, ink = (f"getComputedStyle({each})" for each in ("document.activeElement", "document.body"))
    assert page.evaluate(f"{outline}.outlineColor === {ink}.color")  # blue means the same label
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")  # the first row is the end
    expect(cards(page).nth(0)).to_be_focused()
    page.keyboard.press("Enter")
    expect_found(page)
    expect(page).to_have_url(re.compile(r"\?item=0$"))
    expect(cards(page).nth(0)).to_be_focused()
    page.keyboard.press("End")
    expect(cards(page).last).to_be_focused()
    page.keyboard.press("Home")
    expect(cards(page).nth(0)).to_be_focused()
    page.keyboard.press("/")
    expect(page.locator("#label")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#label")).not_to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#query")).to_be_hidden()


def test_tab_enters_the_grid_once(open_page: Open) -> None:
    page = open_page("/?item=3")
    expect_found(page)
    page.locator("#k").focus()
    page.keyboard.press("Tab")
    expect(cards(page).first).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="JSON API")).to_be_focused()


def test_contrast_of_light_and_dark_colours(open_page: Open) -> None:
    page = open_page("/?item=3")
    expect_found(page)
    for scheme in ("dark", "light"):  # the last one is that of all other tests
        page.emulate_media(color_scheme=scheme)
        for element in ("body", ".card .label", ".card .file", "#status", "#verdict", ".primary", ".mark"):
            assert contrast(page, element) >= 4.5, element
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (brightness(paper) < 0.1) == (scheme == "dark")


def contrast(page: Page, selector: str) -> float:
    """The contrast of an element's text to its background, as defined by WCAG."""
    ink, paper = page.locator(selector).first.evaluate(
        """(element) => {
            let behind = element;
            while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
            return [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor];
        }"""
    )
    lighter, darker = sorted((brightness(ink), brightness(paper)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def brightness(colour: str) -> float:
    values = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_narrow_screen(open_page: Open, server: str) -> None:
    page = open_page("/docs", viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    for path in ("/docs", "/?item=3", "/"):
        page.goto(server + path)
        expect(page.locator(".card, .endpoint").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
    cards(page).first.tap()
    expect_found(page)
    assert page.locator("#choose").bounding_box()["height"] >= 36


def test_a_gallery_without_labels(open_page: Open, tmp_path: Path) -> None:
    gallery = small_gallery(tmp_path, 2)
    remove_labels(gallery)
    with serving_here(gallery) as address:
        page = open_page("/", address)
        cards(page).first.click()
        expect_found(page)
        expect(page.locator("#label-field")).to_be_hidden()
        expect(page.locator("#verdict")).to_be_hidden()
        assert not page.locator(".card.same").count()
        page.goto("about:blank")  # ends its requests, so that the server can end


def test_names_are_escaped_and_missing_files_are_marked(open_page: Open, tmp_path: Path) -> None:
    gallery = small_gallery(tmp_path, 3)
    label = 'javascript:alert(0) <img src=x onerror=alert(1)> "quoted" & 50 %'
    name = "javascript:alert(2) \"'><svg onload=alert(3)>.png"
    gallery.item(2).path.rename(gallery.item(2).path.with_name(name))
    gallery.remove([2])
    gallery.add(open_catalog(tmp_path / "images"))
    gallery.store.change(labels={item.id: label for item in gallery.items(limit=25)})
    gallery.store.change(labels={0: f"\nred\n{label}\n"}, fields={0: '{"price": 9.5, "note": "<b>", "none": null}'})
    gallery.item(1).path.unlink()
    with serving_here(gallery) as address:
        page = open_page("/", address)
        expect(page.locator(".frame.gone")).to_have_count(1)
        expect(page.locator(".card .label").first).to_have_text(f"red, {label}")
        expect(page.locator(".card .fields").first).to_have_text("price: 9.5 note: <b>")
        page.locator("#label").fill(label)
        expect(cards(page)).to_have_count(25)
        cards(page).nth(1).click()  # the vector of the missing file still exists
        expect_found(page)
        expect(page.locator("#query-label")).to_have_text(label)
        page.reload()
        expect_found(page)
        assert "same label" in (page.locator('.card[data-id="0"]').get_attribute("aria-label") or "")
        page.locator('.card[data-id="0"]').click()
        expect(page.locator("#query-fields")).to_have_text("price: 9.5 · note: <b>")
        expect(page.locator("#verdict")).to_contain_text("share a label")
        page.goto(f"{address}/?item={gallery.items(limit=1000)[-1].id}")
        expect(page.get_by_text(name).first).to_be_visible()
        page.set_input_files("#file", file(name))
        expect(page.locator("#query-name")).to_have_text(name)
        page.goto("about:blank")


def test_names_that_are_executed_are_noticed(open_page: Open, problems: list[str]) -> None:
    """Negative control: a script that is executed, and one in a name that the browser refuses to execute."""
    page = open_page()
    page.evaluate("alert(4)")
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=alert(5)>')")
    page.goto("about:blank")  # all events of the page have arrived after this
    assert "4" in problems
    assert [each for each in problems if "Content Security Policy" in each]
    problems.clear()


def test_a_server_that_does_not_answer(open_page: Open) -> None:
    page = open_page()
    expect(cards(page)).to_have_count(60)
    page.route("**/similar*", lambda route: route.fulfill(status=502, body="no JSON"))
    cards(page).first.click()
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer")


def test_the_documentation_of_the_api(open_page: Open) -> None:
    page = open_page("/docs#get/api/items/{id}/thumbnail")
    expect(page.locator(".endpoint")).to_have_count(10)
    expect(page.get_by_role("heading", name="/api/items/{id}/thumbnail")).to_be_in_viewport()
    expect(page.locator(".endpoint", has_text="/api/search")).to_contain_text("curl -F image=@photo.jpg")


def test_the_token_is_asked_for_once(open_page: Open, gallery: Gallery) -> None:
    with serving_here(gallery, token=TOKEN) as address:
        page = open_page("/?item=3", address, locale="en")  # a new tab, without cookies
        dialog = page.get_by_role("dialog", name="This gallery needs a token")
        expect(dialog).to_be_visible()
        expect(cards(page)).to_have_count(0)
        expect(dialog.get_by_label("Token")).to_be_focused()
        for wrong in ("wrong", "ü€"):
            dialog.get_by_label("Token").fill(wrong)
            page.keyboard.press("Enter")
            expect(dialog.get_by_role("alert")).to_have_text("The token is wrong.")
        page.locator("#token").evaluate(
            "field => field.dispatchEvent(new ClipboardEvent('paste', {bubbles: true, "
            "clipboardData: new DataTransfer()}))"
        )
        expect(page.locator("#notice")).to_be_hidden()  # text may be pasted
        dialog.get_by_label("Token").fill(TOKEN)
        dialog.get_by_role("button", name="Continue").click()
        expect_found(page)
        wait_for_pictures(page)
        page.reload()
        expect_found(page)
        expect(dialog).to_be_hidden()
        assert TOKEN not in page.evaluate("document.cookie + JSON.stringify({...localStorage, ...sessionStorage})")
        page.context.clear_cookies()  # for an upload, too
        page.set_input_files("#file", file())
        dialog.get_by_label("Token").fill(TOKEN)
        page.keyboard.press("Enter")
        expect(page.locator("#query-name")).to_have_text("mine.png")
        page.context.clear_cookies()
        page.reload()
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#notice")).to_have_text("This gallery needs a token. Reload the page to enter it.")
        page.goto(f"{address}/docs")
        expect(page.locator(".endpoint", has_text="/api/search")).to_contain_text(
            '-H "Authorization: Bearer $SHORTLIST_TOKEN"'
        )
        page.goto("about:blank")

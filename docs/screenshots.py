"""Take the screenshots of docs/from-folder-to-search.md: run its commands, and open the pages in Chromium.

    python docs/screenshots.py [--out docs/images] [--work FOLDER]

With --work, the files that the commands write are kept in that folder and reused.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

PAGE = Path(__file__).with_name("from-folder-to-search.md")
NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTH, SHARPNESS = 1000, 1.5
LOADED = "[...document.images].every(each => each.getBoundingClientRect().top > innerHeight || each.naturalWidth)"
LARGEST = 300_000  # bytes of a picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE.parent / "images")
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    *commands, serving = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    if not (work / "found.png").exists():
        for command in commands:
            subprocess.run(["bash", "-e", "-c", command], cwd=work, env=environment(), check=True)
    with Image.open(work / "found.png") as found:
        save(found, options.out / "folder-found.png")
    with sync_playwright() as playwright, served(serving.strip(), work) as address:
        place = os.environ.get("SHORTLIST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)))
        browser = playwright.chromium.launch(executable_path=place, args=["--no-sandbox", "--disable-gpu"])
        look_at_report(browser, work / "runs" / "characters" / "report.html", options.out)
        look_at_search(browser, address, work / "new" / "latin capital r.png", options.out)
        look_for_something_else(browser, address, work / "new" / "greek capital psi.png", options.out)
        browser.close()


def look_at_report(browser: Browser, file: Path, out: Path) -> None:
    page = opened(browser, file.absolute().as_uri(), height=620)
    shoot(page, out / "folder-report.png")
    page.set_viewport_size({"width": WIDTH, "height": 760})
    heading = page.get_by_role("heading", name="Queries and results")
    heading.evaluate("heading => heading.scrollIntoView({behavior: 'instant'})")
    shoot(page, out / "folder-queries.png")


def look_at_search(browser: Browser, address: str, image: Path, out: Path) -> None:
    page = opened(browser, address, height=760)
    page.set_input_files("#file", image)
    page.wait_for_selector("#list .score:visible")
    page.wait_for_load_state("networkidle")
    shoot(page, out / "folder-page.png")


def look_for_something_else(browser: Browser, address: str, image: Path, out: Path) -> None:
    page = opened(browser, f"{address}?min_score=0.95", height=640)
    page.set_input_files("#file", image)
    page.get_by_role("heading", name="Nothing similar enough").wait_for()
    page.wait_for_load_state("networkidle")
    shoot(page, out / "folder-weak.png")


def opened(browser: Browser, address: str, height: int) -> Page:
    size = {"width": WIDTH, "height": height}
    page = browser.new_page(viewport=size, device_scale_factor=SHARPNESS, bypass_csp=True)  # to wait for images
    page.goto(address)
    page.wait_for_load_state("networkidle")
    return page


def shoot(page: Page, path: Path) -> None:
    page.wait_for_function(LOADED)
    page.evaluate("document.activeElement.blur()")  # no focus ring, as for users of a mouse
    save(Image.open(io.BytesIO(page.screenshot())), path)


def save(image: Image.Image, path: Path) -> None:
    """Save with 256 colours: no visible difference, a third of the size."""
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > LARGEST:
        sys.exit(f"{path} has {path.stat().st_size:,} bytes, more than {LARGEST:,}: make the picture smaller")
    print(path)


@contextmanager
def served(command: str, work: Path) -> Iterator[str]:
    line = ["bash", "-c", f"exec {command} --port 0"]
    process = subprocess.Popen(line, cwd=work, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().rpartition("at ")[2].split()[0]
    finally:
        process.terminate()
        process.wait()


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


if __name__ == "__main__":
    main()

"""HTML from Python: whatever is not HTML already is text, and is escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from string import Template
from typing import Any

_EMPTY = {"img", "input", "br"}  # elements without an end


class Html(str):
    """Text that is HTML."""

    __slots__ = ()


Child = Html | str | int | None


def tag(name: str, *children: Child | Iterable[Child], **attributes: Any) -> Html:
    """An element.

    Args:
        name: such as "p".
        children: elements, or text, or lists of them; None is nothing.
        attributes: `class_` is class, `data_x` is data-x; True is an attribute without a value, None and False none.

    >>> tag("p", "a < b", tag("b", "c"), class_="note")
    '<p class="note">a &lt; b<b>c</b></p>'
    """
    named = "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    return Html(f"<{name}{named}>" if name in _EMPTY else f"<{name}{named}>{join(*children)}</{name}>")


def join(*children: Child | Iterable[Child]) -> Html:
    """Elements and texts, one after another."""
    return Html("".join(_text(child) for child in children))


def _text(child: Child | Iterable[Child]) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str | int):
        return html.escape(str(child))
    return join(*child)


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'


def inline_json(value: Any) -> Html:
    """JSON that no text in it can break out of a script element."""
    return Html(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


def table(header: Iterable[Child], rows: Iterable[Iterable[Child]], **attributes: Any) -> Html:
    """A table whose first column names its rows, in a frame of its own that scrolls where the page is narrow."""
    head = tag("tr", [tag("th", cell, scope="col") for cell in header])
    body = []
    for first, *others in rows:
        body.append(tag("tr", tag("th", first, scope="row"), [tag("td", cell) for cell in others]))
    whole = tag("table", tag("thead", head), tag("tbody", body), **attributes)
    return tag("div", whole, class_="scroll")


def page_body(head: Html, sections: Mapping[str, Html], maker: str) -> Html:
    """A page's head, the links to its sections by their names, and the sections."""
    ids = {name: f"section-{number}" for number, name in enumerate(sections, 1)}
    links = [tag("a", name, href=f"#{ids[name]}") for name in sections]
    parts = [tag("div", section, id=ids[name]) for name, section in sections.items()]
    foot = tag("footer", f"Made by {maker}. This file is all there is: it can be sent, and asks no network.")
    return join(head, tag("nav", tag("div", links), aria_label="Sections"), tag("main", parts, foot))


def document(title: str, body: Html, pictures: Iterable[str]) -> str:
    """A whole page: one file, with its style, its script and its pictures inside, that asks the network for nothing."""
    part = {name: (files(__package__) / "page" / name).read_text(encoding="utf-8") for name in ("style.css", "page.js")}
    page = (files(__package__) / "page" / "page.html").read_text(encoding="utf-8")
    whole = Template(page).substitute(
        title=html.escape(title),
        style=part["style.css"],
        script=part["page.js"],
        body=body,
        pictures=inline_json(list(pictures)),
    )
    return whole.encode("utf-8", "replace").decode("utf-8")  # names of files may hold what is no text

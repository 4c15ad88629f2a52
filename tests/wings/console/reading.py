"""Reads pages as a browser that runs nothing: elements, texts, links, and what is wrong for whoever does not see them."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import NamedTuple

_VOID = {"meta", "link", "img", "input", "br", "hr"}
_FIELDS = {"input", "select", "textarea"}


class Element(NamedTuple):
    tag: str
    attributes: dict[str, str]
    inside: tuple[str, ...]  # the tags around it, the outermost first


class Page(HTMLParser):
    """A page taken apart."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}, tuple(self._open)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if "script" not in self._open:
            self.words.append(data)

    @property
    def text(self) -> str:
        """Everything that is read, its white space as one space."""
        return " ".join(" ".join(self.words).split())

    def all(self, *tags: str) -> list[Element]:
        return [element for element in self.elements if element.tag in tags]

    def addresses(self) -> list[str]:
        """Everything that the page fetches, leads to or sends to."""
        names = ("href", "src", "action", "hx-get", "hx-post")
        return [element.attributes[name] for element in self.elements for name in names if name in element.attributes]

    def faults(self) -> list[str]:
        """What a page must not have: for people who hear it, for a strict CSP, for a phone."""
        found = []
        if self.all("html")[0].attributes.get("lang") != "en":
            found.append("no language")
        if len(self.all("h1")) != 1:
            found.append(f"{len(self.all('h1'))} headings of the first level")
        if not any(meta.attributes.get("name") == "viewport" for meta in self.all("meta")):
            found.append("no viewport")
        found += [f"inline style: {e}" for e in self.elements if "style" in e.attributes or e.tag == "style"]
        found += [f"handler: {e}" for e in self.elements if any(name.startswith("on") for name in e.attributes)]
        for script in self.all("script"):
            if "src" not in script.attributes and script.attributes.get("type") != "application/json":
                found.append("inline script")
        found += [f"address elsewhere: {at}" for at in self.addresses() if "//" in at.partition("?")[0]]
        for field in self.all(*_FIELDS):
            if (
                field.attributes.get("type") != "hidden"
                and "label" not in field.inside
                and "aria-label" not in field.attributes
            ):
                found.append(f"no label: {field}")
        found += [f"no scope: {cell}" for cell in self.all("th") if "scope" not in cell.attributes]
        found += [f"no alternative text: {e}" for e in self.all("img") if "alt" not in e.attributes]
        seen = [e.attributes["id"] for e in self.elements if "id" in e.attributes]
        found += [f"twice: {name}" for name in set(seen) if seen.count(name) > 1]
        return found

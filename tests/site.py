"""Checks that the built documentation fetches nothing from elsewhere, and that its links lead to headings that exist.

`make docs` runs it behind MkDocs' strict check, which sees neither the anchors of translations nor those of HTML.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
# Links that a browser does not follow by itself.
NOT_FETCHED = {"canonical", "alternate", "next", "prev", "edit"}


class Fetched(HTMLParser):
    """Collects the addresses that a browser loads by itself when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and set((values.get("rel") or "").split()) & NOT_FETCHED:
            return
        address = values.get(LOADED.get(tag, ""))
        if address is not None:
            self.addresses.append(address)


def fetched_from_elsewhere(page: str) -> list[str]:
    parser = Fetched()
    parser.feed(page)
    return [address for address in parser.addresses if "//" in address and not address.startswith("data:")]


class Anchors(HTMLParser):
    """Collects where a page can be entered, and where its links lead."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        if tag == "a" and "://" not in (link := values.get("href") or ""):
            self.links.append(unquote(link))


def dead_links(site: Path) -> list[tuple[Path, str]]:
    """The links of each page that lead to no file, or to no place in it."""
    pages = {page.resolve(): Anchors(page.read_text()) for page in sorted(site.rglob("*.html"))}
    dead = []
    for page, anchors in pages.items():
        for link in anchors.links:
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].ids):
                dead.append((page.relative_to(site.resolve()), link))
    return dead


def main(site: Path) -> int:
    pages = sorted(site.rglob("*.html"))
    found = [(page, address) for page in pages for address in fetched_from_elsewhere(page.read_text())]
    dead = [(page, link) for page, link in dead_links(site) if page.name != "404.html"]  # it is served at any path
    for page, address in found:
        print(f"{page.relative_to(site)} loads {address}")
    for page, link in dead:
        print(f"{page} links to {link}, which is not there")
    print(f"{site}: {len(pages)} pages, {len(found)} addresses elsewhere, {len(dead)} dead links")
    return 1 if found or dead or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

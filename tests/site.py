"""Checks that the built documentation fetches nothing from elsewhere; `make docs` runs it behind MkDocs' strict check."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path

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


def main(site: Path) -> int:
    pages = sorted(site.rglob("*.html"))
    found = [(page, address) for page in pages for address in fetched_from_elsewhere(page.read_text())]
    for page, address in found:
        print(f"{page.relative_to(site)} loads {address}")
    print(f"{site}: {len(pages)} pages, {len(found)} addresses elsewhere")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Pictures of every page, to be looked at: `python -m tests.wings.console.browser.pictures DIRECTORY [NAME …]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.wings.console.chromium import MODES, WIDE, chromium, look, window

from .places import PLACES
from .scene import scene

VIEWS = {"390": MODES["phone"], "1280": MODES["light"], "1920": WIDE, "dark": MODES["dark"]}


def main(directory: Path, names: list[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, scene(Path(place)) as at, chromium() as browser:
        for name in names or PLACES:
            with window(browser, at.url) as shown:
                page = PLACES[name](at, shown)
                for view, mode in VIEWS.items():
                    look(page, mode)
                    page.screenshot(path=directory / f"{name}-{view}.png", full_page=True)
                print(name, *shown.complaints, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

"""Pictures of every page, light, dark and as on a phone: `python -m tests.wings.console.screenshots docs/dashboard`."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser

from .chromium import MODES, chromium, window
from .live import FAULTY, RUN, Live, live

COLOURS = 128
SETTLE_MS = 700  # plots are drawn, events have come


def pages(at: Live) -> dict[str, str]:
    """A name and an address for each page."""
    steps = at.steps()
    step = f"/runs/{RUN}/checkpoints/{steps[1]}"
    return {
        "run": f"/runs/{RUN}",
        "checkpoint": step,
        "files": f"{step}/files",
        "map": f"{step}/map/model.safetensors",
        "tensors": f"{step}/tensors?sort=bytes",
        "restore": f"{step}/restore?tp=2&pp=2&more=rules%3Dllama",
        "compare": f"/runs/{RUN}/compare?a={steps[-1]}&b={steps[1]}&exact=yes",
        "retention": f"/runs/{RUN}/policy",
        "health": f"/runs/{FAULTY}/health",
        "nodes": "/nodes",
        "jobs": "/jobs",
        "import": "/import",
        "events": "/events",
        "audit": "/audit",
        "quotas": "/quotas",
        "tokens": "/tokens",
        "api": "/api",
        "login": "/login",
        "overview": "/",  # last: by then there is something that needs attention
    }


def take(browser: Browser, at: Live, name: str, mode: str) -> tuple[bytes, list[str]]:
    """A picture of a page, and what is wrong with it: complaints of the browser, and what is wider than the window."""
    with window(browser, at.url, MODES[mode]) as shown:
        page = shown.go(pages(at)[name])
        page.wait_for_timeout(SETTLE_MS)
        wide = page.evaluate("document.documentElement.scrollWidth")
        wrong = list(shown.complaints) + ([f"{wide} pixels wide"] if wide > MODES[mode].width else [])
        return page.screenshot(), wrong


def small(picture: bytes) -> bytes:
    """The same picture in few colours, where Pillow is installed."""
    try:
        from PIL import Image
    except ImportError:
        return picture
    out = io.BytesIO()
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root, live(Path(root), 10) as at, chromium() as browser:
        for name in pages(at):
            for mode in MODES:
                picture, wrong = take(browser, at, name, mode)
                (directory / f"{name}-{mode}.png").write_bytes(small(picture))
                print(f"{name}-{mode}", *wrong)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Finds what is cut off on a page: what is wider than its place, text that is hidden, numbers that are broken."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page

_MISFITS = Path(__file__).with_name("misfits.js").read_text()


def misfits(page: Page) -> list[str]:
    """What is cut off, in words."""
    found: list[str] = page.evaluate(_MISFITS)
    return found

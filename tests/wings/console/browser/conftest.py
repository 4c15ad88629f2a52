"""One scene for all tests of this folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .scene import Scene, scene

if TYPE_CHECKING:
    from playwright.sync_api import Browser

AXE = "axe_playwright_python"  # which brings axe-core


@pytest.fixture
def browser(drawing: Browser) -> Browser:
    return drawing


@pytest.fixture(scope="session")
def at(drawing: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The daemons and all that has happened."""
    with scene(tmp_path_factory.mktemp("scene")) as found:
        yield found


@pytest.fixture(scope="session")
def axe() -> str:
    """axe-core itself; without it, tests that need it are skipped."""
    found = importlib.util.find_spec(AXE)
    if found is None or found.origin is None:
        pytest.skip(f"needs axe-core: pip install {AXE.replace('_', '-')}")
    (script,) = Path(found.origin).parent.rglob("axe.min.js")
    return script.read_text()

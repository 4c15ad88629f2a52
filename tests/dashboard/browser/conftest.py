"""One browser and one scene for all tests of this folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Browser

from tests.dashboard.chromium import PROGRAM, chromium

from .scene import Scene, scene

AXE = "axe_playwright_python"  # which brings axe-core


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them need a Chromium."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("scene")) as found:
        yield found


@pytest.fixture(scope="session")
def axe() -> str:
    """axe-core's own text; without it, tests that need it are skipped."""
    found = importlib.util.find_spec(AXE)
    if found is None or found.origin is None:
        pytest.skip(f"needs axe-core: pip install {AXE.replace('_', '-')}")
    (script,) = Path(found.origin).parent.rglob("axe.min.js")
    return script.read_text()

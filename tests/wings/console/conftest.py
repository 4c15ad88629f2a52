"""A service with two small runs, and a client that is a browser without scripts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.checkpoints import build_root
from tests.in_memory import tmp_path
from tests.serving import Served, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser", "service", "tmp_path"]


@pytest.fixture(scope="session")
def drawing() -> Iterator[Browser]:
    """A Chromium for all tests, each of which has windows of its own; those that need it are skipped without."""
    from tests.wings.console.chromium import PROGRAM, chromium

    if PROGRAM is None:
        pytest.skip("there is no Chromium")
    with chromium() as found:
        yield found


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    """A service of its own for tests that change something."""
    build_root(tmp_path / "root", {"tiny": (5, 10, 15), "other": (1,)})
    with served(tmp_path / "root") as running:
        yield running


@pytest.fixture
def browser(service: Served) -> Iterator[httpx.Client]:
    """Follows redirects, as a browser does after a form."""
    with httpx.Client(base_url=service.url, trust_env=False, follow_redirects=True) as client:
        yield client

"""Outside an environment of `make integrations`, none of these tests is even imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.environments import current

here = Path(__file__).parent
collect_ignore = [] if current() is not None else [path.name for path in here.iterdir() if path.is_dir()]


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """How often to kill a training run."""
    return int(request.config.getoption("--kills"))

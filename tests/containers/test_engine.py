"""The engine that these tests start leaves the machine's network as it found it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import engine, missing, network

pytestmark = pytest.mark.engine


def test_the_engine_leaves_the_network_as_it_was(tmp_path: Path) -> None:
    why = missing()
    if why:
        pytest.skip(why)
    before = network()
    with engine(tmp_path) as made:
        assert made.answers
    assert network() == before

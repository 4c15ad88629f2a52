"""The state of a run's ranks: the stored words stay as they were, and everything else has those of the API."""

from __future__ import annotations

import json

import pytest

from holdfast_formats import naming
from holdfast_formats.rest.measurements import Life
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.catalog.attempts import Attempts
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.storage import MemoryTier

WORDS: list[tuple[Life, str]] = [("running", "running"), ("finished", "ended"), ("died", "lost")]


@pytest.mark.parametrize(("life", "stored"), WORDS)
def test_the_file_keeps_its_words(life: Life, stored: str) -> None:
    """Written, read by the next daemon, and merged with what a catalog knows."""
    tier = MemoryTier()
    attempts = Attempts(tier)
    attempts.merge({})
    attempts.declare("run", "launch", list)
    attempts.became("run", 1, life, utc_now())
    assert json.loads(tier.read(naming.ATTEMPTS))["runs"]["run"]["life"] == stored
    after = Attempts(tier)
    after.merge(after.known())
    assert after.known()["run"].life == life


@pytest.mark.parametrize(("life", "stored"), WORDS)
def test_the_catalog_keeps_its_words(catalog: Catalog, life: Life, stored: str) -> None:
    """Other nodes read them, which may be of an older version."""
    catalog.declare_attempt("run", "launch", 1, utc_now())
    catalog.note_life("run", 1, life, None)
    with catalog.database.read() as session:
        assert session.connection().exec_driver_sql("SELECT life FROM runs").scalar() == stored
    assert catalog.lives() == {"run": (1, life, None)}

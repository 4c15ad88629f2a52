"""Fixtures of the tests of control: what stores something runs on every database."""

from __future__ import annotations

import pytest

from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.database.database import Database
from tests.databases import database, database_url
from tests.in_memory import tmp_path

__all__ = ["catalog", "database", "database_url", "tmp_path"]


@pytest.fixture
def catalog(database: Database) -> Catalog:
    """An empty catalog, on every kind of database in turn."""
    return Catalog(database)

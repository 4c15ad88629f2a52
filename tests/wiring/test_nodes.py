"""Which other nodes a daemon has: by its catalog, and by what is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_service.config import parse
from holdfast_service.control.database.database import Database
from holdfast_service.control.nodes import OneNode
from holdfast_service.wiring.nodes import nodes_of
from tests.databases import sqlite_url


def test_a_catalog_that_can_be_shared_needs_what_many_nodes_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SQLite a daemon is alone; with PostgreSQL an installation without the wing refuses, and names it."""
    database = Database.open(sqlite_url(f"{tmp_path}/catalog.sqlite"))
    alone = parse(["--root", str(tmp_path)])
    shared = parse(["--root", str(tmp_path), "--catalog", "postgresql://localhost/holdfast"])
    assert isinstance(nodes_of(alone, database).nodes, OneNode)
    assert not nodes_of(shared, database).nodes.alone
    monkeypatch.setitem(sys.modules, "holdfast_service.wings.cluster.start", None)
    with pytest.raises(InvalidRequest, match=r"wings\.cluster"):
        nodes_of(shared, database)
    database.close()

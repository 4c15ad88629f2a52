"""All tables, as `schema` declares them, and their triggers.

That holds until the first release. Before a second migration is added, write the tables of this one out.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Index
from sqlalchemy.schema import CreateIndex, CreateTable

from holdfast_service.control.database import changes
from holdfast_service.control.database.columns import CatalogTable
from holdfast_service.control.database.migrations import HEAD

revision = HEAD
down_revision = None


def upgrade() -> None:
    bind = op.get_bind()
    for table in CatalogTable.metadata.sorted_tables:
        bind.execute(CreateTable(table))
        for index in sorted(table.indexes, key=_is_partial_and_name):
            bind.execute(CreateIndex(index))
    changes.create(bind)


def _is_partial_and_name(index: Index) -> tuple[bool, str]:
    """Of two indexes that it rates alike SQLite takes the one that was created last: one of few rows."""
    return index.dialect_options["sqlite"]["where"] is not None, str(index.name)

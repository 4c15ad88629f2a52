"""All tables, as `schema` declares them, and their triggers.

That holds until the first release. Before a second migration is added, write the tables of this one out.
"""

from __future__ import annotations

from alembic import op

from holdfast_service.control.database import changes
from holdfast_service.control.database.migrations import HEAD
from holdfast_service.control.database.schema import CatalogTable

revision = HEAD
down_revision = None


def upgrade() -> None:
    CatalogTable.metadata.create_all(op.get_bind())
    changes.create(op.get_bind())

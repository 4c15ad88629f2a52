"""When the ranks that are connected to a node count as gone, if nothing more is heard of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("crews", sa.Column("left_s", sa.Float(53)))


def downgrade() -> None:
    op.drop_column("crews", "left_s")

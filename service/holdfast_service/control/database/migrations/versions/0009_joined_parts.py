"""What all nodes of a sealed round have brought, in one body; and which parts wait for a receipt, without looking at all."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_WAITING = sa.text("receipt IS NULL")


def upgrade() -> None:
    op.add_column("joint_rounds", sa.Column("joined", sa.LargeBinary()))
    op.create_index("parts_waiting", "parts", ["round_id"], postgresql_where=_WAITING, sqlite_where=_WAITING)


def downgrade() -> None:
    op.drop_index("parts_waiting", "parts")
    op.drop_column("joint_rounds", "joined")

"""Who has seen that a run died, and when."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_TIME = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("runs", sa.Column("acknowledged_by", sa.String(128)))
    op.add_column("runs", sa.Column("acknowledged_at", _TIME))


def downgrade() -> None:
    op.drop_column("runs", "acknowledged_at")
    op.drop_column("runs", "acknowledged_by")

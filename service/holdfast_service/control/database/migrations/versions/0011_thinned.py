"""What was taken out of a checkpoint, and how much would stay of one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("thinned", sa.Text()))
    op.add_column("checkpoints", sa.Column("thin_bytes", sa.BigInteger()))


def downgrade() -> None:
    op.drop_column("checkpoints", "thin_bytes")
    op.drop_column("checkpoints", "thinned")

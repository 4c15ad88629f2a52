"""How a checkpoint was stored in fewer bytes, and how many bytes each rule would leave of one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("compacted", sa.Text()))
    op.add_column("checkpoints", sa.Column("small_bytes", sa.Text()))


def downgrade() -> None:
    op.drop_column("checkpoints", "small_bytes")
    op.drop_column("checkpoints", "compacted")

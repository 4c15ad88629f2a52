"""Where the checkpoint of a joint round comes from, as the first node that commits it has found."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("joint_rounds", sa.Column("lineage", sa.Text()))


def downgrade() -> None:
    op.drop_column("joint_rounds", "lineage")

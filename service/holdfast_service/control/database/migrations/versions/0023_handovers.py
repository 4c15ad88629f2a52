"""Which node of a joint round cannot write its share, and which one writes it instead."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("joint_rounds", sa.Column("unable", sa.String(64)))
    op.add_column("joint_rounds", sa.Column("unable_why", sa.Text()))
    op.add_column("joint_rounds", sa.Column("helper", sa.String(64)))
    op.add_column("joint_rounds", sa.Column("helped_until", sa.DateTime(timezone=True)))


def downgrade() -> None:
    for name in ("helped_until", "helper", "unable_why", "unable"):
        op.drop_column("joint_rounds", name)

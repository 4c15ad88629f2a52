"""What nodes say of the averages of their ranks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "average_votes",
        sa.Column("run", sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql"), primary_key=True),
        sa.Column("attempt", sa.BigInteger(), primary_key=True),
        sa.Column("node", sa.String(64), primary_key=True),
        sa.Column("ranks", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("history", sa.String(32), nullable=False),
        sa.Column("folded", sa.BigInteger(), nullable=False),
        sa.Column("changed", sa.DateTime(timezone=True), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("average_votes")

"""What nodes say of their ranks, for what only all ranks of a launch together decide."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "ranks_words",
        sa.Column("run", sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql"), primary_key=True),
        sa.Column("attempt", sa.BigInteger(), primary_key=True),
        sa.Column("topic", sa.String(16), primary_key=True),
        sa.Column("node", sa.String(64), primary_key=True),
        sa.Column("boot", sa.String(32), nullable=False),
        sa.Column("said", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("ranks_words")

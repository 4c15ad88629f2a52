"""What targets of notifications were told, and how messages to them fared."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name = sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")
    time = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")
    op.create_table(
        "notices",
        sa.Column("target", sa.String(64), primary_key=True),
        sa.Column("run", name, primary_key=True),
        sa.Column("code", sa.String(64), primary_key=True),
        sa.Column("level", sa.String(16), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger()),
        sa.Column("since", sa.Float(53), nullable=False),
        sa.Column("told", sa.BigInteger(), nullable=False),
        sa.Column("last", sa.Float(53)),
    )
    op.create_table(
        "deliveries",
        sa.Column("target", sa.String(64), primary_key=True),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("sent", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("dropped", sa.BigInteger(), nullable=False),
        sa.Column("last_sent", time),
        sa.Column("problem", sa.Text()),
        sa.Column("problem_since", time),
    )


def downgrade() -> None:
    op.drop_table("deliveries")
    op.drop_table("notices")

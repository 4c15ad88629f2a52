"""Whose catalog it is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0002"
branch_labels = None
depends_on = None

_TIME = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "owner",
        sa.Column("only", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("root", sa.String(64), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("since", _TIME, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("owner")

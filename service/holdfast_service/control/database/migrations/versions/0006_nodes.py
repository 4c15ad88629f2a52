"""Several daemons on one root: who they are, which duties each has, whose ranks are where, and what is being read."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    name = sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")
    time = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")
    op.add_column("runs", sa.Column("life", sa.String(16)))
    op.add_column("runs", sa.Column("since", time))
    op.create_table(
        "nodes",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("boot", sa.String(32), nullable=False),
        sa.Column("machine", sa.String(128), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("since", _MOMENT, nullable=False),
        sa.Column("until", _MOMENT, nullable=False),
        sa.Column("about", sa.Text(), nullable=False),
    )
    op.create_table(
        "duties",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("boot", sa.String(32), nullable=False),
        sa.Column("until", _MOMENT, nullable=False),
    )
    op.create_table(
        "crews",
        sa.Column("run", name, primary_key=True),
        sa.Column("node", sa.String(64), primary_key=True),
        sa.Column("boot", sa.String(32), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("world", sa.BigInteger(), nullable=False),
        sa.Column("ranks", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "speakers",
        sa.Column("run", name, sa.ForeignKey("runs.name"), primary_key=True),
        sa.Column("attempt", sa.BigInteger(), primary_key=True),
        sa.Column("rank", sa.BigInteger(), primary_key=True),
        sa.Column("session", sa.String(64), nullable=False),
    )
    op.create_table(
        "holds",
        sa.Column("run", name, primary_key=True),
        sa.Column("step", sa.BigInteger(), primary_key=True),
        sa.Column("node", sa.String(64), primary_key=True),
        sa.Column("opened", sa.Boolean(), nullable=False),
        sa.Column("until", _MOMENT, nullable=False),
    )


def downgrade() -> None:
    for table in ("holds", "speakers", "crews", "duties", "nodes"):
        op.drop_table(table)
    for column in ("since", "life"):
        op.drop_column("runs", column)

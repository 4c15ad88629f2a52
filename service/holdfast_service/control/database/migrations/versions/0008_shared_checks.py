"""Checkpoints that several nodes read back together, in portions; and which boot of a node runs a job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.add_column("jobs", sa.Column("boot", sa.String(32)))
    name = sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")
    op.create_table(
        "shared_checks",
        sa.Column("run", name, primary_key=True),
        sa.Column("step", sa.BigInteger(), primary_key=True),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("before", sa.BigInteger()),
        sa.Column("examine", sa.Boolean(), nullable=False),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("begun", _MOMENT, nullable=False),
        sa.Column("ender", sa.String(64)),
        sa.Column("boot", sa.String(32)),
        sa.Column("until", _MOMENT),
        sa.Column("claim", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "portions",
        sa.Column("run", name, primary_key=True),
        sa.Column("step", sa.BigInteger(), primary_key=True),
        sa.Column("number", sa.BigInteger(), primary_key=True),
        sa.Column("spans", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("meant", sa.String(64)),
        sa.Column("node", sa.String(64)),
        sa.Column("boot", sa.String(32)),
        sa.Column("until", _MOMENT),
        sa.Column("claim", sa.BigInteger(), nullable=False),
        sa.Column("done", sa.BigInteger(), nullable=False),
        sa.Column("found", sa.LargeBinary()),
        sa.Column("repaired", sa.Text()),
    )


def downgrade() -> None:
    for table in ("portions", "shared_checks"):
        op.drop_table(table)
    op.drop_column("jobs", "boot")

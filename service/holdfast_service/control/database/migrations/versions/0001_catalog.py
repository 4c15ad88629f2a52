"""The first catalog: runs, attempts, answers, rounds, checkpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_NAME = sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")
_TIME = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("name", _NAME, primary_key=True),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("keep_last", sa.BigInteger()),
    )
    op.create_table(
        "attempts",
        sa.Column("run", _NAME, sa.ForeignKey("runs.name"), primary_key=True),
        sa.Column("launch", sa.String(256), primary_key=True),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("world", sa.BigInteger(), nullable=False),
        sa.Column("declared", _TIME, nullable=False),
    )
    op.create_table(
        "answers",
        sa.Column("run", _NAME, sa.ForeignKey("runs.name"), primary_key=True),
        sa.Column("attempt", sa.BigInteger(), primary_key=True),
        sa.Column("turn", sa.BigInteger(), primary_key=True),
        sa.Column("step", sa.BigInteger()),
    )
    _create_rounds()
    op.create_table(
        "checkpoints",
        sa.Column("run", _NAME, sa.ForeignKey("runs.name"), primary_key=True),
        sa.Column("step", sa.BigInteger(), primary_key=True),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("created", _TIME, nullable=False),
        sa.Column("world", sa.BigInteger(), nullable=False),
        sa.Column("groups", sa.Text(), nullable=False),
        sa.Column("tensors", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("verified", sa.Boolean(), nullable=False),
    )


def _create_rounds() -> None:
    key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "rounds",
        sa.Column("id", key, primary_key=True, autoincrement=True),
        sa.Column("run", _NAME, sa.ForeignKey("runs.name"), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("world", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("sealed", sa.BigInteger(), nullable=False),
        sa.Column("opened", _TIME, nullable=False),
        sa.Column("ended", _TIME),
        sa.Column("code", sa.String(64)),
        sa.Column("detail", sa.Text()),
    )
    op.create_index("rounds_by_run", "rounds", ["run", "id"])
    op.create_index("rounds_by_state", "rounds", ["state", "id"])


def downgrade() -> None:
    for table in ("checkpoints", "rounds", "answers", "attempts", "runs"):
        op.drop_table(table)

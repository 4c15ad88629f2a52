"""Saves and restores whose ranks are on several nodes: their rounds, each node's part, votes, and the nodes' secret."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_MOMENT = sa.DateTime(timezone=True)
_GOING = sa.text("state IN ('open', 'sealed', 'committing')")


def upgrade() -> None:
    name = sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")
    time = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")
    counted = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "joint_rounds",
        sa.Column("id", counted, primary_key=True, autoincrement=True),
        sa.Column("run", name, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("world", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created", time, nullable=False),
        sa.Column("changed", _MOMENT, nullable=False),
        sa.Column("committer", sa.String(64)),
        sa.Column("claimed_until", _MOMENT),
        sa.Column("problem", sa.Text()),
    )
    key = ["run", "step", "attempt"]
    op.create_index("joint_rounds_going", "joint_rounds", key, unique=True, postgresql_where=_GOING, sqlite_where=_GOING)
    op.create_index("joint_rounds_by_key", "joint_rounds", [*key, "id"])
    op.create_table(
        "declarations",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("since", _MOMENT, nullable=False),
    )
    op.create_table(
        "parts",
        sa.Column("round_id", counted, sa.ForeignKey("joint_rounds.id"), primary_key=True, autoincrement=False),
        sa.Column("node", sa.String(64), primary_key=True),
        sa.Column("boot", sa.String(32), nullable=False),
        sa.Column("ranks", sa.Text(), nullable=False),
        sa.Column("declaration", sa.String(64), sa.ForeignKey("declarations.digest")),
        sa.Column("said", sa.LargeBinary(), nullable=False),
        sa.Column("receipt", sa.LargeBinary()),
    )
    op.create_index("parts_by_declaration", "parts", ["declaration"])
    op.create_table(
        "votes",
        sa.Column("run", name, primary_key=True),
        sa.Column("attempt", sa.BigInteger(), primary_key=True),
        sa.Column("turn", sa.BigInteger(), primary_key=True),
        sa.Column("node", sa.String(64), primary_key=True),
        sa.Column("ranks", sa.Text(), nullable=False),
        sa.Column("problem", sa.Text()),
    )
    op.create_table(
        "secrets",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.String(128), nullable=False),
    )


def downgrade() -> None:
    for table in ("secrets", "votes", "parts", "declarations", "joint_rounds"):
        op.drop_table(table)

"""Who did what; where a token was last used from, and how much it may ask for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def _ordered(length: int) -> sa.String:
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("at", _ordered(40), nullable=False),
        sa.Column("who", _ordered(128), nullable=False),
        sa.Column("known_by", sa.String(16), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("via", sa.String(16), nullable=False),
        sa.Column("kind", _ordered(40), nullable=False),
        sa.Column("run", _ordered(128)),
        sa.Column("step", sa.BigInteger()),
        sa.Column("target", sa.Text()),
        sa.Column("method", sa.String(16), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=False),
        sa.Column("code", sa.String(64)),
        sa.Column("request", sa.String(64), nullable=False),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("untold", sa.BigInteger(), nullable=False),
    )
    for name, *columns in (("at", "at"), ("run", "run", "id"), ("kind", "kind", "id"), ("author", "who", "kind", "id")):
        op.create_index(f"audit_by_{name}", "audit", columns)
    op.add_column("tokens", sa.Column("used_from", sa.String(64)))
    op.add_column("tokens", sa.Column("requests_per_s", sa.BigInteger()))
    op.add_column("tokens", sa.Column("bytes_per_s", sa.BigInteger()))


def downgrade() -> None:
    for column in ("bytes_per_s", "requests_per_s", "used_from"):
        op.drop_column("tokens", column)
    op.drop_table("audit")

"""Where checkpoints come from: the step that their launch restored, the rewinds on the way, and what was left behind."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_FEW = (
    ("checkpoints_abandoned", "abandoned IS 1", "abandoned IS true"),
    ("checkpoints_rewound", "rewinds <> '[]'", "rewinds <> '[]'"),
)


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("restored", sa.BigInteger()))
    op.add_column("checkpoints", sa.Column("turn", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    op.add_column("checkpoints", sa.Column("rewinds", sa.Text(), nullable=False, server_default=sa.text("'[]'")))
    op.add_column("checkpoints", sa.Column("abandoned", sa.Boolean(), nullable=False, server_default=sa.false()))
    for name, on_sqlite, on_postgresql in _FEW:
        op.create_index(
            name,
            "checkpoints",
            ["run", "step"],
            sqlite_where=sa.text(on_sqlite),
            postgresql_where=sa.text(on_postgresql),
        )


def downgrade() -> None:
    for index, _, _ in _FEW:
        op.drop_index(index, "checkpoints")
    for name in ("restored", "turn", "rewinds", "abandoned"):
        op.drop_column("checkpoints", name)

"""Who has seen which alert, and for how long; and an index that sums up replicas."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name = sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")
    time = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")
    op.create_table(
        "acknowledgements",
        sa.Column("run", name, primary_key=True),
        sa.Column("code", sa.String(64), primary_key=True),
        sa.Column("subject", sa.String(128), primary_key=True),
        sa.Column("by", sa.String(128), nullable=False),
        sa.Column("at", time, nullable=False),
        sa.Column("until", time),
    )
    op.create_index("replicas_summed", "replicas", ["run", "tier", "state", "step"])


def downgrade() -> None:
    op.drop_index("replicas_summed", "replicas")
    op.drop_table("acknowledgements")

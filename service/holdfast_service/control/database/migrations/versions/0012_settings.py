"""Who answers for a run, when it was archived, and whose death was seen."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_TIME = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("runs", sa.Column("owner", sa.Text()))
    op.add_column("runs", sa.Column("archived", _TIME))
    op.add_column("runs", sa.Column("acknowledged", sa.BigInteger()))


def downgrade() -> None:
    op.drop_column("runs", "acknowledged")
    op.drop_column("runs", "archived")
    op.drop_column("runs", "owner")

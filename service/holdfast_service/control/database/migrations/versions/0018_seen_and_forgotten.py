"""Who has seen that a run died, which events of each run are not kept any more, and whose a renamed run's copies are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

EVENTS_MAX = 20_000  # as many are kept
_NAME = sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")
_TIME = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("runs", sa.Column("acknowledged_by", sa.String(128)))
    op.add_column("runs", sa.Column("acknowledged_at", _TIME))
    op.add_column("replicas", sa.Column("heir", _NAME))
    op.create_table(
        "forgotten_events",
        sa.Column("run", _NAME, primary_key=True),
        sa.Column("newest", sa.BigInteger(), nullable=False),
    )
    # Of which runs those were that were forgotten so far, nobody knows.
    oldest, count = op.get_bind().execute(sa.text("SELECT MIN(id), COUNT(*) FROM events")).one()
    if count >= EVENTS_MAX:
        named = "SELECT name FROM runs UNION SELECT ''"
        forgotten = f"INSERT INTO forgotten_events (run, newest) SELECT name, :newest FROM ({named}) AS known"
        op.get_bind().execute(sa.text(forgotten), {"newest": oldest - 1})


def downgrade() -> None:
    op.drop_table("forgotten_events")
    op.drop_column("replicas", "heir")
    op.drop_column("runs", "acknowledged_at")
    op.drop_column("runs", "acknowledged_by")

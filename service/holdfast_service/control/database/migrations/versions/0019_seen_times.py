"""When checkpoints were committed, in time that daemons have seen pass, and as which files they were read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

from holdfast_formats.moments import seconds_of

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

GAP_MAX_S = 3600.0  # between two commits: no daemon has watched these clocks
_TIMES = "SELECT run, step, created FROM checkpoints ORDER BY run, step"
_NOTE = "UPDATE checkpoints SET seen_s = :seen_s WHERE run = :run AND step = :step"


def upgrade() -> None:
    op.add_column("runs", sa.Column("recorded", sa.DateTime(timezone=True)))
    op.add_column("checkpoints", sa.Column("proven", sa.String(64)))
    op.add_column("checkpoints", sa.Column("seen_s", sa.Float(53)))
    found = list(_seen(op.get_bind().execute(sa.text(_TIMES)).all()))
    if found:
        op.get_bind().execute(sa.text(_NOTE), found)


def downgrade() -> None:
    op.drop_column("checkpoints", "seen_s")
    op.drop_column("checkpoints", "proven")
    op.drop_column("runs", "recorded")


def _seen(rows: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """No daemon has seen the time pass between these commits, so at most an hour of their clocks counts."""
    of, at, seen = None, 0.0, 0.0
    for run, step, created in rows:
        now = seconds_of(created)
        seen = 0.0 if run != of else seen + min(max(now - at, 0.0), GAP_MAX_S)
        of, at = run, now
        yield {"run": run, "step": step, "seen_s": seen}

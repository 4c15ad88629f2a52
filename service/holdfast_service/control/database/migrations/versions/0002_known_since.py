"""What is known of checkpoints since their commit, and what else only the catalog knows: events, jobs, tokens and so on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_COUNTED = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_NAME = sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")
_TIME = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")


_FEW = (
    ("checkpoints_damaged", "damage IS NOT NULL", "damage IS NOT NULL"),
    ("checkpoints_unhealthy", "healthy IS 0", "healthy IS false"),
    ("checkpoints_unverified", "verified IS 0", "verified IS false"),
)


def upgrade() -> None:
    for name, kind in (
        ("checked", _TIME),
        ("check", sa.Text()),
        ("damage", sa.Text()),
        ("nonfinite", sa.BigInteger()),
        ("healthy", sa.Boolean()),
        ("same_as", sa.BigInteger()),
        ("stamp", sa.String(128)),
    ):
        op.add_column("checkpoints", sa.Column(name, kind))
    op.create_index("checkpoints_summed", "checkpoints", ["run", "step", "bytes"])
    for name, on_sqlite, on_postgresql in _FEW:
        op.create_index(
            name,
            "checkpoints",
            ["run", "step"],
            sqlite_where=sa.text(on_sqlite),
            postgresql_where=sa.text(on_postgresql),
        )
    op.add_column("rounds", sa.Column("node", sa.String(64)))
    op.add_column("rounds", sa.Column("measured", sa.Text()))
    op.create_index("rounds_by_run_and_state", "rounds", ["run", "state", "id"])
    ended = sa.text("code IS NOT NULL")
    op.create_index("rounds_by_code", "rounds", ["code"], sqlite_where=ended, postgresql_where=ended)
    _create_statistics()
    _create_replicas()
    _create_events()
    _create_jobs()
    _create_tokens()


def _at() -> tuple[sa.Column[str], sa.Column[int]]:
    return (
        sa.Column("run", _NAME, sa.ForeignKey("runs.name"), primary_key=True),
        sa.Column("step", sa.BigInteger(), primary_key=True),
    )


def _create_statistics() -> None:
    op.create_table(
        "statistics",
        *_at(),
        sa.Column("tensors", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("layers", sa.Text(), nullable=False),
    )


def _create_replicas() -> None:
    op.create_table(
        "replicas",
        *_at(),
        sa.Column("tier", sa.String(64), primary_key=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("since", _TIME, nullable=False),
        sa.Column("checked", _TIME),
        sa.Column("problem", sa.Text()),
    )


def _create_events() -> None:
    op.create_table(
        "events",
        sa.Column("id", _COUNTED, primary_key=True, autoincrement=True),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("level", sa.String(8), nullable=False),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("run", _NAME),
        sa.Column("step", sa.BigInteger()),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sqlite_autoincrement=True,  # an id that has been seen is never given out again
    )
    op.create_index("events_by_run", "events", ["run", "id"])
    op.create_index("events_by_kind", "events", ["kind", "id"])


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", _COUNTED, primary_key=True, autoincrement=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("run", _NAME),
        sa.Column("step", sa.BigInteger()),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("cancel", sa.Boolean(), nullable=False),
        sa.Column("done_bytes", sa.BigInteger(), nullable=False),
        sa.Column("total_bytes", sa.BigInteger(), nullable=False),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.Column("created", _TIME, nullable=False),
        sa.Column("started", _TIME),
        sa.Column("seen", _TIME),
        sa.Column("ended", _TIME),
        sa.Column("result", sa.Text()),
        sa.Column("problem", sa.Text()),
    )
    op.create_index("jobs_by_state", "jobs", ["state", "id"])
    goes_on = sa.text("state IN ('queued', 'running')")
    op.create_index("jobs_by_key", "jobs", ["key"], unique=True, sqlite_where=goes_on, postgresql_where=goes_on)


def _create_tokens() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", _COUNTED, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("scope", sa.String(8), nullable=False),
        sa.Column("runs", _NAME, nullable=False),
        sa.Column("created", _TIME, nullable=False),
        sa.Column("expires", _TIME),
        sa.Column("revoked", _TIME),
        sa.Column("used", _TIME),
    )


def downgrade() -> None:
    for table in ("tokens", "jobs", "events", "replicas", "statistics"):
        op.drop_table(table)
    for index in ("rounds_by_code", "rounds_by_run_and_state"):
        op.drop_index(index, "rounds")
    for index in ("checkpoints_summed", *(name for name, _, _ in _FEW)):
        op.drop_index(index, "checkpoints")
    op.drop_column("rounds", "measured")
    op.drop_column("rounds", "node")
    for name in ("checked", "check", "damage", "nonfinite", "healthy", "same_as", "stamp"):
        op.drop_column("checkpoints", name)

"""The catalog's tables. `migrations/` makes them; a test compares the two."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator


def _ordered(length: int) -> String:
    """Text that is compared byte by byte, whatever the database's locale: cursors and times depend on it."""
    return String(length).with_variant(String(length, collation="C"), "postgresql")


_NAME, _TIME = _ordered(128), _ordered(40)
# SQLite numbers rows by itself only where the key's type is spelt INTEGER.
_COUNTED = BigInteger().with_variant(Integer, "sqlite")
_MOMENT = DateTime(timezone=True)  # of the database's own clock: no two nodes' clocks are ever compared (I17)
DUTY_CHARS_MAX = 64
REWOUND = "rewinds <> '[]'"
_JOB_GOES_ON = text("state IN ('queued', 'running')")


class FreeText(TypeDecorator[str]):
    """Text of any origin. What no database keeps, NUL and halves of surrogate pairs, is written out."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return None if value is None else value.replace("\0", "\\x00").encode(errors="backslashreplace").decode()


class JsonText(TypeDecorator[Any]):
    """A JSON value as text of ASCII alone, so that every database keeps it byte for byte."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> str | None:
        return None if value is None else json.dumps(value, sort_keys=True)

    def process_result_value(self, value: str | None, dialect: Any) -> Any:
        return None if value is None else json.loads(value)


class CatalogTable(DeclarativeBase):
    type_annotation_map = {int: BigInteger}  # noqa: RUF012 — SQLAlchemy's own spelling


class OwnerRow(CatalogTable):
    """The root whose catalog this is, in the one row that there is: its id, and where it was last served."""

    __tablename__ = "owner"

    only: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    root: Mapped[str] = mapped_column(String(64))
    path: Mapped[str] = mapped_column(FreeText)
    node: Mapped[str] = mapped_column(String(64))
    since: Mapped[str] = mapped_column(_TIME)


class RunRow(CatalogTable):
    """A run. `attempt` is the newest one declared, the number that shuts out older writers (I6); `life` and `since` are the
    state of its ranks. The columns from `owner` on come from its files: `archived` is a time, `acknowledged` the attempt
    whose death was acknowledged, with person and time.
    """

    __tablename__ = "runs"

    name: Mapped[str] = mapped_column(_NAME, primary_key=True)
    attempt: Mapped[int] = mapped_column(default=0)
    keep_last: Mapped[int | None]
    life: Mapped[str | None] = mapped_column(String(16))
    since: Mapped[str | None] = mapped_column(_TIME)
    owner: Mapped[str | None] = mapped_column(FreeText)
    archived: Mapped[str | None] = mapped_column(_TIME)
    acknowledged: Mapped[int | None]
    acknowledged_by: Mapped[str | None] = mapped_column(String(128))
    acknowledged_at: Mapped[str | None] = mapped_column(_TIME)
    recorded: Mapped[datetime | None] = mapped_column(_MOMENT)  # the newest commit, where several nodes may record them


class RunFiguresRow(CatalogTable):
    """The figures of a run, encoded (`insight/run_figures`), up to the changes that `run_changes` still lists."""

    __tablename__ = "run_figures"

    run: Mapped[str] = mapped_column(_NAME, primary_key=True)
    figures: Mapped[bytes] = mapped_column(LargeBinary)


class RunChangeRow(CatalogTable):
    """Rows of a run were changed since its figures were renewed. Triggers insert it (`database/changes`)."""

    __tablename__ = "run_changes"
    __table_args__ = (Index("run_changes_by_run", "run"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(_COUNTED, primary_key=True, autoincrement=True)
    run: Mapped[str] = mapped_column(_NAME)


class AttemptRow(CatalogTable):
    __tablename__ = "attempts"

    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    launch: Mapped[str] = mapped_column(String(256), primary_key=True)
    attempt: Mapped[int]
    world: Mapped[int]
    declared: Mapped[str] = mapped_column(_TIME)


class AnswerRow(CatalogTable):
    """The step that every rank of an attempt restores as its `turn`-th; NULL says that there was none."""

    __tablename__ = "answers"

    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    turn: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int | None]


class RoundRow(CatalogTable):
    __tablename__ = "rounds"
    __table_args__ = (
        Index("rounds_by_run", "run", "id"),
        Index("rounds_by_state", "state", "id"),
        Index("rounds_by_run_and_state", "run", "state", "id"),
        Index("rounds_by_code", "code", sqlite_where=text("code IS NOT NULL"), postgresql_where=text("code IS NOT NULL")),
    )

    id: Mapped[int] = mapped_column(_COUNTED, primary_key=True, autoincrement=True)
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"))
    step: Mapped[int]
    attempt: Mapped[int]
    world: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    sealed: Mapped[int]
    opened: Mapped[str] = mapped_column(_TIME)
    ended: Mapped[str | None] = mapped_column(_TIME)
    code: Mapped[str | None] = mapped_column(String(64))
    detail: Mapped[str | None] = mapped_column(FreeText)
    node: Mapped[str | None] = mapped_column(String(64))
    measured: Mapped[dict[str, float] | None] = mapped_column(JsonText)


def _where(name: str, sqlite: str, postgresql: str) -> Index:
    """An index of the few checkpoints for which something holds."""
    return Index(name, "run", "step", sqlite_where=text(sqlite), postgresql_where=text(postgresql))


class CheckpointRow(CatalogTable):
    """A checkpoint. What stands from `verified` on was found out since its commit, and only the catalog knows it.

    `stamp` is what storage said of COMMIT and manifest when the row was made: while it says the same, the row stands.
    `proven` is what it said of all files when they were read back and found sound: while it says the same, they are that.
    `seen_s` is when it was committed, in seconds that daemons have seen pass since the run's first commit.
    `abandoned` follows from the lineages of all checkpoints of the run, and is made again with each that comes or goes.
    """

    __tablename__ = "checkpoints"
    __table_args__ = (
        Index("checkpoints_summed", "run", "step", "bytes"),
        _where("checkpoints_damaged", "damage IS NOT NULL", "damage IS NOT NULL"),
        _where("checkpoints_unhealthy", "healthy IS 0", "healthy IS false"),
        _where("checkpoints_unverified", "verified IS 0", "verified IS false"),
        _where("checkpoints_abandoned", "abandoned IS 1", "abandoned IS true"),
        _where("checkpoints_rewound", REWOUND, REWOUND),
    )

    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    created: Mapped[str] = mapped_column(_TIME)
    world: Mapped[int]
    groups: Mapped[list[str]] = mapped_column(JsonText)
    tensors: Mapped[int]
    files: Mapped[int]
    bytes: Mapped[int]
    metrics: Mapped[dict[str, float]] = mapped_column(JsonText)
    verified: Mapped[bool] = mapped_column(Boolean)
    checked: Mapped[str | None] = mapped_column(_TIME)
    check: Mapped[dict[str, Any] | None] = mapped_column(JsonText)
    damage: Mapped[dict[str, Any] | None] = mapped_column(JsonText)
    nonfinite: Mapped[int | None]
    healthy: Mapped[bool | None] = mapped_column(Boolean)
    same_as: Mapped[int | None]
    stamp: Mapped[str | None] = mapped_column(String(128))
    proven: Mapped[str | None] = mapped_column(String(64))
    seen_s: Mapped[float | None] = mapped_column(Float(53))
    restored: Mapped[int | None]
    turn: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    rewinds: Mapped[list[Any]] = mapped_column(JsonText, default=list, server_default=text("'[]'"))
    abandoned: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())
    thinned: Mapped[dict[str, Any] | None] = mapped_column(JsonText)
    thin_bytes: Mapped[int | None]
    compacted: Mapped[dict[str, Any] | None] = mapped_column(JsonText)
    small_bytes: Mapped[dict[str, Any] | None] = mapped_column(JsonText)


class StatisticsRow(CatalogTable):
    """What was computed of a checkpoint's tensors while their bytes passed, encoded; `layers` sums it up for plots."""

    __tablename__ = "statistics"

    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    tensors: Mapped[int]
    data: Mapped[bytes] = mapped_column(LargeBinary)
    layers: Mapped[dict[str, Any]] = mapped_column(JsonText)


class ReplicaRow(CatalogTable):
    """A copy of a checkpoint in another tier, as far as it is known. `heir`: its run was renamed to that. `requested`: the
    removal of its checkpoint was requested by name.
    """

    __tablename__ = "replicas"
    __table_args__ = (Index("replicas_summed", "run", "tier", "state", "step"),)

    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(String(64), primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    bytes: Mapped[int]
    since: Mapped[str] = mapped_column(_TIME)
    checked: Mapped[str | None] = mapped_column(_TIME)
    problem: Mapped[dict[str, Any] | None] = mapped_column(JsonText)
    heir: Mapped[str | None] = mapped_column(_NAME)
    requested: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())


class EventRow(CatalogTable):
    """What happened. The newest ones are kept; `run` is no foreign key, since an event may outlive what it tells of."""

    __tablename__ = "events"
    __table_args__ = (
        Index("events_by_run", "run", "id"),
        Index("events_by_kind", "kind", "id"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(_COUNTED, primary_key=True, autoincrement=True)
    at: Mapped[str] = mapped_column(_TIME)
    kind: Mapped[str] = mapped_column(_TIME)
    level: Mapped[str] = mapped_column(String(8))
    node: Mapped[str] = mapped_column(String(64))
    run: Mapped[str | None] = mapped_column(_NAME)
    step: Mapped[int | None]
    text: Mapped[str] = mapped_column(FreeText)
    detail: Mapped[dict[str, Any]] = mapped_column(JsonText)


class ForgottenEventsRow(CatalogTable):
    """The newest event of a run ("": of no run) that is not kept any more. Ids have holes, so nothing else says that."""

    __tablename__ = "forgotten_events"

    run: Mapped[str] = mapped_column(_NAME, primary_key=True)
    newest: Mapped[int]


class JobRow(CatalogTable):
    """Work that outlasts a request. `key` follows from kind and request: the same work going on is the same job.

    `tries` counts its starts, and is what the node that runs it knows it by; `seen` is that node's last sign of life, and
    `boot` its boot, where several nodes may run it.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        Index("jobs_by_state", "state", "id"),
        Index("jobs_by_key", "key", unique=True, sqlite_where=_JOB_GOES_ON, postgresql_where=_JOB_GOES_ON),
    )

    id: Mapped[int] = mapped_column(_COUNTED, primary_key=True, autoincrement=True)
    kind: Mapped[str] = mapped_column(String(32))
    key: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    run: Mapped[str | None] = mapped_column(_NAME)
    step: Mapped[int | None]
    request: Mapped[dict[str, Any]] = mapped_column(JsonText)
    cancel: Mapped[bool] = mapped_column(Boolean)
    done_bytes: Mapped[int]
    total_bytes: Mapped[int]
    node: Mapped[str] = mapped_column(String(64))
    boot: Mapped[str | None] = mapped_column(String(32))
    tries: Mapped[int]
    created: Mapped[str] = mapped_column(_TIME)
    started: Mapped[str | None] = mapped_column(_TIME)
    seen: Mapped[str | None] = mapped_column(_TIME)
    ended: Mapped[str | None] = mapped_column(_TIME)
    result: Mapped[dict[str, Any] | None] = mapped_column(JsonText)
    problem: Mapped[dict[str, Any] | None] = mapped_column(JsonText)


class TokenRow(CatalogTable):
    """A bearer token, known by the SHA-256 of its text alone."""

    __tablename__ = "tokens"

    id: Mapped[int] = mapped_column(_COUNTED, primary_key=True, autoincrement=True)
    name: Mapped[str] = mapped_column(String(64))
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    scope: Mapped[str] = mapped_column(String(8))
    runs: Mapped[str] = mapped_column(_NAME)
    created: Mapped[str] = mapped_column(_TIME)
    expires: Mapped[str | None] = mapped_column(_TIME)
    revoked: Mapped[str | None] = mapped_column(_TIME)
    used: Mapped[str | None] = mapped_column(_TIME)
    used_from: Mapped[str | None] = mapped_column(String(64))
    requests_per_s: Mapped[int | None]
    bytes_per_s: Mapped[int | None]


class AuditRow(CatalogTable):
    """An audited act. `run` is no foreign key: an entry outlives its run."""

    __tablename__ = "audit"
    __table_args__ = (
        Index("audit_by_at", "at"),
        Index("audit_by_run", "run", "id"),
        Index("audit_by_kind", "kind", "id"),
        Index("audit_by_author", "who", "kind", "id"),
    )

    id: Mapped[int] = mapped_column(_COUNTED, primary_key=True, autoincrement=True)
    at: Mapped[str] = mapped_column(_TIME)
    who: Mapped[str] = mapped_column(_NAME)
    by: Mapped[str] = mapped_column("known_by", String(16))
    address: Mapped[str] = mapped_column(String(64))
    via: Mapped[str] = mapped_column(String(16))
    kind: Mapped[str] = mapped_column(_TIME)
    run: Mapped[str | None] = mapped_column(_NAME)
    step: Mapped[int | None]
    target: Mapped[str | None] = mapped_column(FreeText)
    method: Mapped[str] = mapped_column(String(16))
    path: Mapped[str] = mapped_column(FreeText)
    status: Mapped[int]
    code: Mapped[str | None] = mapped_column(String(64))
    request: Mapped[str] = mapped_column(String(64))
    node: Mapped[str] = mapped_column(String(64))
    untold: Mapped[int]


class NodeRow(CatalogTable):
    """A daemon that shares this catalog, and until when it is a member of the cluster unless it says so again.

    `boot` is new at every start. `machine` and `pid` say which process it is, for one that starts in its place.
    """

    __tablename__ = "nodes"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    boot: Mapped[str] = mapped_column(String(32))
    machine: Mapped[str] = mapped_column(String(128))
    pid: Mapped[int]
    since: Mapped[datetime] = mapped_column(_MOMENT)
    until: Mapped[datetime] = mapped_column(_MOMENT)
    about: Mapped[dict[str, Any]] = mapped_column(JsonText)


class DutyRow(CatalogTable):
    """Work that one node does for all of them, and until when it does."""

    __tablename__ = "duties"

    name: Mapped[str] = mapped_column(String(DUTY_CHARS_MAX), primary_key=True)
    node: Mapped[str] = mapped_column(String(64))
    boot: Mapped[str] = mapped_column(String(32))
    until: Mapped[datetime] = mapped_column(_MOMENT)


class NodeRanksRow(CatalogTable):
    """The ranks of a run that are connected to a node."""

    __tablename__ = "crews"

    run: Mapped[str] = mapped_column(_NAME, primary_key=True)
    node: Mapped[str] = mapped_column(String(64), primary_key=True)
    boot: Mapped[str] = mapped_column(String(32))
    attempt: Mapped[int]
    world: Mapped[int]
    ranks: Mapped[int]
    left_s: Mapped[float | None] = mapped_column(Float(53))


class SpeakerRow(CatalogTable):
    """Which checkpointer speaks for a rank of an attempt: another one of the same launch's name is another start."""

    __tablename__ = "speakers"

    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    session: Mapped[str] = mapped_column(String(64))


class HoldRow(CatalogTable):
    """A checkpoint that is being read through a node, which no other node removes before `until`. With `opened`, the reader
    has its files open and reads on if it is replaced.
    """

    __tablename__ = "holds"

    run: Mapped[str] = mapped_column(_NAME, primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    node: Mapped[str] = mapped_column(String(64), primary_key=True)
    opened: Mapped[bool] = mapped_column(Boolean)
    until: Mapped[datetime] = mapped_column(_MOMENT)


class JointRoundRow(CatalogTable):
    """A save whose ranks are on several nodes. At most one of a run, step and attempt goes on.

    `open` until the parts of all ranks are there, then `sealed`, `committing` from a node's claim on, and `committed` or
    `aborted` in the end.
    """

    __tablename__ = "joint_rounds"
    __table_args__ = (
        Index(
            "joint_rounds_going",
            "run",
            "step",
            "attempt",
            unique=True,
            postgresql_where=text("state IN ('open', 'sealed', 'committing')"),
            sqlite_where=text("state IN ('open', 'sealed', 'committing')"),
        ),
        Index("joint_rounds_by_key", "run", "step", "attempt", "id"),
    )

    id: Mapped[int] = mapped_column(_COUNTED, primary_key=True, autoincrement=True)
    run: Mapped[str] = mapped_column(_NAME)
    step: Mapped[int]
    attempt: Mapped[int]
    world: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    created: Mapped[str] = mapped_column(_TIME)
    changed: Mapped[datetime] = mapped_column(_MOMENT)
    committer: Mapped[str | None] = mapped_column(String(64))
    claimed_until: Mapped[datetime | None] = mapped_column(_MOMENT)
    problem: Mapped[dict[str, Any] | None] = mapped_column(JsonText)
    joined: Mapped[bytes | None] = mapped_column(LargeBinary)  # all parts in one body, once it is sealed
    lineage: Mapped[list[Any] | None] = mapped_column(JsonText)  # as the first node that commits it has found
    # The node that cannot write its share, and why; the node that writes it instead, until when.
    unable: Mapped[str | None] = mapped_column(String(64))
    unable_why: Mapped[dict[str, Any] | None] = mapped_column(JsonText)
    helper: Mapped[str | None] = mapped_column(String(64))
    helped_until: Mapped[datetime | None] = mapped_column(_MOMENT)


class DeclarationRow(CatalogTable):
    """What the ranks of a node hold, by the digest of its encoding; compressed. Or those of all nodes of a round together,
    by a name that follows from their digests.
    """

    __tablename__ = "declarations"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    body: Mapped[bytes] = mapped_column(LargeBinary)
    since: Mapped[datetime] = mapped_column(_MOMENT)


class PartRow(CatalogTable):
    """A node's part of a joint round: its ranks, what they say, and what the node has written, once it has. A node that only
    has to know that the round was given up has no ranks in it.
    """

    __tablename__ = "parts"
    __table_args__ = (
        Index("parts_by_declaration", "declaration"),
        Index("parts_waiting", "round_id", postgresql_where=text("receipt IS NULL"), sqlite_where=text("receipt IS NULL")),
    )

    round_id: Mapped[int] = mapped_column(_COUNTED, ForeignKey("joint_rounds.id"), primary_key=True, autoincrement=False)
    node: Mapped[str] = mapped_column(String(64), primary_key=True)
    boot: Mapped[str] = mapped_column(String(32))
    ranks: Mapped[list[int]] = mapped_column(JsonText)
    declaration: Mapped[str | None] = mapped_column(ForeignKey("declarations.digest"))
    said: Mapped[bytes] = mapped_column(LargeBinary)
    receipt: Mapped[bytes | None] = mapped_column(LargeBinary)


class VoteRow(CatalogTable):
    """How the n-th restore of an attempt ended for the ranks of a node: those that are done, or damage."""

    __tablename__ = "votes"

    run: Mapped[str] = mapped_column(_NAME, primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    turn: Mapped[int] = mapped_column(primary_key=True)
    node: Mapped[str] = mapped_column(String(64), primary_key=True)
    ranks: Mapped[list[int]] = mapped_column(JsonText)
    problem: Mapped[dict[str, Any] | None] = mapped_column(JsonText)


class AverageVoteRow(CatalogTable):
    """Which updates of their averages the ranks of a node have dealt with, and whether they bring the next one."""

    __tablename__ = "average_votes"

    run: Mapped[str] = mapped_column(_NAME, primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    node: Mapped[str] = mapped_column(String(64), primary_key=True)
    ranks: Mapped[list[int]] = mapped_column(JsonText)
    number: Mapped[int]
    history: Mapped[str] = mapped_column(String(32))
    folded: Mapped[int]
    changed: Mapped[datetime] = mapped_column(_MOMENT)


class RanksWordRow(CatalogTable):
    """What a node says of its ranks of a launch, for what only all ranks together decide; under no node's name, what was.
    It has said the same from `since` to `until`.
    """

    __tablename__ = "ranks_words"

    run: Mapped[str] = mapped_column(_NAME, primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    topic: Mapped[str] = mapped_column(String(16), primary_key=True)
    node: Mapped[str] = mapped_column(String(64), primary_key=True)
    boot: Mapped[str] = mapped_column(String(32))
    said: Mapped[dict[str, Any]] = mapped_column(JsonText)
    since: Mapped[datetime] = mapped_column(_MOMENT)
    until: Mapped[datetime] = mapped_column(_MOMENT)


class SharedCheckRow(CatalogTable):
    """A checkpoint that several nodes read back together. The row is there while they do: what was found stands in
    `checkpoints`. `node` has begun it; `ender` puts together what was found, under a claim like that of a portion.
    """

    __tablename__ = "shared_checks"

    run: Mapped[str] = mapped_column(_NAME, primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    sha256: Mapped[str] = mapped_column(String(64))
    before: Mapped[int | None]
    examine: Mapped[bool] = mapped_column(Boolean)
    node: Mapped[str] = mapped_column(String(64))
    begun: Mapped[datetime] = mapped_column(_MOMENT)
    ender: Mapped[str | None] = mapped_column(String(64))
    boot: Mapped[str | None] = mapped_column(String(32))
    until: Mapped[datetime | None] = mapped_column(_MOMENT)
    claim: Mapped[int]


class PortionRow(CatalogTable):
    """A portion of a shared check: what is to be read, preferably by the node `meant`; the node that reads it, under the
    claim with this number; and what was `found` once all of it is proven.
    """

    __tablename__ = "portions"

    run: Mapped[str] = mapped_column(_NAME, primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    spans: Mapped[list[list[int]]] = mapped_column(JsonText)
    size: Mapped[int]
    meant: Mapped[str | None] = mapped_column(String(64))
    node: Mapped[str | None] = mapped_column(String(64))
    boot: Mapped[str | None] = mapped_column(String(32))
    until: Mapped[datetime | None] = mapped_column(_MOMENT)
    claim: Mapped[int]
    done: Mapped[int]
    found: Mapped[bytes | None] = mapped_column(LargeBinary)
    repaired: Mapped[list[str] | None] = mapped_column(JsonText)


class SecretRow(CatalogTable):
    """A secret shared by the nodes of a cluster."""

    __tablename__ = "secrets"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(String(128))


class NoticeRow(CatalogTable):
    """An alert that a target of notifications was told of, or is going to be: `told` times so far, and `last` when.
    Times are seconds since the epoch. `run` is empty for what is about no run.
    """

    __tablename__ = "notices"

    target: Mapped[str] = mapped_column(String(64), primary_key=True)
    run: Mapped[str] = mapped_column(_NAME, primary_key=True)
    code: Mapped[str] = mapped_column(String(64), primary_key=True)
    level: Mapped[str] = mapped_column(String(16))
    text: Mapped[str] = mapped_column(FreeText)
    hint: Mapped[str] = mapped_column(FreeText)
    step: Mapped[int | None]
    since: Mapped[float] = mapped_column(Float(53))
    told: Mapped[int]
    last: Mapped[float | None] = mapped_column(Float(53))


class DeliveryRow(CatalogTable):
    """How messages to a target of notifications fare: how many were accepted, failed, or came too late to be told."""

    __tablename__ = "deliveries"

    target: Mapped[str] = mapped_column(String(64), primary_key=True)
    node: Mapped[str] = mapped_column(String(64))
    sent: Mapped[int]
    failed: Mapped[int]
    dropped: Mapped[int]
    last_sent: Mapped[str | None] = mapped_column(_TIME)
    problem: Mapped[str | None] = mapped_column(FreeText)
    problem_since: Mapped[str | None] = mapped_column(_TIME)


class AcknowledgementRow(CatalogTable):
    """The acknowledgement of an alert, deleted with the alert. `run` is "" where it is about a node or a replica of all
    runs.
    """

    __tablename__ = "acknowledgements"

    run: Mapped[str] = mapped_column(_NAME, primary_key=True)
    code: Mapped[str] = mapped_column(String(64), primary_key=True)
    subject: Mapped[str] = mapped_column(String(128), primary_key=True)
    by: Mapped[str] = mapped_column(String(128))
    at: Mapped[str] = mapped_column(_TIME)
    until: Mapped[str | None] = mapped_column(_TIME)

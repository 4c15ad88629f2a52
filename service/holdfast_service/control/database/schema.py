"""The catalog's tables. `migrations/` makes them; a test compares the two."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Boolean, Float, ForeignKey, Index, Integer, LargeBinary, String, false, text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_service.control.database import cluster_schema  # noqa: F401 - with it, the metadata has all tables
from holdfast_service.control.database.columns import COUNTED, MOMENT, NAME, TIME, CatalogTable, FreeText, JsonText, Words

REWOUND = "rewinds <> '[]'"
_JOB_GOES_ON = text("state IN ('queued', 'running')")


class OwnerRow(CatalogTable):
    """The root whose catalog this is, in the one row that there is: its id, and where it was last served."""

    __tablename__ = "owner"

    only: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    root: Mapped[str] = mapped_column(String(64))
    path: Mapped[str] = mapped_column(FreeText)
    node: Mapped[str] = mapped_column(String(64))
    since: Mapped[str] = mapped_column(TIME)

    def move_to(self, root: str, path: str, node: str, since: str) -> None:
        """It is the catalog of this root, which is served there since then."""
        self.root, self.path, self.node, self.since = root, path, node, since


class RunRow(CatalogTable):
    """A run. `attempt` is the newest one declared, the number that shuts out older writers (I6); `life` and `since` are the
    state of its ranks. The columns from `owner` on come from its files: `archived` is a time, `acknowledged` the attempt
    whose death was acknowledged, with person and time.
    """

    __tablename__ = "runs"

    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    attempt: Mapped[int] = mapped_column(default=0)
    keep_last: Mapped[int | None]
    life: Mapped[str | None] = mapped_column(String(16))
    since: Mapped[str | None] = mapped_column(TIME)
    owner: Mapped[str | None] = mapped_column(FreeText)
    tags: Mapped[tuple[str, ...] | None] = mapped_column(Words)
    archived: Mapped[str | None] = mapped_column(TIME)
    acknowledged: Mapped[int | None]
    acknowledged_by: Mapped[str | None] = mapped_column(String(128))
    acknowledged_at: Mapped[str | None] = mapped_column(TIME)
    recorded: Mapped[datetime | None] = mapped_column(MOMENT)  # the newest commit, where several nodes may record them

    def raise_attempt(self, attempt: int) -> None:
        """Shut out older writers than this attempt."""
        self.attempt = max(self.attempt, attempt)

    def forget(self) -> None:
        """Keep only its name: the run is removed, and copies of its checkpoints in replicas are left."""
        self.attempt, self.keep_last, self.life, self.since = 0, None, None, None
        self.owner = self.tags = self.archived = None
        self.acknowledged = self.acknowledged_by = self.acknowledged_at = None


class RunFiguresRow(CatalogTable):
    """The figures of a run, encoded (`insight/run_figures`), up to the changes that `run_changes` still lists."""

    __tablename__ = "run_figures"

    run: Mapped[str] = mapped_column(NAME, primary_key=True)
    figures: Mapped[bytes] = mapped_column(LargeBinary)


class RunChangeRow(CatalogTable):
    """Rows of a run were changed since its figures were renewed. Triggers insert it (`database/changes`)."""

    __tablename__ = "run_changes"
    __table_args__ = (Index("run_changes_by_run", "run"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(COUNTED, primary_key=True, autoincrement=True)
    run: Mapped[str] = mapped_column(NAME)


class AttemptRow(CatalogTable):
    __tablename__ = "attempts"

    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    launch: Mapped[str] = mapped_column(String(256), primary_key=True)
    attempt: Mapped[int]
    world: Mapped[int]
    declared: Mapped[str] = mapped_column(TIME)


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

    id: Mapped[int] = mapped_column(COUNTED, primary_key=True, autoincrement=True)
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"))
    step: Mapped[int]
    attempt: Mapped[int]
    world: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    sealed: Mapped[int]
    opened: Mapped[str] = mapped_column(TIME)
    ended: Mapped[str | None] = mapped_column(TIME)
    code: Mapped[str | None] = mapped_column(String(64))
    detail: Mapped[str | None] = mapped_column(FreeText)
    node: Mapped[str | None] = mapped_column(String(64))
    measured: Mapped[dict[str, float] | None] = mapped_column(JsonText)

    def seal(self, ranks: int) -> None:
        """So many ranks have sealed."""
        self.sealed = ranks
        self.state = "sealed" if ranks >= self.world else "open"

    def end(self, state: str, now: str, code: str | None = None, detail: str | None = None, node: str | None = None) -> None:
        """`node` has ended it; without one it stays with the node that began it."""
        self.state, self.ended, self.code, self.detail = state, now, code, detail
        self.node = node or self.node

    def measure(self, measured: Mapping[str, float]) -> None:
        """Add timings."""
        self.measured = {**(self.measured or {}), **measured}


def _where(name: str, sqlite: str, postgresql: str) -> Index:
    """An index of the few checkpoints for which something holds."""
    return Index(name, "run", "step", sqlite_where=text(sqlite), postgresql_where=text(postgresql))


class CheckpointRow(CatalogTable):
    """A checkpoint. What stands from `verified` on was found out since its commit, and only the catalog knows it.

    `stamp` is what storage said of COMMIT and manifest when the row was made: while it says the same, the row stands.
    `proven` is what it said of all files when they were read back and found sound: while it says the same, they are that.
    `seen_s` is when it was committed, in seconds that daemons have seen pass since the run's first commit.
    `abandoned` follows from the lineages of all checkpoints of the run, and is made again with each that comes or goes.
    `shared_bytes` are those of files that an older checkpoint of the run has too (`checkpoints/shared_files`).
    """

    __tablename__ = "checkpoints"
    __table_args__ = (
        Index("checkpoints_summed", "run", "step", "bytes", "shared_bytes"),
        _where("checkpoints_damaged", "damage IS NOT NULL", "damage IS NOT NULL"),
        _where("checkpoints_unhealthy", "healthy IS 0", "healthy IS false"),
        _where("checkpoints_unverified", "verified IS 0", "verified IS false"),
        _where("checkpoints_abandoned", "abandoned IS 1", "abandoned IS true"),
        _where("checkpoints_rewound", REWOUND, REWOUND),
    )

    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    created: Mapped[str] = mapped_column(TIME)
    world: Mapped[int]
    groups: Mapped[list[str]] = mapped_column(JsonText)
    tensors: Mapped[int]
    files: Mapped[int]
    bytes: Mapped[int]
    metrics: Mapped[dict[str, float]] = mapped_column(JsonText)
    verified: Mapped[bool] = mapped_column(Boolean)
    checked: Mapped[str | None] = mapped_column(TIME)
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
    shared_bytes: Mapped[int] = mapped_column(default=0, server_default=text("0"))

    def mark_verified(self, now: str, proof: str, check: Mapping[str, Any] | None, same_as: int | None) -> None:
        """It was read back whole and is sound. `check` None: the numbers of an earlier check stay."""
        self.verified, self.damage, self.checked, self.proven = True, None, now, proof
        self.check = dict(check) if check is not None else self.check
        self.same_as = same_as

    def mark_damaged(self, problem: dict[str, Any], checked: str | None) -> None:
        """`checked`: when it was read back whole; None where a part was read."""
        self.verified, self.damage = False, problem
        self.checked = checked or self.checked


OCCUPIED = CheckpointRow.bytes - CheckpointRow.shared_bytes  # summed over checkpoints of a run, what they take of the disk


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
    since: Mapped[str] = mapped_column(TIME)
    checked: Mapped[str | None] = mapped_column(TIME)
    problem: Mapped[dict[str, Any] | None] = mapped_column(JsonText)
    measured: Mapped[dict[str, float] | None] = mapped_column(JsonText)
    heir: Mapped[str | None] = mapped_column(NAME)
    requested: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())


class EventRow(CatalogTable):
    """What happened. The newest ones are kept; `run` is no foreign key, since an event may outlive what it tells of."""

    __tablename__ = "events"
    __table_args__ = (
        Index("events_by_run", "run", "id"),
        Index("events_by_kind", "kind", "id"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(COUNTED, primary_key=True, autoincrement=True)
    at: Mapped[str] = mapped_column(TIME)
    kind: Mapped[str] = mapped_column(TIME)
    level: Mapped[str] = mapped_column(String(8))
    node: Mapped[str] = mapped_column(String(64))
    run: Mapped[str | None] = mapped_column(NAME)
    step: Mapped[int | None]
    text: Mapped[str] = mapped_column(FreeText)
    detail: Mapped[dict[str, Any]] = mapped_column(JsonText)


class ForgottenEventsRow(CatalogTable):
    """The newest event of a run ("": of no run) that is not kept any more. Ids have holes, so nothing else says that."""

    __tablename__ = "forgotten_events"

    run: Mapped[str] = mapped_column(NAME, primary_key=True)
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

    id: Mapped[int] = mapped_column(COUNTED, primary_key=True, autoincrement=True)
    kind: Mapped[str] = mapped_column(String(32))
    key: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    run: Mapped[str | None] = mapped_column(NAME)
    step: Mapped[int | None]
    request: Mapped[dict[str, Any]] = mapped_column(JsonText)
    cancel: Mapped[bool] = mapped_column(Boolean)
    done_bytes: Mapped[int]
    total_bytes: Mapped[int]
    node: Mapped[str] = mapped_column(String(64))
    boot: Mapped[str | None] = mapped_column(String(32))
    tries: Mapped[int]
    created: Mapped[str] = mapped_column(TIME)
    started: Mapped[str | None] = mapped_column(TIME)
    seen: Mapped[str | None] = mapped_column(TIME)
    ended: Mapped[str | None] = mapped_column(TIME)
    result: Mapped[dict[str, Any] | None] = mapped_column(JsonText)
    problem: Mapped[dict[str, Any] | None] = mapped_column(JsonText)

    def start(self, node: str, boot: str | None, now: str) -> None:
        """A node has claimed it."""
        self.state, self.node, self.boot, self.tries = "running", node, boot, self.tries + 1
        self.started, self.seen, self.ended = now, now, None
        self.count(0, 0)

    def count(self, done_bytes: int, total_bytes: int) -> None:
        self.done_bytes, self.total_bytes = done_bytes, total_bytes

    def renew(self, now: str) -> None:
        """The node that runs it has given a sign of life."""
        self.seen = now

    def request_cancel(self, now: str) -> None:
        """A queued job ends at once, the runner of a running one is to stop it, and an ended one stays as it is."""
        if self.state in ("queued", "running"):
            self.cancel = True
        if self.state == "queued":
            self.end("cancelled", now)

    def requeue(self, uncounted: bool = False) -> None:
        """Put a running job back; `uncounted`: that start does not count."""
        self.state, self.seen = "queued", None
        if uncounted:
            self.tries -= 1

    def end(self, state: str, now: str, result: dict[str, Any] | None = None, problem: dict[str, Any] | None = None) -> None:
        self.state, self.ended, self.result, self.problem = state, now, result, problem


class TokenRow(CatalogTable):
    """A bearer token, known by the SHA-256 of its text alone."""

    __tablename__ = "tokens"

    id: Mapped[int] = mapped_column(COUNTED, primary_key=True, autoincrement=True)
    name: Mapped[str] = mapped_column(String(64))
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    scope: Mapped[str] = mapped_column(String(8))
    runs: Mapped[str] = mapped_column(NAME)
    created: Mapped[str] = mapped_column(TIME)
    expires: Mapped[str | None] = mapped_column(TIME)
    revoked: Mapped[str | None] = mapped_column(TIME)
    used: Mapped[str | None] = mapped_column(TIME)
    used_from: Mapped[str | None] = mapped_column(String(64))
    requests_per_s: Mapped[int | None]
    bytes_per_s: Mapped[int | None]

    def revoke(self, now: str) -> None:
        self.revoked = now

    def expire_by(self, end: str) -> None:
        """Expire then, if not before."""
        self.expires = end if self.expires is None else min(self.expires, end)


class AuditRow(CatalogTable):
    """An audited act. `run` is no foreign key: an entry outlives its run."""

    __tablename__ = "audit"
    __table_args__ = (
        Index("audit_by_at", "at"),
        Index("audit_by_run", "run", "id"),
        Index("audit_by_kind", "kind", "id"),
        Index("audit_by_author", "who", "kind", "id"),
    )

    id: Mapped[int] = mapped_column(COUNTED, primary_key=True, autoincrement=True)
    at: Mapped[str] = mapped_column(TIME)
    who: Mapped[str] = mapped_column(NAME)
    by: Mapped[str] = mapped_column("known_by", String(16))
    address: Mapped[str] = mapped_column(String(64))
    via: Mapped[str] = mapped_column(String(16))
    kind: Mapped[str] = mapped_column(TIME)
    run: Mapped[str | None] = mapped_column(NAME)
    step: Mapped[int | None]
    target: Mapped[str | None] = mapped_column(FreeText)
    method: Mapped[str] = mapped_column(String(16))
    path: Mapped[str] = mapped_column(FreeText)
    status: Mapped[int]
    code: Mapped[str | None] = mapped_column(String(64))
    request: Mapped[str] = mapped_column(String(64))
    node: Mapped[str] = mapped_column(String(64))
    untold: Mapped[int]


class NoticeRow(CatalogTable):
    """An alert that a target of notifications was told of, or is going to be: `told` times so far, and `last` when; until
    the first message, `last` is when it was first seen. Times are seconds since the epoch. `run` is empty for what is
    about no run.
    """

    __tablename__ = "notices"

    target: Mapped[str] = mapped_column(String(64), primary_key=True)
    run: Mapped[str] = mapped_column(NAME, primary_key=True)
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
    last_sent: Mapped[str | None] = mapped_column(TIME)
    problem: Mapped[str | None] = mapped_column(FreeText)
    problem_since: Mapped[str | None] = mapped_column(TIME)


class AcknowledgementRow(CatalogTable):
    """The acknowledgement of an alert, deleted with the alert. `run` is "" where it is about a node or a replica of all
    runs.
    """

    __tablename__ = "acknowledgements"

    run: Mapped[str] = mapped_column(NAME, primary_key=True)
    code: Mapped[str] = mapped_column(String(64), primary_key=True)
    subject: Mapped[str] = mapped_column(String(128), primary_key=True)
    by: Mapped[str] = mapped_column(String(128))
    at: Mapped[str] = mapped_column(TIME)
    until: Mapped[str | None] = mapped_column(TIME)

"""The tables by which the nodes of a cluster work together. They are in every catalog: one migration makes all tables."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Boolean, Float, ForeignKey, Index, LargeBinary, String, text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_service.control.database.columns import COUNTED, MOMENT, NAME, TIME, CatalogTable, JsonText

DUTY_CHARS_MAX = 64


class NodeRow(CatalogTable):
    """A daemon that shares this catalog, and until when it is a member of the cluster unless it says so again.

    `boot` is new at every start. `machine` and `pid` say which process it is, for one that starts in its place.
    """

    __tablename__ = "nodes"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    boot: Mapped[str] = mapped_column(String(32))
    machine: Mapped[str] = mapped_column(String(128))
    pid: Mapped[int]
    since: Mapped[datetime] = mapped_column(MOMENT)
    until: Mapped[datetime] = mapped_column(MOMENT)
    about: Mapped[dict[str, Any]] = mapped_column(JsonText)


class DutyRow(CatalogTable):
    """Work that one node does for all of them, and until when it does."""

    __tablename__ = "duties"

    name: Mapped[str] = mapped_column(String(DUTY_CHARS_MAX), primary_key=True)
    node: Mapped[str] = mapped_column(String(64))
    boot: Mapped[str] = mapped_column(String(32))
    until: Mapped[datetime] = mapped_column(MOMENT)


class NodeRanksRow(CatalogTable):
    """The ranks of a run that are connected to a node."""

    __tablename__ = "crews"

    run: Mapped[str] = mapped_column(NAME, primary_key=True)
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


class PutIntentRow(CatalogTable):
    """A put to a bucket that honours no conditions, begun by one node: no other one puts the object before it is over."""

    __tablename__ = "put_intents"

    key: Mapped[str] = mapped_column(String(2048), primary_key=True)
    writer: Mapped[str] = mapped_column(String(32))
    etag: Mapped[str | None] = mapped_column(String(128))
    data: Mapped[bytes | None] = mapped_column(LargeBinary)
    since: Mapped[datetime] = mapped_column(MOMENT)


class HoldRow(CatalogTable):
    """A checkpoint that is being read through a node, which no other node removes before `until`. With `opened`, the reader
    has its files open and reads on if it is replaced.
    """

    __tablename__ = "holds"

    run: Mapped[str] = mapped_column(NAME, primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    node: Mapped[str] = mapped_column(String(64), primary_key=True)
    opened: Mapped[bool] = mapped_column(Boolean)
    until: Mapped[datetime] = mapped_column(MOMENT)


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

    id: Mapped[int] = mapped_column(COUNTED, primary_key=True, autoincrement=True)
    run: Mapped[str] = mapped_column(NAME)
    step: Mapped[int]
    attempt: Mapped[int]
    world: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    created: Mapped[str] = mapped_column(TIME)
    changed: Mapped[datetime] = mapped_column(MOMENT)
    committer: Mapped[str | None] = mapped_column(String(64))
    claimed_until: Mapped[datetime | None] = mapped_column(MOMENT)
    problem: Mapped[dict[str, Any] | None] = mapped_column(JsonText)
    joined: Mapped[bytes | None] = mapped_column(LargeBinary)  # all parts in one body, once it is sealed
    lineage: Mapped[list[Any] | None] = mapped_column(JsonText)  # as the first node that commits it has found
    # The node that cannot write its share, and why; the node that writes it instead, until when.
    unable: Mapped[str | None] = mapped_column(String(64))
    unable_why: Mapped[dict[str, Any] | None] = mapped_column(JsonText)
    helper: Mapped[str | None] = mapped_column(String(64))
    helped_until: Mapped[datetime | None] = mapped_column(MOMENT)


class DeclarationRow(CatalogTable):
    """What the ranks of a node hold, by the digest of its encoding; compressed. Or those of all nodes of a round together,
    by a name that follows from their digests.
    """

    __tablename__ = "declarations"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    body: Mapped[bytes] = mapped_column(LargeBinary)
    since: Mapped[datetime] = mapped_column(MOMENT)


class PartRow(CatalogTable):
    """A node's part of a joint round: its ranks, what they say, and what the node has written, once it has. A node that only
    has to know that the round was given up has no ranks in it.
    """

    __tablename__ = "parts"
    __table_args__ = (
        Index("parts_by_declaration", "declaration"),
        Index("parts_waiting", "round_id", postgresql_where=text("receipt IS NULL"), sqlite_where=text("receipt IS NULL")),
    )

    round_id: Mapped[int] = mapped_column(COUNTED, ForeignKey("joint_rounds.id"), primary_key=True, autoincrement=False)
    node: Mapped[str] = mapped_column(String(64), primary_key=True)
    boot: Mapped[str] = mapped_column(String(32))
    ranks: Mapped[list[int]] = mapped_column(JsonText)
    declaration: Mapped[str | None] = mapped_column(ForeignKey("declarations.digest"))
    said: Mapped[bytes] = mapped_column(LargeBinary)
    receipt: Mapped[bytes | None] = mapped_column(LargeBinary)


class VoteRow(CatalogTable):
    """How the n-th restore of an attempt ended for the ranks of a node: those that are done, or damage."""

    __tablename__ = "votes"

    run: Mapped[str] = mapped_column(NAME, primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    turn: Mapped[int] = mapped_column(primary_key=True)
    node: Mapped[str] = mapped_column(String(64), primary_key=True)
    ranks: Mapped[list[int]] = mapped_column(JsonText)
    problem: Mapped[dict[str, Any] | None] = mapped_column(JsonText)


class AverageVoteRow(CatalogTable):
    """Which updates of their averages the ranks of a node have dealt with, and whether they bring the next one."""

    __tablename__ = "average_votes"

    run: Mapped[str] = mapped_column(NAME, primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    node: Mapped[str] = mapped_column(String(64), primary_key=True)
    ranks: Mapped[list[int]] = mapped_column(JsonText)
    number: Mapped[int]
    history: Mapped[str] = mapped_column(String(32))
    folded: Mapped[int]
    changed: Mapped[datetime] = mapped_column(MOMENT)


class RanksWordRow(CatalogTable):
    """What a node says of its ranks of a launch, for what only all ranks together decide; under no node's name, what was.
    It has said the same from `since` to `until`.
    """

    __tablename__ = "ranks_words"

    run: Mapped[str] = mapped_column(NAME, primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    topic: Mapped[str] = mapped_column(String(16), primary_key=True)
    node: Mapped[str] = mapped_column(String(64), primary_key=True)
    boot: Mapped[str] = mapped_column(String(32))
    said: Mapped[dict[str, Any]] = mapped_column(JsonText)
    since: Mapped[datetime] = mapped_column(MOMENT)
    until: Mapped[datetime] = mapped_column(MOMENT)


class SharedCheckRow(CatalogTable):
    """A checkpoint that several nodes read back together. The row is there while they do: what was found stands in
    `checkpoints`. `node` has begun it; `ender` puts together what was found, under a claim like that of a portion.
    """

    __tablename__ = "shared_checks"

    run: Mapped[str] = mapped_column(NAME, primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    sha256: Mapped[str] = mapped_column(String(64))
    before: Mapped[int | None]
    examine: Mapped[bool] = mapped_column(Boolean)
    node: Mapped[str] = mapped_column(String(64))
    begun: Mapped[datetime] = mapped_column(MOMENT)
    ender: Mapped[str | None] = mapped_column(String(64))
    boot: Mapped[str | None] = mapped_column(String(32))
    until: Mapped[datetime | None] = mapped_column(MOMENT)
    claim: Mapped[int]


class PortionRow(CatalogTable):
    """A portion of a shared check: what is to be read, preferably by the node `meant`; the node that reads it, under the
    claim with this number; and what was `found` once all of it is proven.
    """

    __tablename__ = "portions"

    run: Mapped[str] = mapped_column(NAME, primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    spans: Mapped[list[list[int]]] = mapped_column(JsonText)
    size: Mapped[int]
    meant: Mapped[str | None] = mapped_column(String(64))
    node: Mapped[str | None] = mapped_column(String(64))
    boot: Mapped[str | None] = mapped_column(String(32))
    until: Mapped[datetime | None] = mapped_column(MOMENT)
    claim: Mapped[int]
    done: Mapped[int]
    found: Mapped[bytes | None] = mapped_column(LargeBinary)
    repaired: Mapped[list[str] | None] = mapped_column(JsonText)


class SecretRow(CatalogTable):
    """A secret shared by the nodes of a cluster."""

    __tablename__ = "secrets"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(String(128))

"""Where nodes meet to save one checkpoint: who has brought which ranks, who has written its share, and who commits.

A round is `open` until the parts of all ranks are there. Then it is `sealed`: every node sees the same parts, plans the same
files, and writes its share of them. Whoever sees that nobody's receipt is missing may claim the commit. A claim ends by the
database's clock, and another node commits the same bytes. Nothing here publishes: storage decides (I13).
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import zstandard
from sqlalchemy import ColumnElement, delete, exists, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from holdfast_formats.errors import InvalidRequest, RoundAborted, StaleAttempt, StateMismatch, from_problem
from holdfast_formats.moments import utc_now
from holdfast_formats.staging.joint import JointPart, JointRound, Votes
from holdfast_service.control.cluster.bell import CHANNEL
from holdfast_service.control.cluster.membership import Membership, later, now
from holdfast_service.control.database.schema import (
    DeclarationRow,
    JointRoundRow,
    NodeRow,
    PartRow,
    RunRow,
    SecretRow,
    VoteRow,
)

CLAIM_S = 60.0
GOING = ("open", "sealed", "committing")
DECLARATIONS_KEPT = 64
BODY_BYTES_MAX = 2**30  # of a declaration, or of what a part says, when it is not compressed
ABANDONED_S = 120.0  # daemons that are started again come back with their parts
_KEPT_S = 3600.0
_SECRET = "exchange"


class Rendezvous:
    """Every call is one transaction, or a few; `CatalogUnavailable` if the database does not answer. Thread-safe."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._database = membership, membership.database
        self._lock = threading.Lock()
        self._declarations: OrderedDict[str, bytes] = OrderedDict()

    def arrive(  # noqa: PLR0913 - each is one thing
        self, run: str, step: int, attempt: int, world: int, ranks: Collection[int], declaration: bytes, said: bytes
    ) -> int:
        """Bring this node's part; returns the round's id. The ranks may become more until the round is sealed.

        `StaleAttempt` if a newer attempt has begun (I6). What ended a round of this step and attempt is raised once for each
        node that had no part in it.
        """
        digest, me = hashlib.sha256(declaration).hexdigest(), self._membership.me
        packed, mine = zstandard.compress(said), sorted(ranks)
        with self._database.apart() as session:
            _refuse_stale(session, run, attempt)
            row = self._going(session, run, step, attempt, world, packed)
            part = session.get(PartRow, (row.id, me.name))
            if row.state == "committed":
                return row.id
            if row.state != "open":
                if part is None or (part.ranks, part.declaration, part.said) != (mine, digest, packed):
                    raise RoundAborted(f"step {step} is being written already, with another part of this node")
                part.boot = me.boot
                return row.id
            if row.world != world:
                raise StateMismatch(f"ranks of this node have a world size of {world}, but the save has {row.world}")
            if session.get(DeclarationRow, digest) is None:
                body = {"digest": digest, "body": zstandard.compress(declaration), "since": now()}
                session.execute(insert(DeclarationRow).values(body).on_conflict_do_nothing())
            values = {"boot": me.boot, "ranks": mine, "declaration": digest, "said": packed}
            made = insert(PartRow).values({"round_id": row.id, "node": me.name} | values)
            session.execute(made.on_conflict_do_update(index_elements=[PartRow.round_id, PartRow.node], set_=values))
            return row.id

    def _going(self, session: Session, run: str, step: int, attempt: int, world: int, packed: bytes) -> JointRoundRow:
        """The round that goes on, shared until the transaction ends; made if there is none. Or the one that has committed
        what this node brings once more.
        """
        key = (JointRoundRow.run == run, JointRoundRow.step == step, JointRoundRow.attempt == attempt)
        newest = select(JointRoundRow).where(*key).order_by(JointRoundRow.id.desc()).limit(1).with_for_update(read=True)
        last = session.scalar(newest)
        if (
            last is not None
            and last.state == "aborted"
            and session.get(PartRow, (last.id, self._membership.me.name)) is None
        ):
            self._hear(session, last.id)
            problem = last.problem or {}
            session.commit()
            raise from_problem(problem)
        if last is not None and (last.state in GOING or self._was_in(session, last, packed)):
            return last
        values = {"run": run, "step": step, "attempt": attempt, "world": world, "state": "open", "created": utc_now()}
        session.execute(insert(JointRoundRow).values(values | {"changed": now()}).on_conflict_do_nothing())
        made = session.scalar(newest)
        if made is None or made.state not in GOING:
            raise RoundAborted(f"step {step} was given up on another node at this moment")
        return made

    def _was_in(self, session: Session, last: JointRoundRow, packed: bytes) -> bool:
        part = session.get(PartRow, (last.id, self._membership.me.name))
        return last.state == "committed" and part is not None and part.said == packed

    def _hear(self, session: Session, round_id: int) -> None:
        """This node knows how the round ended."""
        me = self._membership.me
        empty = {"round_id": round_id, "node": me.name, "boot": me.boot, "ranks": [], "said": b""}
        session.execute(insert(PartRow).values(empty).on_conflict_do_nothing())

    def renew(self, round_id: int) -> None:
        """This node has joined the cluster anew: its part is the new boot's."""
        me = self._membership.me
        mine = (PartRow.round_id == round_id, PartRow.node == me.name)
        with self._database.apart() as session:
            session.execute(update(PartRow).where(*mine).values(boot=me.boot))

    def seal(self, round_id: int) -> None:
        """If the parts of all ranks are there, no part changes any more."""
        with self._database.apart() as session:
            row = session.get(JointRoundRow, round_id, with_for_update=True)
            if row is None or row.state != "open":
                return
            parts = session.scalars(select(PartRow).where(PartRow.round_id == round_id)).all()
            brought = [rank for part in parts for rank in part.ranks]
            if len(brought) != len(set(brought)):
                why = RoundAborted(f"two nodes have brought the same ranks of step {row.step}")
                row.state, row.problem, row.changed = "aborted", why.problem(), now()
                _ring(session)
            elif len(brought) == row.world:
                row.state, row.changed = "sealed", now()
                _ring(session)

    def look(self, round_id: int) -> JointRound:
        """The round as it is now."""
        live = func.coalesce(NodeRow.until > now(), False)
        columns = (JointRoundRow.state, JointRoundRow.created, JointRoundRow.world, JointRoundRow.problem)
        of_part = (PartRow.node, PartRow.ranks, PartRow.boot, PartRow.receipt.is_not(None))
        wanted = (
            select(*columns, *of_part, NodeRow.boot, live, NodeRow.about)
            .outerjoin(PartRow, PartRow.round_id == JointRoundRow.id)
            .outerjoin(NodeRow, NodeRow.name == PartRow.node)
            .where(JointRoundRow.id == round_id)
            .order_by(PartRow.node)
        )
        with self._database.apart() as session:
            rows = session.execute(wanted).all()
        if not rows:
            raise RoundAborted("the catalog has lost the save; it may have been restored from a backup")
        state, created, world, problem = rows[0][:4]
        parts = tuple(
            JointPart(
                node, tuple(ranks), bool(known) and boot == newest, bool(known), (about or {}).get("exchange") or "", done
            )
            for _, _, _, _, node, ranks, boot, done, newest, known, about in rows
            if ranks
        )
        return JointRound(round_id, state, created, world, parts, problem)

    def parts(self, round_id: int) -> list[tuple[str, bytes, bytes]]:
        """Of each part of a sealed round: its declaration's digest, the declaration, and what its ranks say."""
        with self._database.apart() as session:
            rows = [part for part in session.scalars(select(PartRow).where(PartRow.round_id == round_id)) if part.ranks]
            wanted = {part.declaration for part in rows if part.declaration}
            with self._lock:
                known = {digest: self._declarations[digest] for digest in wanted & self._declarations.keys()}
            unknown = select(DeclarationRow).where(DeclarationRow.digest.in_(wanted - known.keys()))
            for row in session.scalars(unknown) if wanted - known.keys() else ():
                known[row.digest] = self._unpacked(row)
            return [(str(part.declaration), known[str(part.declaration)], _unpack(part.said)) for part in rows]

    def _unpacked(self, row: DeclarationRow) -> bytes:
        body = _unpack(row.body)
        if hashlib.sha256(body).hexdigest() != row.digest:
            raise InvalidRequest("the catalog holds another declaration than its digest says")
        with self._lock:
            self._declarations[row.digest] = body
            while len(self._declarations) > DECLARATIONS_KEPT:
                self._declarations.popitem(last=False)
        return body

    def deliver(self, round_id: int, receipt: bytes) -> None:
        """What this node has written and synced. The first receipt of a node stands."""
        mine = (PartRow.round_id == round_id, PartRow.node == self._membership.me.name, PartRow.receipt.is_(None))
        going = exists().where(JointRoundRow.id == round_id, JointRoundRow.state.in_(GOING))
        with self._database.apart() as session:
            session.execute(update(PartRow).where(*mine, going).values(receipt=zstandard.compress(receipt)))
            missing = exists().where(PartRow.round_id == round_id, PartRow.receipt.is_(None))
            session.execute(select(func.pg_notify(CHANNEL, "")).where(~missing))

    def claim(self, round_id: int) -> bool:
        """Whether this node is the one that commits now: all receipts are there, and nobody else's claim lasts."""
        me = self._membership.me
        missing = exists().where(PartRow.round_id == round_id, PartRow.receipt.is_(None))
        over = (JointRoundRow.state == "committing") & (
            (JointRoundRow.claimed_until < now()) | (JointRoundRow.committer == me.name)
        )
        free = (JointRoundRow.id == round_id, (JointRoundRow.state == "sealed") | over, ~missing)
        values = {"state": "committing", "committer": me.name, "claimed_until": later(CLAIM_S), "changed": now()}
        with self._database.apart() as session:
            return session.scalar(update(JointRoundRow).where(*free).values(values).returning(JointRoundRow.id)) is not None

    def receipts(self, round_id: int) -> list[bytes]:
        """What all nodes have written."""
        with self._database.apart() as session:
            found = select(PartRow.receipt).where(PartRow.round_id == round_id).order_by(PartRow.node)
            return [_unpack(receipt) for receipt in session.scalars(found) if receipt is not None]

    def committed(self, round_id: int) -> None:
        """The checkpoint stands."""
        going = (JointRoundRow.id == round_id, JointRoundRow.state.in_(GOING))
        with self._database.apart() as session:
            session.execute(update(JointRoundRow).where(*going).values(state="committed", changed=now()))
            _ring(session)

    def abort(self, round_id: int, problem: Mapping[str, Any], claimed: bool = False) -> bool:
        """End the round for all nodes; False if it is being committed, or has ended. `claimed`: by the one that commits."""
        mine = (JointRoundRow.state == GOING[-1]) & (JointRoundRow.committer == self._membership.me.name)
        may = JointRoundRow.state.in_(GOING[:-1])
        going = (JointRoundRow.id == round_id, may | mine if claimed else may)
        values = {"state": "aborted", "problem": dict(problem), "changed": now()}
        with self._database.apart() as session:
            ended = session.scalar(update(JointRoundRow).where(*going).values(values).returning(JointRoundRow.id))
            if session.get(JointRoundRow, round_id) is not None:  # else the catalog has lost it
                self._hear(session, round_id)
            _ring(session)
            return ended is not None

    def refuse(self, run: str, step: int, attempt: int, world: int, problem: Mapping[str, Any]) -> None:
        """This node will not bring its part of a step: the round ends for all, also for those that come later."""
        key = (JointRoundRow.run == run, JointRoundRow.step == step, JointRoundRow.attempt == attempt)
        ended = {"state": "aborted", "problem": dict(problem), "changed": now()}
        with self._database.apart() as session:
            open_one = (*key, JointRoundRow.state.in_(GOING[:-1]))
            found = session.scalar(update(JointRoundRow).where(*open_one).values(ended).returning(JointRoundRow.id))
            last = session.scalar(select(JointRoundRow).where(*key).order_by(JointRoundRow.id.desc()).limit(1))
            if found is None and (last is None or last.state not in (*GOING, "committed")):
                if last is not None and session.get(PartRow, (last.id, self._membership.me.name)) is None:
                    self._hear(session, last.id)  # that one was another node's, of the same step
                    return
                values = {"run": run, "step": step, "attempt": attempt, "world": world, "created": utc_now()} | ended
                found = session.scalar(insert(JointRoundRow).values(values).returning(JointRoundRow.id))
            if found is not None:
                self._hear(session, found)
                _ring(session)

    def is_writing(self, run: str) -> bool:
        """Whether a round of this run is sealed, and neither committed nor aborted, and some node of it is there."""
        going = (JointRoundRow.run == run, JointRoundRow.state.in_(GOING[1:]), _attended())
        with self._database.apart() as session:
            return session.scalar(select(JointRoundRow.id).where(*going).limit(1)) is not None

    def vote(
        self, run: str, attempt: int, turn: int, ranks: Collection[int], problem: Mapping[str, Any] | None = None
    ) -> Votes:
        """Say which ranks' restores have ended here, and hear what all nodes have said."""
        values = {"ranks": sorted(ranks), "problem": None if problem is None else dict(problem)}
        key = {"run": run, "attempt": attempt, "turn": turn, "node": self._membership.me.name}
        same = [VoteRow.run, VoteRow.attempt, VoteRow.turn, VoteRow.node]
        made = insert(VoteRow).values(key | values)
        kept = made.excluded.problem if problem is not None else func.coalesce(VoteRow.problem, made.excluded.problem)
        with self._database.apart() as session:
            session.execute(
                made.on_conflict_do_update(index_elements=same, set_={"ranks": made.excluded.ranks, "problem": kept})
            )
            of_turn = (VoteRow.run == run, VoteRow.attempt == attempt, VoteRow.turn == turn)
            rows = session.scalars(select(VoteRow).where(*of_turn).order_by(VoteRow.node)).all()
            said = frozenset(rank for row in rows for rank in row.ranks)
            return Votes(said, next((row.problem for row in rows if row.problem is not None), None))

    def secret(self) -> str:
        """What nodes of this cluster say to each other; the first one makes it up."""
        made = insert(SecretRow).values(name=_SECRET, value=secrets.token_urlsafe(32)).on_conflict_do_nothing()
        with self._database.apart(hopeful=True) as session:
            session.execute(made)
            return str(session.scalar(select(SecretRow.value).where(SecretRow.name == _SECRET)))

    def end_abandoned(self) -> list[tuple[str, int]]:
        """End the rounds of which no node is there any more, with what it had brought; returns their runs and steps."""
        old = now() - func.make_interval(0, 0, 0, 0, 0, 0, ABANDONED_S)
        left = (JointRoundRow.state.in_(GOING), JointRoundRow.changed < old, ~_attended())
        problem = RoundAborted("all nodes of the save were lost before it was committed").problem()
        values = {"state": "aborted", "problem": problem, "changed": now()}
        with self._database.apart() as session:
            ended = update(JointRoundRow).where(*left).values(values).returning(JointRoundRow.run, JointRoundRow.step)
            return [(run, step) for run, step in session.execute(ended)]

    def forget(self) -> None:
        """Remove what is kept of rounds that ended long ago, and of restores of older attempts."""
        old = now() - func.make_interval(0, 0, 0, 0, 0, 0, _KEPT_S)
        with self._database.apart() as session:
            ended = select(JointRoundRow.id).where(JointRoundRow.state.not_in(GOING), JointRoundRow.changed < old)
            session.execute(delete(PartRow).where(PartRow.round_id.in_(ended)))
            session.execute(delete(JointRoundRow).where(JointRoundRow.state.not_in(GOING), JointRoundRow.changed < old))
            used = select(PartRow.declaration).where(PartRow.declaration.is_not(None))
            session.execute(delete(DeclarationRow).where(DeclarationRow.since < old, DeclarationRow.digest.not_in(used)))
            newest = select(RunRow.attempt).where(RunRow.name == VoteRow.run).scalar_subquery()
            session.execute(delete(VoteRow).where(VoteRow.attempt < func.coalesce(newest, VoteRow.attempt + 1)))


def _attended() -> ColumnElement[bool]:
    """Of a round: whether a node that has brought a part is a member, as the boot that has."""
    there = (NodeRow.name == PartRow.node) & (NodeRow.boot == PartRow.boot) & (NodeRow.until > now())
    return exists().where(PartRow.round_id == JointRoundRow.id, there)


def _ring(session: Session) -> None:
    """All nodes look at their rounds once the transaction has ended."""
    session.execute(select(func.pg_notify(CHANNEL, "")))


def _refuse_stale(session: Session, run: str, attempt: int) -> None:
    newest = session.scalar(select(RunRow.attempt).where(RunRow.name == run))
    if newest is not None and newest > attempt:
        raise StaleAttempt(
            f"attempt {attempt} of {run} is shut out: attempt {newest} has started",
            hint="a newer launch of this run is active; stop this one",
            newest=newest,
        )


def _unpack(packed: bytes) -> bytes:
    try:
        return zstandard.decompress(packed, max_output_size=BODY_BYTES_MAX)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"what the catalog holds of a save cannot be read: {error}") from error

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
from typing import Any, NamedTuple

import zstandard
from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    Text,
    case,
    cast,
    delete,
    exists,
    func,
    literal,
    select,
    type_coerce,
    update,
)
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.orm import Session, aliased
from sqlalchemy.sql.dml import ReturningInsert

from holdfast_formats.errors import InvalidRequest, RoundAborted, StaleAttempt, StateMismatch, from_problem
from holdfast_formats.lineage import Lineage, Rewind
from holdfast_formats.moments import utc_now
from holdfast_formats.naming import Place
from holdfast_formats.staging import joined
from holdfast_formats.staging.joined import JoinedPart
from holdfast_formats.staging.joint import JointPart, JointRound, RoundState, Votes
from holdfast_service.control.cluster.bell import CHANNEL
from holdfast_service.control.cluster.membership import Membership, later, now
from holdfast_service.control.database.schema import (
    CatalogTable,
    DeclarationRow,
    JointRoundRow,
    JsonText,
    NodeRow,
    PartRow,
    RunRow,
    SecretRow,
    VoteRow,
)

CLAIM_S = 60.0
GOING = ("open", "sealed", "committing")
BODY_BYTES_MAX = 2**30  # of a declaration, or of what a part says, when it is not compressed
DECLARATIONS_KEPT = 64
SEALED_KEPT = 4  # rounds that go on at once are few
TOGETHER_MIN = 8  # so many declarations, and more, are kept together too
TOGETHER_BYTES_MAX = BODY_BYTES_MAX - 2**20
WINDOW_LOG = 27  # zstd looks back for what is alike so far, 128 MiB
ABANDONED_S = 120.0  # daemons that are started again come back with their parts
_KEPT_S = 3600.0
_SECRET = "exchange"
LOST = "the catalog has lost the save; it may have been restored from a backup"


class _Key(NamedTuple):
    """The step that a round saves."""

    run: str
    step: int
    attempt: int

    def of(self, row: type[JointRoundRow]) -> tuple[ColumnElement[bool], ...]:
        return row.run == self.run, row.step == self.step, row.attempt == self.attempt

    def new_id(self) -> ColumnElement[int]:
        """The number of a new round: the database's time in microseconds, above all of this step. A catalog that is restored
        from a backup would give numbers of a sequence out twice, and the path of what is staged has nothing else (I11).
        """
        last = select(func.max(JointRoundRow.id)).where(*self.of(JointRoundRow)).scalar_subquery()
        micros = cast(func.extract("epoch", now()) * 1_000_000, BigInteger)
        return func.greatest(micros, func.coalesce(last, 0) + 1)

    def lock(self, session: Session) -> None:
        """Nobody else with this lock makes or ends a round of this step until the transaction ends."""
        number = int.from_bytes(
            hashlib.sha256(f"{self.run}@{self.step}~{self.attempt}".encode()).digest()[:8], "big", signed=True
        )
        session.execute(select(func.pg_advisory_xact_lock(number)))


class _Brought(NamedTuple):
    """A sealed round as it stands in one body."""

    state: str
    created: str
    world: int
    parts: tuple[JoinedPart, ...]


class Rendezvous:
    """Every call is one transaction, or a few; `CatalogUnavailable` if the database does not answer. Thread-safe."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._database = membership, membership.database
        self._lock = threading.Lock()
        self._declarations: OrderedDict[str, bytes] = OrderedDict()
        self._sealed: OrderedDict[int, _Brought] = OrderedDict()

    def arrive(  # noqa: PLR0913 - each is one thing
        self, run: str, step: int, attempt: int, world: int, ranks: Collection[int], declaration: bytes, said: bytes
    ) -> int:
        """Bring this node's part; returns the round's id. The ranks may become more until the round is sealed.

        `StaleAttempt` if a newer attempt has begun (I6). What ended a round of this step and attempt is raised once for each
        node that has not heard of it: it had no part in it, or was started again since.
        """
        digest, me = hashlib.sha256(declaration).hexdigest(), self._membership.me
        packed, mine = zstandard.compress(said), sorted(ranks)
        key = _Key(run, step, attempt)
        brought = self._bring(key, world, {"ranks": mine, "declaration": digest, "said": packed})
        if brought is not None:
            return brought
        with self._database.apart() as session:
            key.lock(session)
            _refuse_stale(session, run, attempt)
            row = self._going(session, key, world, packed)
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

    def _bring(self, key: _Key, world: int, part: Mapping[str, Any]) -> int | None:
        """As `arrive` where all is as it is in most saves: one statement where the round is open, three where nothing is
        known of this step yet. None where there is more to be said.
        """
        bring, make = self._put_part(key, world, part), self._make(key, world, part["declaration"])
        with self._database.plain() as connection:
            there = connection.scalar(bring)
            if there is None:
                connection.execute(make)
                there = connection.scalar(bring)
        return None if there is None else int(there)

    def _put_part(self, key: _Key, world: int, part: Mapping[str, Any]) -> ReturningInsert[Any]:
        """The part of the round that is open. The round is locked meanwhile, so it is not sealed in between."""
        values = {"boot": self._membership.me.boot, **part}
        columns = {"node": self._membership.me.name, **values}
        is_open = (*key.of(JointRoundRow), JointRoundRow.state == "open", JointRoundRow.world == world)
        usual = self._is_usual(key, part["declaration"])
        found = select(JointRoundRow.id, *_literals(PartRow, columns)).where(*is_open, usual).with_for_update(read=True)
        made = insert(PartRow).from_select(["round_id", *columns], found)
        same = [PartRow.round_id, PartRow.node]
        return made.on_conflict_do_update(index_elements=same, set_=values).returning(PartRow.round_id)

    def _make(self, key: _Key, world: int, declaration: str) -> Insert:
        """An open round, where nobody has made one of this step yet."""
        values = {**key._asdict(), "world": world, "state": "open", "created": utc_now()}
        first = (self._is_usual(key, declaration), ~exists().where(*key.of(JointRoundRow)))
        new = select(key.new_id(), *_literals(JointRoundRow, values), now()).where(*first)
        return insert(JointRoundRow).from_select(["id", *values, "changed"], new).on_conflict_do_nothing()

    def _is_usual(self, key: _Key, declaration: str) -> ColumnElement[bool]:
        """Whether the declaration is there, no newer attempt has begun, and no round was given up that this node has not
        heard of.
        """
        known = exists().where(DeclarationRow.digest == declaration)
        newer = exists().where(RunRow.name == key.run, RunRow.attempt > key.attempt)
        ended, mine = aliased(JointRoundRow), aliased(PartRow)
        heard = exists().where(mine.round_id == ended.id, mine.node == self._membership.me.name, mine.said == b"")
        return known & ~newer & ~exists().where(*key.of(ended), ended.state == "aborted", ~heard)

    def _going(self, session: Session, key: _Key, world: int, packed: bytes) -> JointRoundRow:
        """The round that goes on, shared until the transaction ends; made if there is none. Or the one that has committed
        what this node brings once more.
        """
        of_key = select(JointRoundRow).where(*key.of(JointRoundRow)).order_by(JointRoundRow.id.desc())
        newest = of_key.limit(1).with_for_update(read=True)
        heard = select(PartRow.round_id).where(PartRow.node == self._membership.me.name, PartRow.said == b"")
        ended = session.scalar(of_key.where(JointRoundRow.state == "aborted", JointRoundRow.id.not_in(heard)).limit(1))
        if ended is not None:
            self._hear(session, ended.id)
            problem = ended.problem or {}
            session.commit()
            raise from_problem(problem)
        last = session.scalar(newest)
        if last is not None and (last.state in GOING or self._was_in(session, last, packed)):
            return last
        values = {
            "id": key.new_id(),
            **key._asdict(),
            "world": world,
            "state": "open",
            "created": utc_now(),
            "changed": now(),
        }
        session.execute(insert(JointRoundRow).values(values).on_conflict_do_nothing())
        made = session.scalar(newest)
        if made is None or made.state not in GOING:
            raise RoundAborted(f"step {key.step} was given up on another node at this moment")
        return made

    def _was_in(self, session: Session, last: JointRoundRow, packed: bytes) -> bool:
        part = session.get(PartRow, (last.id, self._membership.me.name))
        if last.state != "committed" or part is None or part.said != packed:
            return False
        return part.boot != self._membership.me.boot  # else this daemon has seen the end of that one: this is another save

    def _hear(self, session: Session, round_id: int) -> None:
        """This node knows how the round ended: what it had brought to it is of no use any more."""
        me = self._membership.me
        empty = {"boot": me.boot, "ranks": [], "said": b""}
        made = insert(PartRow).values({"round_id": round_id, "node": me.name} | empty)
        session.execute(made.on_conflict_do_update(index_elements=[PartRow.round_id, PartRow.node], set_=empty))

    def hear(self, round_id: int) -> None:
        """The ranks of this node have been told how the round was ended: they may try its step again."""
        with self._database.apart() as session:
            if session.scalar(select(JointRoundRow.state).where(JointRoundRow.id == round_id)) == "aborted":
                self._hear(session, round_id)

    def _has_heard(self, session: Session, round_id: int) -> bool:
        part = session.get(PartRow, (round_id, self._membership.me.name))
        return part is not None and part.said == b""

    def seal(self, round_id: int) -> None:
        """If the parts of all ranks are there, no part changes any more, and all stand in one body besides. While another
        node seals, or brings its part, nothing happens.
        """
        with self._database.apart() as session:
            row = session.get(JointRoundRow, round_id, with_for_update={"skip_locked": True})
            if row is None or row.state != "open":
                return
            of_round = select(PartRow, NodeRow.about).outerjoin(NodeRow, NodeRow.name == PartRow.node)
            parts = session.execute(of_round.where(PartRow.round_id == round_id)).all()
            brought = [rank for part, _ in parts for rank in part.ranks]
            if len(brought) != len(set(brought)):
                why = RoundAborted(f"two nodes have brought the same ranks of step {row.step}")
                row.state, row.problem, row.changed = "aborted", why.problem(), now()
                _ring(session)
            elif len(brought) == row.world:
                found = [
                    JoinedPart(
                        part.node,
                        tuple(part.ranks),
                        (about or {}).get("exchange") or "",
                        part.declaration or "",
                        _unpack(part.said),
                    )
                    for part, about in parts
                    if part.ranks
                ]
                self._keep_together(session, {part.declaration for part in found})
                row.state, row.changed, row.joined = "sealed", now(), _pack(joined.encode_parts(found))
                _ring(session)

    def _keep_together(self, session: Session, digests: Collection[str]) -> None:
        """Many declarations are read by all nodes: as one body, which is made once for the nodes of a launch."""
        name = joined.name_of(digests)
        if len(digests) < TOGETHER_MIN or session.get(DeclarationRow, name) is not None:
            return
        rows = session.execute(select(DeclarationRow.digest, DeclarationRow.body).where(DeclarationRow.digest.in_(digests)))
        bodies = [_unpack(body) for _, body in sorted((digest, body) for digest, body in rows)]
        if sum(map(len, bodies)) > TOGETHER_BYTES_MAX:
            return
        values = {"digest": name, "body": _pack(joined.encode_declarations(bodies)), "since": now()}
        session.execute(insert(DeclarationRow).values(values).on_conflict_do_nothing())

    def state(self, round_id: int) -> RoundState:
        """How far the round is. If this node has joined the cluster anew since, its part is the new boot's from now on."""
        me = self._membership.me
        of_round = PartRow.round_id == round_id
        brought = select(func.coalesce(func.sum(_count(PartRow.ranks)), 0)).where(of_round).scalar_subquery()
        boot = select(PartRow.boot).where(of_round, PartRow.node == me.name).scalar_subquery()
        missing = exists().where(of_round, PartRow.receipt.is_(None))
        row = JointRoundRow
        counted = case((row.state == "open", brought), else_=row.world)  # nobody counts what is complete
        wanted = select(row.state, row.problem, row.world, counted, ~missing, boot).where(row.id == round_id)
        with self._database.plain() as connection:
            found = connection.execute(wanted).one_or_none()
            if found is None:
                raise RoundAborted(LOST)
            state, problem, world, ranks, written, known = found
            if known is not None and known != me.boot and state in GOING:
                connection.execute(update(PartRow).where(of_round, PartRow.node == me.name).values(boot=me.boot))
        return RoundState(state, problem, world, int(ranks), bool(written))

    def look(self, round_id: int) -> JointRound:
        """The round with its parts, as they are now."""
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
        with self._database.plain() as connection:
            rows = connection.execute(wanted).all()
        if not rows:
            raise RoundAborted(LOST)
        state, created, world, problem = rows[0][:4]
        parts = tuple(
            JointPart(
                node, tuple(ranks), bool(known) and boot == newest, bool(known), (about or {}).get("exchange") or "", done
            )
            for _, _, _, _, node, ranks, boot, done, newest, known, about in rows
            if ranks
        )
        return JointRound(round_id, state, created, world, parts, problem)

    def sealed(self, round_id: int) -> JointRound:
        """A sealed round with its parts, as they were when it was sealed: nobody's share was written yet."""
        state, created, world, brought = made = self._brought(round_id)
        with self._lock:
            self._sealed[round_id] = made
            while len(self._sealed) > SEALED_KEPT:
                self._sealed.popitem(last=False)
        parts = tuple(JointPart(one.node, one.ranks, True, True, one.url, False) for one in brought)
        return JointRound(round_id, state, created, world, parts, None)

    def parts(self, round_id: int) -> list[tuple[str, bytes, bytes]]:
        """Of each part of a sealed round: its declaration's digest, the declaration, and what its ranks say."""
        with self._lock:  # taken once: a catalog that was restored may give the number to another round
            seen = self._sealed.pop(round_id, None)
        brought = (seen or self._brought(round_id)).parts
        wanted = {one.declaration for one in brought}
        with self._lock:
            known = {digest: self._declarations[digest] for digest in wanted & self._declarations.keys()}
        if wanted - known.keys():
            known |= self._read_declarations(wanted, wanted - known.keys())
        with self._lock:
            for digest in wanted:  # those of this round are the newest
                self._declarations[digest] = known[digest]
                self._declarations.move_to_end(digest)
            while len(self._declarations) > max(DECLARATIONS_KEPT, len(wanted)):
                self._declarations.popitem(last=False)
        return [(one.declaration, known[one.declaration], one.said) for one in brought]

    def _brought(self, round_id: int) -> _Brought:
        row = JointRoundRow
        wanted = select(row.state, row.created, row.world, row.joined).where(row.id == round_id)
        with self._database.plain() as connection:
            found = connection.execute(wanted).one_or_none()
        if found is None:
            raise RoundAborted(LOST)
        if found.joined is None:
            raise RoundAborted(f"the round is {found.state}: its parts are not those of a sealed one")
        return _Brought(found.state, found.created, found.world, joined.decode_parts(_unpack(found.joined)))

    def _read_declarations(self, wanted: Collection[str], unknown: Collection[str]) -> dict[str, bytes]:
        """Together, where they stand so and many are unknown; else, and what is missing there, each alone."""
        found: dict[str, bytes] = {}
        with self._database.plain() as connection:
            if len(unknown) >= TOGETHER_MIN:
                together = select(DeclarationRow.body).where(DeclarationRow.digest == joined.name_of(wanted))
                body = connection.scalar(together)
                found |= {} if body is None else joined.decode_declarations(_unpack(body))
            left = set(unknown) - found.keys()
            alone = select(DeclarationRow.digest, DeclarationRow.body).where(DeclarationRow.digest.in_(left))
            for digest, body in connection.execute(alone) if left else ():
                found[digest] = _unpack(body)
                if hashlib.sha256(found[digest]).hexdigest() != digest:
                    raise InvalidRequest("the catalog holds another declaration than its digest says")
        if set(unknown) - found.keys():
            raise RoundAborted(LOST)
        return found

    def deliver(self, round_id: int, receipt: bytes) -> None:
        """What this node has written and synced. The first receipt of a node stands. Who delivers then tries to `claim`: of
        those that come last, one finds that nobody is missing.
        """
        mine = (PartRow.round_id == round_id, PartRow.node == self._membership.me.name, PartRow.receipt.is_(None))
        going = exists().where(JointRoundRow.id == round_id, JointRoundRow.state.in_(GOING))
        with self._database.plain() as connection:
            connection.execute(update(PartRow).where(*mine, going).values(receipt=zstandard.compress(receipt)))

    def claim(self, round_id: int) -> bool:
        """Whether this node is the one that commits now: all receipts are there, and nobody else's claim lasts. It ends with
        its time, or with the claimer's lease.
        """
        me = self._membership.me
        missing = exists().where(PartRow.round_id == round_id, PartRow.receipt.is_(None))
        there = exists().where(NodeRow.name == JointRoundRow.committer, NodeRow.until > now())
        over = (JointRoundRow.state == "committing") & (
            (JointRoundRow.claimed_until < now()) | (JointRoundRow.committer == me.name) | ~there
        )
        free = (JointRoundRow.id == round_id, (JointRoundRow.state == "sealed") | over, ~missing)
        values = {"state": "committing", "committer": me.name, "claimed_until": later(CLAIM_S), "changed": now()}
        with self._database.plain() as connection:
            claimed = update(JointRoundRow).where(*free).values(values).returning(JointRoundRow.id)
            return connection.scalar(claimed) is not None

    def settle(self, round_id: int, lineage: Lineage) -> Lineage:
        """Where the checkpoint of the round comes from: what the first node that commits it has found, for all that do.

        Two nodes may see other checkpoints in the directory, and one of them stand still in the middle of its commit. If
        each wrote a manifest of its own, the manifest of one could stand beside the COMMIT of the other (I12).
        """
        mine = literal([lineage.restored, lineage.turn, [list(one) for one in lineage.rewinds]], JsonText())
        first = update(JointRoundRow).where(JointRoundRow.id == round_id)
        first = first.values(lineage=func.coalesce(JointRoundRow.lineage, mine))
        with self._database.plain() as connection:
            settled = connection.scalar(first.returning(JointRoundRow.lineage))
        if settled is None:
            raise RoundAborted(LOST)
        restored, turn, rewinds = settled
        return Lineage(restored, turn, tuple(Rewind(*one) for one in rewinds))

    def receipts(self, round_id: int) -> list[bytes]:
        """What all nodes have written."""
        found = select(PartRow.receipt).where(PartRow.round_id == round_id).order_by(PartRow.node)
        with self._database.plain() as connection:
            return [_unpack(receipt) for receipt in connection.scalars(found) if receipt is not None]

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
            if session.scalar(select(JointRoundRow.state).where(JointRoundRow.id == round_id)) == "aborted":
                self._hear(session, round_id)
            _ring(session)
            return ended is not None

    def refuse(self, run: str, step: int, attempt: int, world: int, problem: Mapping[str, Any]) -> None:
        """This node will not bring its part of a step: the round ends for all, also for those that come later."""
        key = _Key(run, step, attempt)
        ended = {"state": "aborted", "problem": dict(problem), "changed": now()}
        open_one = (*key.of(JointRoundRow), JointRoundRow.state.in_(GOING[:-1]))
        end = update(JointRoundRow).where(*open_one).values(ended).returning(JointRoundRow.id)
        newest = select(JointRoundRow).where(*key.of(JointRoundRow)).order_by(JointRoundRow.id.desc()).limit(1)
        with self._database.apart() as session:
            key.lock(session)
            found = session.scalar(end)
            last = session.scalar(newest)
            if found is None and (last is None or last.state not in (*GOING, "committed")):
                if last is not None and not self._has_heard(session, last.id):
                    self._hear(session, last.id)  # that one was another node's, of the same step
                    return
                values = {"id": key.new_id(), **key._asdict(), "world": world, "created": utc_now(), **ended}
                found = session.scalar(insert(JointRoundRow).values(values).returning(JointRoundRow.id))
            if found is not None:
                self._hear(session, found)
                _ring(session)
        with self._database.apart() as session:  # one that was made meanwhile; who makes one from now on sees the other
            found = session.scalar(end)
            if found is not None:
                self._hear(session, found)
                _ring(session)

    def is_writing(self, run: str) -> bool:
        """Whether a round of this run is sealed, and neither committed nor aborted, and some node of it is there."""
        going = (JointRoundRow.run == run, JointRoundRow.state.in_(GOING[1:]), _attended())
        with self._database.plain() as connection:
            return connection.scalar(select(JointRoundRow.id).where(*going).limit(1)) is not None

    def places(self) -> list[Place]:
        """Where rounds that have not ended stage what they write."""
        row = JointRoundRow
        wanted = select(row.run, row.step, row.attempt, row.id).where(row.state.in_(GOING))
        with self._database.plain() as connection:
            return [Place(*found) for found in connection.execute(wanted)]

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


def _literals(row: type[CatalogTable], values: Mapping[str, Any]) -> list[ColumnElement[Any]]:
    """Values to select, as the columns of these names have them."""
    return [literal(value, row.__table__.c[name].type) for name, value in values.items()]


def _count(numbers: ColumnElement[Any] | Any) -> ColumnElement[int]:
    return func.json_array_length(cast(type_coerce(numbers, Text), JSON))


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


def _pack(body: bytes) -> bytes:
    """What nodes say is alike, however far apart it stands."""
    ways = zstandard.ZstdCompressionParameters.from_level(3, window_log=WINDOW_LOG, enable_ldm=True, write_checksum=True)
    return zstandard.ZstdCompressor(compression_params=ways).compress(body)


def _unpack(packed: bytes) -> bytes:
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=2**WINDOW_LOG)
        return reader.decompress(packed, max_output_size=BODY_BYTES_MAX)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"what the catalog holds of a save cannot be read: {error}") from error

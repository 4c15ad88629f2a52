"""The meeting point of nodes that save one checkpoint: their parts, their receipts, and the claim of the commit.

A round is `open` until the parts of all ranks are there. Then it is `sealed`: every node reads the same parts, plans the
same files, and writes its share of them. A node that finds all receipts may claim the commit. A claim ends by the database's
clock, and another node commits the same bytes. Nothing here publishes: storage decides (I13).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import zstandard
from sqlalchemy import JSON, ColumnElement, Text, case, cast, exists, func, literal, select, type_coerce, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from holdfast_formats.errors import RoundAborted
from holdfast_formats.lineage import Lineage, Rewind
from holdfast_formats.staging.joined import JoinedPart
from holdfast_formats.staging.joint import JointPart, JointRound, RoundState, Votes
from holdfast_service.control.database.cluster_schema import JointRoundRow, NodeRow, PartRow, VoteRow
from holdfast_service.control.database.columns import JsonText
from holdfast_service.wings.cluster import handovers
from holdfast_service.wings.cluster.handovers import Handovers
from holdfast_service.wings.cluster.membership import Membership, later, now, now_text
from holdfast_service.wings.cluster.notify_listener import CHANNEL
from holdfast_service.wings.cluster.round_bodies import LOST, RoundBodies, unpack
from holdfast_service.wings.cluster.round_parts import GOING, RoundParts, StepKey

CLAIM_S = 60.0


class Rendezvous:
    """Every call is one transaction, or a few; `CatalogUnavailable` if the database does not answer. Thread-safe."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._database = membership, membership.database
        self._arrivals, self._bodies = RoundParts(membership), RoundBodies(membership.database)
        self._handovers = Handovers(membership)

    def arrive(  # noqa: PLR0913 - each is one thing
        self, run: str, step: int, attempt: int, world: int, ranks: Collection[int], declaration: bytes, said: bytes
    ) -> int:
        """Add this node's part; returns the round's id. More ranks may follow until the round is sealed.

        `StaleAttempt` if a newer attempt has begun (I6). The error that ended a round of this step and attempt is raised
        once for each node that does not know it: it had no part in it, or was restarted since.
        """
        return self._arrivals.bring(StepKey(run, step, attempt), world, ranks, declaration, said)

    def receive_part(self, round_id: int) -> None:
        """The end of the round was reported to this node's ranks: they may try its step again."""
        with self._database.apart() as session:
            if session.scalar(select(JointRoundRow.state).where(JointRoundRow.id == round_id)) == "aborted":
                self._arrivals.receive(session, round_id)

    def seal(self, round_id: int) -> None:
        """If the parts of all ranks are there, make them final and also store them as one body. Does nothing while another
        node seals or adds its part.
        """
        with self._database.apart() as session:
            row = session.get(JointRoundRow, round_id, with_for_update={"skip_locked": True})
            if row is None or row.state != "open":
                return
            of_round = select(PartRow, NodeRow.about).outerjoin(NodeRow, NodeRow.name == PartRow.node)
            parts = session.execute(of_round.where(PartRow.round_id == round_id)).all()
            brought = [rank for part, _ in parts for rank in part.ranks]
            if len(brought) != len(set(brought)):
                why = RoundAborted(f"two nodes contributed the same ranks of step {row.step}")
                _move(session, round_id, state="aborted", problem=why.problem())
            elif len(brought) == row.world:
                found = [
                    JoinedPart(
                        part.node,
                        tuple(part.ranks),
                        (about or {}).get("exchange") or "",
                        part.declaration or "",
                        unpack(part.said),
                    )
                    for part, about in parts
                    if part.ranks
                ]
                _move(session, round_id, state="sealed", joined=self._bodies.join(session, found))

    def state(self, round_id: int) -> RoundState:
        """The progress of the round. If this node has rejoined the cluster since, its part becomes the new boot's."""
        me = self._membership.me
        of_round = PartRow.round_id == round_id
        brought = select(func.coalesce(func.sum(_count(PartRow.ranks)), 0)).where(of_round).scalar_subquery()
        mine = (of_round, PartRow.node == me.name)
        boot = select(PartRow.boot).where(*mine).scalar_subquery()
        delivered = exists().where(*mine, PartRow.receipt.is_not(None))
        missing = exists().where(of_round, PartRow.receipt.is_(None))
        row = JointRoundRow
        counted = case((row.state == "open", brought), else_=row.world)  # no need to count a complete round
        columns = (row.state, row.problem, row.world, counted, ~missing, delivered)
        wanted = select(*columns, boot, *handovers.columns()).where(row.id == round_id)
        with self._database.plain() as connection:
            found_row = connection.execute(wanted).one_or_none()
            if found_row is None:
                raise RoundAborted(LOST)
            state, problem, world, ranks, written, done, known, *handed = found_row
            if known is not None and known != me.boot and state in GOING:
                connection.execute(update(PartRow).where(*mine).values(boot=me.boot))
        return RoundState(state, problem, world, int(ranks), bool(written), bool(done), handovers.handover(*handed))

    def has_lost(self, round_id: int) -> bool:
        """Whether the catalog has lost the round, so that no node can commit it."""
        try:
            self.rounds(round_id)
        except RoundAborted:
            return True
        return False

    def rounds(self, round_id: int) -> JointRound:
        """The round with its parts, as they are now."""
        live = func.coalesce(NodeRow.until > now(), False)
        columns = (JointRoundRow.state, JointRoundRow.created, JointRoundRow.world, JointRoundRow.problem)
        of_part = (PartRow.node, PartRow.ranks, PartRow.boot, PartRow.receipt.is_not(None))
        wanted = (
            select(*columns, *of_part, NodeRow.boot, live, NodeRow.about, *handovers.columns())
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
        handed = handovers.handover(*rows[0][11:])
        parts = tuple(
            JointPart(
                node, tuple(ranks), bool(known) and boot == newest, bool(known), (about or {}).get("exchange") or "", done
            )
            for _, _, _, _, node, ranks, boot, done, newest, known, about, *_ in rows
            if ranks
        )
        return JointRound(round_id, state, created, world, parts, problem, handed)

    def sealed(self, round_id: int) -> JointRound:
        """A sealed round with its parts, as of sealing: before any share was written."""
        return self._bodies.sealed(round_id)

    def parts(self, round_id: int) -> list[tuple[str, bytes, bytes]]:
        """For each part of a sealed round: its declaration's digest, the declaration, and its ranks' other values."""
        return self._bodies.parts(round_id)

    def hand_over(self, round_id: int, problem: Mapping[str, Any]) -> bool:
        """Give up this node's share, of which it writes nothing any more, so that another node may write it. False without
        another node, or if a share was handed over before.
        """
        return self._handovers.ask(round_id, problem)

    def help(self, round_id: int) -> bool:
        """Claim, for a while, to write the share that was handed over; whether this node has the claim."""
        return self._handovers.take(round_id)

    def deliver(self, round_id: int, receipt: bytes, instead_of: str | None = None) -> None:
        """Store the receipt of what this node has written and synced, for its share or `instead_of` the node that it helps.
        The first receipt of a share counts. The caller then tries to `claim`: of concurrent last receipts, one finds all
        present.
        """
        if instead_of is not None:
            self._handovers.deliver(round_id, instead_of, receipt)
            return
        me = self._membership.me.name
        mine = (PartRow.round_id == round_id, PartRow.node == me, PartRow.receipt.is_(None))
        its_own = func.coalesce(JointRoundRow.unable, "") != me
        going = exists().where(JointRoundRow.id == round_id, JointRoundRow.state.in_(GOING), its_own)
        with self._database.plain() as connection:
            connection.execute(update(PartRow).where(*mine, going).values(receipt=zstandard.compress(receipt)))

    def claim(self, round_id: int) -> bool:
        """Whether this node is the one that commits now: all receipts are there, and no other node's claim is in force. A
        claim ends with its time, or with its node's lease.
        """
        me = self._membership.me
        missing = exists().where(PartRow.round_id == round_id, PartRow.receipt.is_(None))
        committing = exists().where(NodeRow.name == JointRoundRow.committer, NodeRow.until > now())
        over = (JointRoundRow.state == "committing") & (
            (JointRoundRow.claimed_until < now()) | (JointRoundRow.committer == me.name) | ~committing
        )
        free = (JointRoundRow.id == round_id, (JointRoundRow.state == "sealed") | over, ~missing)
        values = {"state": "committing", "committer": me.name, "claimed_until": later(CLAIM_S), "changed": now()}
        with self._database.plain() as connection:
            claimed = update(JointRoundRow).where(*free).values(values).returning(JointRoundRow.id)
            return connection.scalar(claimed) is not None

    def settle(self, round_id: int, lineage: Lineage) -> Lineage:
        """The lineage of the round's checkpoint: that of the first node that commits it, for all.

        Two nodes may see different checkpoints in the directory, and one of them may be suspended in the middle of its
        commit. With manifests of their own, the manifest of one could end up beside the COMMIT of the other (I12).
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
        query = select(PartRow.receipt).where(PartRow.round_id == round_id).order_by(PartRow.node)
        with self._database.plain() as connection:
            return [unpack(receipt) for receipt in connection.scalars(query) if receipt is not None]

    def committed(self, round_id: int) -> None:
        """Record the commit."""
        going = (JointRoundRow.id == round_id, JointRoundRow.state.in_(GOING))
        with self._database.apart() as session:
            session.execute(update(JointRoundRow).where(*going).values(state="committed", changed=now()))
            _ring(session)

    def abort(self, round_id: int, problem: Mapping[str, Any], claimed: bool = False) -> bool:
        """End the round for all nodes; False if it is being committed, or has ended. `claimed`: by the committing node."""
        mine = (JointRoundRow.state == GOING[-1]) & (JointRoundRow.committer == self._membership.me.name)
        may = JointRoundRow.state.in_(GOING[:-1])
        going = (JointRoundRow.id == round_id, may | mine if claimed else may)
        values = {"state": "aborted", "problem": dict(problem), "changed": now()}
        with self._database.apart() as session:
            ended = session.scalar(update(JointRoundRow).where(*going).values(values).returning(JointRoundRow.id))
            if session.scalar(select(JointRoundRow.state).where(JointRoundRow.id == round_id)) == "aborted":
                self._arrivals.receive(session, round_id)
            _ring(session)
            return ended is not None

    def refuse(self, run: str, step: int, attempt: int, world: int, problem: Mapping[str, Any]) -> None:
        """This node will not bring its part of a step: the round ends for all nodes, also for later ones."""
        key = StepKey(run, step, attempt)
        ended = {"state": "aborted", "problem": dict(problem), "changed": now()}
        open_one = (*key.of(JointRoundRow), JointRoundRow.state.in_(GOING[:-1]))
        end = update(JointRoundRow).where(*open_one).values(ended).returning(JointRoundRow.id)
        newest = select(JointRoundRow).where(*key.of(JointRoundRow)).order_by(JointRoundRow.id.desc()).limit(1)
        with self._database.apart() as session:
            key.lock(session)
            round_id = session.scalar(end)
            last = session.scalar(newest)
            if round_id is None and (last is None or last.state not in (*GOING, "committed")):
                if last is not None and not self._arrivals.has_heard(session, last.id):
                    self._arrivals.receive(session, last.id)  # that one was another node's, of the same step
                    return
                values = {"id": key.new_id(), **key._asdict(), "world": world, "created": now_text(), **ended}
                round_id = session.scalar(insert(JointRoundRow).values(values).returning(JointRoundRow.id))
            if round_id is not None:
                self._arrivals.receive(session, round_id)
                _ring(session)
        with self._database.apart() as session:  # a concurrent round; one created from now on sees this end
            round_id = session.scalar(end)
            if round_id is not None:
                self._arrivals.receive(session, round_id)
                _ring(session)

    def vote(
        self, run: str, attempt: int, turn: int, ranks: Collection[int], problem: Mapping[str, Any] | None = None
    ) -> Votes:
        """Store which ranks' restores have ended here, and return the votes of all nodes."""
        values = {"ranks": sorted(ranks), "problem": None if problem is None else dict(problem)}
        key = {"run": run, "attempt": attempt, "turn": turn, "node": self._membership.me.name}
        same = [VoteRow.run, VoteRow.attempt, VoteRow.turn, VoteRow.node]
        statement = insert(VoteRow).values(key | values)
        kept = (
            statement.excluded.problem if problem is not None else func.coalesce(VoteRow.problem, statement.excluded.problem)
        )
        with self._database.apart() as session:
            session.execute(
                statement.on_conflict_do_update(
                    index_elements=same, set_={"ranks": statement.excluded.ranks, "problem": kept}
                )
            )
            of_turn = (VoteRow.run == run, VoteRow.attempt == attempt, VoteRow.turn == turn)
            rows = session.scalars(select(VoteRow).where(*of_turn).order_by(VoteRow.node)).all()
            said = frozenset(rank for row in rows for rank in row.ranks)
            return Votes(said, next((row.problem for row in rows if row.problem is not None), None))


def _count(numbers: ColumnElement[Any] | Any) -> ColumnElement[int]:
    return func.json_array_length(cast(type_coerce(numbers, Text), JSON))


def _move(session: Session, round_id: int, **values: Any) -> None:
    """Change the state of a round that this transaction has locked."""
    session.execute(update(JointRoundRow).where(JointRoundRow.id == round_id).values(changed=now(), **values))
    _ring(session)


def _ring(session: Session) -> None:
    """Notify all nodes once the transaction has ended."""
    session.execute(select(func.pg_notify(CHANNEL, "")))

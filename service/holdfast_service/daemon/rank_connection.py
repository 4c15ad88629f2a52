"""What a rank at the node's socket asks for, answered in its own thread, request by request."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from holdfast_formats.errors import CheckpointError, DeadlineExceeded, InvalidRequest, from_problem
from holdfast_formats.memory_bounds import Bound
from holdfast_formats.staging import average, wire
from holdfast_formats.staging.arena import geometry
from holdfast_formats.staging.messages import restate
from holdfast_service.control.control import Control
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.callers import Callers
from holdfast_service.daemon.arena.segment import LEASE_DEADLINE_S, ArenaSegment
from holdfast_service.daemon.arena.shares import NOBODY, ShareHolder, ShareRequester
from holdfast_service.daemon.averaging.averages import Averages
from holdfast_service.daemon.own_jobs import OwnJobs, SentProgress, check_own, no_jobs
from holdfast_service.daemon.rank_socket import RankSocket, Unsent
from holdfast_service.daemon.saving.adoption import Adoption
from holdfast_service.daemon.saving.other_nodes import NO_OTHER_NODES, Borrower, RemoteSlots
from holdfast_service.daemon.saving.rounds import Participant
from holdfast_service.daemon.saving.run_busy import ConnectedRank, check, let_in
from holdfast_service.daemon.saving.saver import Saver
from holdfast_service.daemon.serving import Serving

log = logging.getLogger(__name__)

REFUSED_WAIT_S = 5.0  # for the first request of a refused peer


class DataPlane(NamedTuple):
    """The parts of a node that handle the bytes of its ranks."""

    arena: Arena
    saver: Saver
    control: Control
    adoption: Adoption
    averages: Averages
    peers: RemoteSlots = NO_OTHER_NODES  # what other nodes hold
    own_jobs: OwnJobs = no_jobs


class RankConnection:
    """One rank: its thread reads requests and replies to each. The thread ends with the connection."""

    def __init__(
        self,
        socket: RankSocket,
        plane: DataPlane,
        serving: Serving,
        callers: Callers,
        ended: Callable[[RankConnection], None],
    ) -> None:
        self.socket = socket
        self._plane, self._serving, self._callers, self._when_ended = plane, serving, callers, ended
        self._who: Participant | None = None
        self._asker = NOBODY
        self._borrower = Borrower(plane.peers)
        self._segments: list[ArenaSegment] = []
        self._refused: CheckpointError | None = None
        self._withdrawn: set[int] = set()  # steps of leases that were withdrawn before they were read
        self.thread = threading.Thread(target=self._run, name="holdfast-rank", daemon=True)
        self._answers: dict[type[wire.Message], Callable[[Any], wire.Reply | None]] = {
            wire.Hello: self._hello,
            wire.Reserve: self._reserve,
            wire.Attach: self._attach,
            wire.Lease: self._lease,
            wire.Foresee: self._foresee,
            wire.Withdraw: lambda request: self._withdrawn.discard(request.step),
            wire.Seal: self._seal,
            wire.Abandon: self._abandon,
            wire.Choose: self._choose,
            wire.Ended: self._ended,
            wire.Held: self._held,
            wire.HeldElsewhere: self._elsewhere,
            wire.Fetch: lambda request: self._borrower.fetch(self._known().run, request),
            wire.WatchLinks: self._watch_links,
            wire.ReserveAverage: self._reserve_average,
            wire.AttachAverage: self._attach_average,
            wire.RingAverage: lambda request: plane.averages.wake(self._known().owner),
            wire.Measured: self._measured,
            wire.Waits: lambda request: plane.saver.waits(self._known(), request.step),
            wire.Stopping: self._stopping,
            wire.CopyOf: self._copy_of,
            wire.DoJob: self._do_job,
            wire.Ping: lambda request: wire.Done(reply_to=request.id),
            wire.Farewell: self._farewell,
        }

    def _run(self) -> None:
        try:
            self._meet()
            for requests in self.socket.requests():
                self._withdrawn = {request.step for request in requests if isinstance(request, wire.Withdraw)}
                for request in requests:
                    self._answer(request)
                    if self._refused is not None:
                        raise self._refused
        except CheckpointError as error:
            log.warning("closing a connection: %s", error.detail)
        except OSError as error:
            log.info("a rank's connection broke: %s", error)
        finally:
            if self._who is not None:
                self._plane.saver.gone(self._who)
                self._plane.averages.leave(self._who.owner, self, self._who.parted)
            self._borrower.release()
            self._when_ended(self)
            self.socket.close()
            for segment in self._segments:
                if segment.user is self:
                    self._plane.arena.drop(segment)
            self._segments = []

    def _meet(self) -> None:
        """Authenticate the peer. A refused one gets the error as the reply to its first request, and is disconnected."""
        try:
            caller = self.socket.caller()
            self._callers.check(caller)
            self._asker = ShareRequester(caller.tenant, not caller.tenant)
            self._caller = caller
        except CheckpointError as error:
            self._refused = error
            self.socket.limit_wait(REFUSED_WAIT_S)

    def _answer(self, request: wire.Request) -> None:
        try:
            if self._refused is not None:
                raise self._refused
            reply = self._answers[type(request)](request)
        except CheckpointError as error:
            reply = wire.Failed(reply_to=request.id, problem=error.problem())
        except Unsent:
            raise
        except Exception:
            log.exception("a request failed: %s", type(request).__name__)
            opaque = CheckpointError("unexpected failure in the daemon", hint="see the daemon's log")
            reply = wire.Failed(reply_to=request.id, problem=opaque.problem())
        if reply is not None:
            self.socket.send(reply)

    def _known(self) -> Participant:
        if self._who is None:
            raise InvalidRequest("the first message of a connection must be hello")
        return self._who

    def _hello(self, request: wire.Hello) -> wire.Reply:
        check(request)
        plane = self._plane
        self._serving.check(request.root)

        def join(attempt: int) -> Participant:
            who = self._who = ConnectedRank(request, attempt, self.socket.notify, self.socket.has_lost_its_rank)
            plane.saver.join(who)
            return who

        return wire.Welcome(
            reply_to=request.id,
            attempt=let_in(plane.saver, plane.control, request, join, self._asker).attempt,
            **self._serving._asdict(),
            notices=plane.control.wishes.denied(request.run, request.keep_last, self._asker.owner),
        )

    def _reserve(self, request: wire.Reserve) -> None:
        who = self._known()
        asked = geometry(request.slots, request.data_bytes, request.table_bytes)
        arena, holds = self._plane.arena, self._plane.saver.holds
        label, holder = f"{who.run}-rank{who.rank}", self._holder(who, request.bounds)
        self._part_with_segments()  # first, so that there is room where memory has none for both
        with arena.leaving(request.average_bytes, who.owner, holder, request.averages):
            segment = arena.take_over(asked, who.owner) or arena.reserve(asked, label, who.owner, holder, not holder.tenant)
        self._use(segment)
        holds.succeeded(who.owner)
        reply = wire.Segment(
            reply_to=request.id,
            slots=segment.geometry.slots,
            data_bytes=segment.geometry.data_bytes,
            table_bytes_max=segment.geometry.table_bytes_max,
            spilled=segment.spilled,
            notice=segment.notice,
        )
        self.socket.send(reply, (segment.fd,))

    def _holder(self, who: Participant, bounds: Sequence[Bound]) -> ShareHolder:
        """The holder of this rank's memory share, and what its own limits leave for it."""
        return ShareHolder(who.run, self._asker.tenant, self._plane.arena.limits(bounds, f"rank {who.rank}'s"))

    def _attach(self, request: wire.Attach) -> wire.Reply:
        who, plane = self._known(), self._plane
        with self.socket.received_fd("a segment") as fd:
            segment, taken = plane.arena.attach(fd, who.owner, self._asker.tenant)
        self._use(segment)
        refused = plane.adoption.take_up(segment, taken, who).refused
        turns = dict.fromkeys(request.open, 0) | dict(zip(request.open, request.turns, strict=False))
        plane.saver.take_over(who, turns, refused)
        plane.adoption.back(who, segment)
        return wire.Done(reply_to=request.id)

    def _use(self, segment: ArenaSegment) -> None:
        segment.used_by(self, self.socket.process())
        self._part_with_segments(but=segment)
        self._segments = [segment]

    def _part_with_segments(self, but: ArenaSegment | None = None) -> None:
        """Free outgrown segments, as soon as their saves are written."""
        outgrown, self._segments = self._segments, []
        for segment in outgrown:
            if segment is not but:
                self._plane.saver.holds.end(self._known().run)  # memory must not double
                self._plane.arena.drop(segment, outgrown=True)

    def _lease(self, request: wire.Lease) -> wire.Reply:
        who = self._known()
        if not self._segments:
            raise InvalidRequest("a segment must be reserved before a slot is leased")
        if request.step in self._withdrawn:
            late = DeadlineExceeded(
                f"rank {who.rank} has waited too long for its daemon, and saves no part of {request.step}"
            )
            self._plane.saver.give_up(who, request.step, late)
            raise late
        self._count(who, request.bounds)
        slot = self._plane.saver.lease(who, self._segments[-1], request, request.wait_s)
        return wire.Granted(reply_to=request.id, slot=slot, deadline_s=LEASE_DEADLINE_S)

    def _foresee(self, request: wire.Foresee) -> wire.Reply:
        who = self._known()
        if not self._segments:
            raise InvalidRequest("a segment must be reserved before one of its slots is needed")
        self._count(who, request.bounds)
        return wire.Foreseen(reply_to=request.id, slot=self._segments[-1].foresee())

    def _count(self, who: Participant, bounds: Sequence[Bound]) -> None:
        """Note what the rank's own limits are now, if it says so."""
        if bounds:
            self._segments[-1].count_for(self._holder(who, bounds))

    def _seal(self, request: wire.Seal) -> wire.Reply:
        try:
            self._plane.saver.seal(self._known(), request.slot, request.step, request.table_digest, request.turn)
        except CheckpointError:
            for segment in self._segments:
                segment.disown(request.slot)
            raise
        return wire.Sealed(reply_to=request.id)

    def _abandon(self, request: wire.Abandon) -> wire.Reply:
        self._plane.saver.give_up(self._known(), request.step, from_problem(request.problem))
        return wire.Done(reply_to=request.id)

    def _choose(self, request: wire.Choose) -> wire.Reply:
        who = self._known()
        self._plane.saver.settle(who.run, request.wait_s)
        answer = self._plane.saver.restores.choose(who, request.turn, request)
        return restate(answer, wire.Chosen, reply_to=request.id)

    def _ended(self, request: wire.Ended) -> wire.Reply:
        verdict = self._plane.saver.restores.judge(self._known(), request.turn, request, request.wait_s)
        self._borrower.release()  # not before: other ranks of this node may want the same
        return restate(verdict, wire.Judged, reply_to=request.id)

    def _held(self, request: wire.Held) -> None:
        self._lend(request, *self._plane.saver.holds.lend(self._known().run, request.step))

    def _elsewhere(self, request: wire.HeldElsewhere) -> None:
        slots = self._borrower.slots(self._known().run, request)
        self._lend(request, tuple(one.part for one in slots), tuple(os.dup(one.fd) for one in slots))

    def _reserve_average(self, request: wire.ReserveAverage) -> None:
        who = self._known()
        room = average.geometry(request.data_bytes, request.table_bytes)
        holder = self._holder(who, request.bounds)
        segment = self._plane.averages.reserve(who.owner, room, holder, self)
        sizes = segment.geometry
        reply = wire.Segment(
            reply_to=request.id, slots=1, data_bytes=sizes.data_bytes, table_bytes_max=sizes.table_bytes_max
        )
        self.socket.send(reply, (segment.fd,))

    def _attach_average(self, request: wire.AttachAverage) -> wire.Reply:
        with self.socket.received_fd("an average") as fd:
            self._plane.averages.attach(fd, self._known().owner, self, self._asker.tenant)
        return wire.Done(reply_to=request.id)

    def _lend(self, request: wire.Request, parts: tuple[wire.HeldPart, ...], fds: tuple[int, ...]) -> None:
        try:
            self.socket.send(wire.HeldSlots(reply_to=request.id, parts=parts), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _watch_links(self, request: wire.WatchLinks) -> wire.Reply:
        self._plane.control.rotation.watch_links(self._known().run, request.directory)
        return wire.Done(reply_to=request.id)

    def _stopping(self, request: wire.Stopping) -> wire.Reply:
        return restate(self._plane.saver.stops.report(self._known(), request), wire.StopAt, reply_to=request.id)

    def _copy_of(self, request: wire.CopyOf) -> wire.Reply:
        found = self._plane.control.awaited_copies.of(self._known().run, request.step, request.tier)
        return restate(found, wire.CopyFound, reply_to=request.id)

    def _do_job(self, request: wire.DoJob) -> wire.Reply:
        self._serving.check(request.root)
        check_own(self._caller, self.socket.peer)
        result = self._plane.own_jobs(request, SentProgress(self.socket.send, self.socket.has_lost_its_rank))
        return wire.JobDone(reply_to=request.id, result=result)

    def _measured(self, request: wire.Measured) -> None:
        self._plane.saver.history.stalled(self._known(), request.step, request.stall_s)

    def _farewell(self, request: wire.Farewell) -> None:
        self._known().part()
        self._plane.saver.holds.end(self._known().run)

"""The node's unix socket: one conversation a rank, in a thread of its own."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from holdfast_formats.errors import (
    CheckpointError,
    InvalidRequest,
    LimitExceeded,
    from_problem,
)
from holdfast_formats.staging import wire
from holdfast_formats.staging.arena import geometry
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.callers import Caller, Callers, listen
from holdfast_service.daemon.arena.peer import PeerProcess, hung_up
from holdfast_service.daemon.arena.segment import LEASE_DEADLINE_S, ArenaSegment
from holdfast_service.daemon.arena.shares import NOBODY, Asker, ShareHolder
from holdfast_service.daemon.saving.adoption import Adoption
from holdfast_service.daemon.saving.lives import RunLives
from holdfast_service.daemon.saving.rounds import Participant
from holdfast_service.daemon.saving.run_busy import NearParticipant, let_in
from holdfast_service.daemon.saving.saver import Saver
from holdfast_service.daemon.shared_reads.loader import Key, Loader, Wish
from holdfast_service.daemon.shared_reads.sealed_memory import read_listing

from .ports import Decisions
from .serving import Serving

log = logging.getLogger(__name__)

RECEIVE_BYTES = 65_536
CONVERSATIONS_MAX = 1024
REAP_INTERVAL_S = 1.0
ACCEPT_RETRY_S = 0.5
FDS_MAX = 16
REFUSED_WAIT_S = 5.0  # for the first word of somebody who may not speak
ONLY_US = Callers()


class DataPlane(NamedTuple):
    """What a node does with the bytes of its ranks."""

    arena: Arena
    saver: Saver
    decisions: Decisions
    adoption: Adoption
    loader: Loader


class Daemon:
    """The data plane of a node: arena, saver, loader, and the socket at which ranks find them."""

    def __init__(
        self,
        path: Path,
        serving: Serving,
        parts: DataPlane,
        callers: Callers = ONLY_US,
    ) -> None:
        self.path, self.serving, self.callers = path, serving, callers
        self.arena, self.saver, self.decisions, self.adoption, self.loader = parts
        self.lives = RunLives(self.saver, self.decisions)
        self._lock = threading.Lock()
        self._conversations: set[_Conversation] = set()
        self._closing = threading.Event()
        self._listener = listen(path, callers)
        self._threads = [
            threading.Thread(target=self._accept_loop, name="holdfast-accept", daemon=True),
            threading.Thread(target=self._reap_loop, name="holdfast-reaper", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def ranks(self) -> int:
        with self._lock:
            return len(self._conversations)

    @property
    def busy(self) -> bool:
        """Whether anybody is connected or anything is still to be saved or verified."""
        return self.ranks > 0 or self.saver.busy

    def close(self) -> None:
        """Stop listening, save what is complete, and part from the ranks."""
        self._closing.set()
        self._threads[1].join()
        self.lives.look()  # before we hang up: who is here now may go on with the next daemon
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # whoever waits for a rank there waits no longer
        self._listener.close()
        self.path.unlink(missing_ok=True)
        self.loader.close()
        self.adoption.close()
        self.saver.close()
        with self._lock:
            conversations = list(self._conversations)
        for conversation in conversations:
            conversation.hang_up()
        for conversation in conversations:
            conversation.thread.join(timeout=5)
        for thread in self._threads:
            thread.join()

    def forget(self, conversation: _Conversation) -> None:
        with self._lock:
            self._conversations.discard(conversation)

    def _accept_loop(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closing.is_set():
                    return
                # Most likely no descriptor is left. Who wants to connect stays in the kernel's queue meanwhile.
                log.error("cannot accept a rank: %s; raise the limit of open files if it is that", error)
                self._closing.wait(ACCEPT_RETRY_S)
                continue
            with self._lock:
                if len(self._conversations) >= CONVERSATIONS_MAX:
                    connection.close()
                    continue
                conversation = _Conversation(self, connection)
                self._conversations.add(conversation)
            conversation.thread.start()

    def _reap_loop(self) -> None:
        while not self._closing.wait(REAP_INTERVAL_S):
            with self._lock:
                conversations = list(self._conversations)
            for conversation in conversations:
                if conversation.has_lost_its_rank():
                    conversation.hang_up()
            self.saver.expire()
            self.adoption.expire(time.monotonic())
            self.lives.look()


class _Conversation:
    """One rank: reads its requests, answers each, and passes outcomes on to it from any thread."""

    def __init__(self, daemon: Daemon, connection: socket.socket) -> None:
        self._daemon = daemon
        self._connection = connection
        self._peer = PeerProcess(connection)
        self._send_lock = threading.Lock()
        self._decoder = wire.FrameDecoder(wire.TO_DAEMON)
        self._who: Participant | None = None
        self._asker = NOBODY
        self._segments: list[ArenaSegment] = []
        self._fds: list[int] = []  # that came, and that no request has taken yet
        self._refused: CheckpointError | None = None
        self.thread = threading.Thread(target=self._run, name="holdfast-rank", daemon=True)
        self._answers: dict[type[wire.Message], Callable[[Any], wire.Reply | None]] = {
            wire.Hello: self._hello,
            wire.Reserve: self._reserve,
            wire.Attach: self._attach,
            wire.Lease: self._lease,
            wire.Seal: self._seal,
            wire.Abandon: self._abandon,
            wire.Choose: self._choose,
            wire.Ended: self._ended,
            wire.Held: self._held,
            wire.Load: self._load,
            wire.Unload: self._unload,
            wire.Measured: self._measured,
            wire.Farewell: self._farewell,
        }

    def has_lost_its_rank(self) -> bool:
        """Whether the process that connected is gone, also where a child of it holds the connection open."""
        return self._peer.gone or hung_up(self._connection)

    def hang_up(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("rank had hung up already: %s", error)

    def _run(self) -> None:
        try:
            self._meet()
            while data := self._receive():
                for request in self._decoder.feed(data):
                    self._answer(request)
                    if self._refused is not None:
                        raise self._refused
        except CheckpointError as error:
            log.warning("ending a conversation: %s", error.detail)
        except OSError as error:
            log.info("a rank's connection broke: %s", error)
        finally:
            if self._who is not None:
                self._daemon.saver.gone(self._who)
            self._daemon.loader.leave(self)
            self._daemon.forget(self)
            self._connection.close()
            self._peer.close()
            for segment in self._segments:
                if segment.user is self:
                    self._daemon.arena.drop(segment)
            self._segments = []
            for fd in self._fds:
                os.close(fd)

    def _meet(self) -> None:
        """Look who it is. Who may not speak is told so in answer to the first request, and then hung up on."""
        try:
            caller = Caller.of(self._connection)
            self._daemon.callers.check(caller)
            self._asker = Asker(caller.tenant, not caller.tenant)
        except CheckpointError as error:
            self._refused = error
            self._connection.settimeout(REFUSED_WAIT_S)

    def _receive(self) -> bytes:
        data, fds, _, _ = socket.recv_fds(self._connection, RECEIVE_BYTES, 1)
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds += fds
        if len(self._fds) > FDS_MAX:
            raise LimitExceeded(f"{len(self._fds)} descriptors came that nobody asked for")
        return data

    def _answer(self, request: wire.Request) -> None:
        try:
            if self._refused is not None:
                raise self._refused
            reply = self._answers[type(request)](request)
        except CheckpointError as error:
            reply = wire.Failed(reply_to=request.id, problem=error.problem())
        except Exception:
            log.exception("a request failed: %s", type(request).__name__)
            opaque = CheckpointError("unexpected failure in the daemon", hint="see the daemon's log")
            reply = wire.Failed(reply_to=request.id, problem=opaque.problem())
        if reply is not None:
            self._send(reply)

    def _send(self, message: wire.Message, fds: tuple[int, ...] = ()) -> None:
        frame = wire.encode_frame(message)
        with self._send_lock:
            if fds:
                sent = socket.send_fds(self._connection, [frame], list(fds))
                frame = frame[sent:]
            self._connection.sendall(frame)

    def _notify(self, outcome: wire.Outcome) -> None:
        try:
            self._send(outcome)
        except OSError as error:
            log.info("a rank is not there to hear of step %d: %s", outcome.step, error)

    def _known(self) -> Participant:
        if self._who is None:
            raise InvalidRequest("the first message of a conversation must be hello")
        return self._who

    def _hello(self, request: wire.Hello) -> wire.Reply:
        if request.protocol != wire.PROTOCOL:
            raise InvalidRequest(
                f"the trainer speaks protocol {request.protocol}, this daemon {wire.PROTOCOL}",
                hint="use the same version of holdfast on both sides",
            )
        if not request.rank < request.world:
            raise InvalidRequest(f"rank {request.rank} of a world of {request.world}")
        daemon = self._daemon
        daemon.serving.check(request.root)
        daemon.saver.expect()

        def join(attempt: int) -> Participant:
            who = self._who = NearParticipant(request, attempt, self._notify, self.has_lost_its_rank)
            daemon.saver.join(who)
            return who

        meant = request if self._asker.owner else request.model_copy(update={"keep_last": None})
        return wire.Welcome(
            reply_to=request.id,
            attempt=let_in(daemon.saver, daemon.decisions, meant, join, self._asker.tenant).attempt,
            node=daemon.serving.node,
            root=daemon.serving.root,
            mark=daemon.serving.mark,
            version=daemon.serving.version,
            url=daemon.serving.url,
            notices=daemon.decisions.denied(request.run, request.keep_last, self._asker.owner),
        )

    def _reserve(self, request: wire.Reserve) -> None:
        who = self._known()
        asked = geometry(request.slots, request.data_bytes, request.table_bytes)
        self._part_with_segments()  # first, so that there is room where memory has none for both
        arena, holds = self._daemon.arena, self._daemon.saver.holds
        label, holder = f"{who.run}-rank{who.rank}", ShareHolder(who.run, self._asker.tenant)
        segment = arena.take_over(asked, who.owner) or arena.reserve(asked, label, who.owner, holder)
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
        self._send(reply, (segment.fd,))

    def _attach(self, request: wire.Attach) -> wire.Reply:
        who, daemon = self._known(), self._daemon
        if not self._fds:
            raise InvalidRequest("a segment is attached by its descriptor")
        fd = self._fds.pop(0)
        try:
            segment, taken = daemon.arena.attach(fd, who.owner)
        finally:
            os.close(fd)
        self._use(segment)
        refused = daemon.adoption.take_up(segment, taken, who).refused
        turns = dict.fromkeys(request.open, 0) | dict(zip(request.open, request.turns, strict=False))
        daemon.saver.take_over(who, turns, refused)
        daemon.adoption.back(who, segment)
        return wire.Done(reply_to=request.id)

    def _use(self, segment: ArenaSegment) -> None:
        segment.used_by(self, PeerProcess(self._connection))
        self._part_with_segments(but=segment)
        self._segments = [segment]

    def _part_with_segments(self, but: ArenaSegment | None = None) -> None:
        """Give outgrown segments back, as soon as what they hold is saved."""
        outgrown, self._segments = self._segments, []
        for segment in outgrown:
            if segment is not but:
                self._daemon.saver.holds.end(self._known().run)  # memory must not double
                self._daemon.arena.drop(segment, outgrown=True)

    def _lease(self, request: wire.Lease) -> wire.Reply:
        who = self._known()
        if not self._segments:
            raise InvalidRequest("reserve a segment before leasing a slot")
        segment = self._segments[-1]
        slot = self._daemon.saver.lease(who, segment, request.step, request.wait_s, request.policy, request.intent)
        return wire.Granted(reply_to=request.id, slot=slot, deadline_s=LEASE_DEADLINE_S)

    def _seal(self, request: wire.Seal) -> wire.Reply:
        try:
            self._daemon.saver.seal(self._known(), request.slot, request.step, request.table_digest, request.turn)
        except CheckpointError:
            for segment in self._segments:
                segment.disown(request.slot)
            raise
        return wire.Sealed(reply_to=request.id)

    def _abandon(self, request: wire.Abandon) -> wire.Reply:
        self._daemon.saver.give_up(self._known(), request.step, from_problem(request.problem))
        return wire.Done(reply_to=request.id)

    def _choose(self, request: wire.Choose) -> wire.Reply:
        who = self._known()
        self._daemon.saver.settle(who.run, request.wait_s)
        step = self._daemon.decisions.choose(
            who.run, who.attempt, request.turn, request.step, request.groups, request.healthy
        )
        notes = self._daemon.saver.restores.told(who, request.turn, step, named=request.step is not None)
        return wire.Chosen(reply_to=request.id, step=step, notes=notes)

    def _ended(self, request: wire.Ended) -> wire.Reply:
        problem = None if request.problem is None else from_problem(request.problem)
        agreement = self._daemon.saver.restores
        found = agreement.judge(self._known(), request.turn, request.step, problem, request.alone, request.wait_s)
        return wire.Judged(
            reply_to=request.id, again=found.again, problem=found.problem, late=found.late, newest=found.newest
        )

    def _held(self, request: wire.Held) -> None:
        parts, fds = self._daemon.saver.holds.lend(self._known().run, request.step)
        try:
            self._send(wire.HeldSlots(reply_to=request.id, parts=parts), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _load(self, request: wire.Load) -> None:
        """The answer comes from the loader, once the other ranks have asked as well and all is read."""
        who = self._known()
        if not self._fds:
            raise InvalidRequest("what is to be read is listed in a memfd that comes along")
        fd = self._fds.pop(0)
        try:
            wanted = read_listing(fd)
        finally:
            os.close(fd)
        self._daemon.loader.ask(Key(who.run, who.attempt, request.step), Wish(self, request, wanted, self._send))

    def _unload(self, request: wire.Unload) -> wire.Reply:
        self._known()
        self._daemon.loader.leave(self)
        self._daemon.loader.counts.add("rank", request.read_bytes)
        return wire.Done(reply_to=request.id)

    def _measured(self, request: wire.Measured) -> None:
        self._daemon.saver.history.stalled(self._known(), request.step, request.stall_s)

    def _farewell(self, request: wire.Farewell) -> None:
        self._known().parted = True
        self._daemon.saver.holds.end(self._known().run)

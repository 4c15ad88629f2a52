"""A rank that shares no memory with this daemon: its reserved slots, and its uploads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np

from holdfast_formats.digest import check_digest, digest
from holdfast_formats.errors import (
    CheckpointError,
    InvalidRequest,
    LimitExceeded,
    from_problem,
)
from holdfast_formats.rest import bodies
from holdfast_formats.staging import arena, wire
from holdfast_formats.staging.arena import Geometry
from holdfast_formats.staging.messages import LastStep, PassedStep, Room, SlotRequest
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.segment import ArenaSegment
from holdfast_service.daemon.arena.shares import ShareHolder
from holdfast_service.daemon.arena.upload import Chunk, Part, SlotUpload
from holdfast_service.daemon.saving.run_busy import ConnectedRank
from holdfast_service.daemon.saving.saver import Saver

log = logging.getLogger(__name__)

ENDED_UPLOADS_MAX = 256  # of a rank: their outcomes can still be requested


class RemoteRank:
    """One rank over HTTP: its segment and its uploads. The saver ends uploads from any thread."""

    def __init__(self, arena: Arena, saver: Saver, hello: bodies.RankHello, attempt: int, tenant: str = "") -> None:
        self._arena, self._saver = arena, saver
        self.hello, self.holder = hello, ShareHolder(hello.run, tenant, remote=True)
        self.who = ConnectedRank(hello, attempt, self._notify, heard=lambda: self.heard)
        self.heard = time.monotonic()
        self._turn = threading.Lock()  # one request of this rank at a time; never taken by the saver
        self._lock = threading.Lock()  # guards what `_notify` touches; held for moments only
        self._segment: ArenaSegment | None = None
        self._asked: Geometry | None = None  # it may have fewer slots than that
        self._reserved_at: float | None = None  # since when nothing has come into what was reserved
        self._uploads: dict[int, SlotUpload] = {}
        self._ended: list[int] = []  # numbers of ended uploads, in order
        self._forgotten = 0  # how many of them are no longer stored
        self._listeners: set[Callable[[], None]] = set()
        self._asked_to_stop = False  # and not sent yet

    def hear(self) -> None:
        """It has sent a request."""
        self.heard = time.monotonic()

    def excuse(self, seconds: float) -> None:
        """This daemon was suspended for so long, and received nothing."""
        self.heard = min(self.heard + max(seconds, 0.0), time.monotonic())

    def reserve(self, room: Room) -> None:
        """Reserve memory for this rank; `LimitExceeded`, with the numbers, if the arena has too little."""
        geometry = arena.geometry(room.slots, room.data_bytes, room.table_bytes)
        with self._turn:
            if self._segment is not None and self._asked == geometry:
                return
            outgrown = self._segment
            self._take(geometry)
        if outgrown is not None:
            self._arena.drop(outgrown)

    def _take(self, geometry: Geometry) -> ArenaSegment:
        # The superblock names no owner: the rank keeps its bytes until they are committed and brings them again.
        label = f"{self.who.run}-rank{self.who.rank}-remote"
        segment = self._arena.reserve(geometry, label, holder=self.holder)
        self._segment, self._asked, self._reserved_at = segment, geometry, time.monotonic()
        return segment

    def give_back_unused(self, after_s: float) -> None:
        """Free what was reserved so long ago and never used: it is reserved again when the rank saves."""
        since = self._reserved_at
        if since is None or time.monotonic() - since < after_s or not self._turn.acquire(blocking=False):
            return
        try:
            segment = self._segment if self._reserved_at == since else None
            if segment is None:
                return
            self._segment, self._reserved_at = None, None
        finally:
            self._turn.release()
        size = segment.geometry.segment_bytes
        log.info("%s-rank%d: its %d reserved bytes were never used and are released", self.who.run, self.who.rank, size)
        self._arena.drop(segment)

    def open(self, number: int, wanted: SlotRequest) -> bodies.Upload:
        """Start the rank's `number`-th upload, or find it. Refuses a step that this rank may not save.

        If no slot is free, the policy decides; under `wait`, `ArenaFull` at once.
        """
        with self._turn:
            known = self._uploads.get(number)
            if known is not None:
                if known.step != wanted.step:
                    raise InvalidRequest(f"upload {number} is for step {known.step}, not for {wanted.step}")
                return self._describe(known)
            if self._asked is None:
                raise InvalidRequest("reserve a segment before the first upload", reason="not-reserved")
            segment = self._segment or self._take(self._asked)
            upload = SlotUpload(number, wanted.step, segment, wanted.turn)
            with self._lock:
                self._uploads[number] = upload
            try:
                upload.lease(self._saver.lease(self.who, segment, wanted, 0.0))
            except CheckpointError:
                with self._lock:
                    del self._uploads[number]
                raise
            return self._describe(upload)

    def state(self, number: int) -> bodies.Upload:
        return self._describe(self._find(number))

    def check_room(self, number: int, part: Part, stop: int) -> None:
        """`LimitExceeded` for a chunk that would not fit, before it is read."""
        upload = self._find(number)
        if upload.outcome is None and stop > len(upload.span(part)):
            raise LimitExceeded(
                f"byte {stop} of the {part} is outside the {len(upload.span(part))} reserved bytes",
                hint="reserve a larger segment first",
            )

    def write(self, number: int, part: Part, chunk: Chunk) -> bodies.Upload:
        """Accept a chunk whose digest is right and that continues the part; a repeated one changes nothing."""
        check_digest(chunk.digest)
        digest_found = digest(chunk.data)
        if digest_found != chunk.digest:
            raise InvalidRequest(
                f"the chunk at {chunk.offset} has digest {digest_found}, not {chunk.digest}",
                hint="it was damaged in transit: send it again",
                reason="digest",
            )
        with self._turn:
            upload = self._going_on(number)
            stop = chunk.offset + len(chunk.data)
            received = upload.received[part]
            if stop <= received:
                if digest(upload.span(part)[chunk.offset : stop]) != chunk.digest:
                    raise InvalidRequest(
                        f"bytes {chunk.offset} to {stop} of the {part} were already received with different contents"
                    )
            elif upload.sealed or chunk.offset != received or stop > len(upload.span(part)):
                raise InvalidRequest(
                    f"got a chunk of bytes {chunk.offset} to {stop}, but the {part} continues at {received}",
                    hint="continue at `received`",
                    received=received,
                )
            else:
                target = np.frombuffer(upload.span(part)[chunk.offset : stop], np.uint8)
                np.copyto(target, np.frombuffer(chunk.data, np.uint8))  # without the GIL, unlike a memoryview's assignment
                upload.received[part] = stop
                self._reserved_at = None
            self._saver.renew(self.who, upload.step)
            return self._describe(upload)

    def seal(self, number: int, whole: bodies.SealRequest) -> bodies.Upload:
        """Pass a completely uploaded slot to the saver; safe to repeat."""
        check_digest(whole.table_digest)
        with self._turn:
            upload = self._find(number)
            if upload.sealed or upload.outcome is not None:
                return self._describe(upload)
            stated = {"data": whole.data_bytes, "table": whole.table_bytes}
            if upload.received != stated:
                raise InvalidRequest(f"received {upload.received} bytes, not {stated}", received=upload.received["data"])
            upload.seal(self.who.attempt, whole.table_digest)
            if whole.stall_s is not None:
                self._saver.history.stalled(self.who, upload.step, whole.stall_s)
            try:
                self._saver.seal(self.who, upload.slot, upload.step, whole.table_digest, upload.turn)
            except CheckpointError as error:
                self._end(upload, "aborted", error)
                raise
            return self._describe(upload)

    def abandon(self, number: int, error: CheckpointError) -> bodies.Upload:
        """Abandon an upload, and with it the save; a sealed one continues."""
        with self._turn:
            upload = self._find(number)
            if not upload.sealed and upload.outcome is None:
                self._saver.give_up(self.who, upload.step, error)
                self._end(upload, "aborted", error)
            return self._describe(upload)

    def waits(self, step: int | None) -> None:
        """It begins no other save before the one of this step has ended; without a step, none any more."""
        self._saver.waits(self.who, step)

    def stopping(self, passed_step: PassedStep) -> LastStep:
        """Its launch is to stop: report its progress and get the step."""
        return self._saver.stops.report(self.who, passed_step)

    def outcomes(self, after: int) -> bodies.Outcomes:
        """Ended uploads from the `after`-th on; the oldest are not kept. Also, once, a request to report its progress."""
        with self._lock:
            stop, self._asked_to_stop = self._asked_to_stop, False
            numbers = self._ended[max(after - self._forgotten, 0) :]
            ended = [self._uploads[number] for number in numbers]
            following = self._forgotten + len(self._ended)
        return bodies.Outcomes(items=[self._describe(upload) for upload in ended], next=following, stop=stop)

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener`, on any thread, whenever an upload ends; and when the rank departs."""
        with self._lock:
            self._listeners.add(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.discard(listener)

    def depart(self) -> None:
        """The rank is gone: its unsealed uploads end, and its memory is freed after the rest was saved."""
        self._saver.gone(self.who)
        with self._turn:
            segment, self._segment, self._asked = self._segment, None, None
        if segment is not None:
            self._arena.drop(segment)
        self.wake()

    def wake(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def _notify(self, outcome: wire.Outcome | wire.Stop) -> None:
        if isinstance(outcome, wire.Stop):
            with self._lock:
                self._asked_to_stop = True
            self.wake()
            return
        with self._lock:  # the oldest of this step: a newer one can only be waiting for it to end
            upload = next((u for u in self._uploads.values() if u.step == outcome.step and u.outcome is None), None)
        if upload is not None:
            error = from_problem(outcome.problem or {}) if outcome.state == "aborted" else None
            self._end(upload, outcome.state, error)

    def _end(self, upload: SlotUpload, state: Literal["committed", "aborted"], error: CheckpointError | None) -> None:
        problem = error.problem() if error is not None else None
        with self._lock:
            if upload.outcome is not None:
                return
            upload.end(wire.Outcome(step=upload.step, attempt=self.who.attempt, state=state, problem=problem))
            self._ended.append(upload.number)
            while len(self._ended) > ENDED_UPLOADS_MAX:
                del self._uploads[self._ended.pop(0)]
                self._forgotten += 1
        self.wake()

    def _find(self, number: int) -> SlotUpload:
        with self._lock:
            upload = self._uploads.get(number)
        if upload is None or (upload.slot < 0 and upload.outcome is None):
            raise InvalidRequest(f"there is no upload {number}", hint="open it first", reason="not-open")
        return upload

    def _going_on(self, number: int) -> SlotUpload:
        upload = self._find(number)
        if upload.outcome is not None and upload.outcome.problem is not None:
            raise from_problem(upload.outcome.problem)
        if upload.outcome is not None:
            raise InvalidRequest(f"upload {number} is already committed")
        return upload

    def _describe(self, upload: SlotUpload) -> bodies.Upload:
        outcome = upload.outcome
        return bodies.Upload(
            number=upload.number,
            step=upload.step,
            attempt=self.who.attempt,
            state=outcome.state if outcome is not None else "sealed" if upload.sealed else "open",
            data_bytes=upload.received["data"],
            table_bytes=upload.received["table"],
            problem=outcome.problem if outcome is not None else None,
        )

"""The link of a rank that shares no memory with its daemon: it stages into its own slots, and uploads sealed ones over
HTTP.

`RemoteLink` answers the same requests as `Link` over the socket, so the checkpointer needs no special case.
"""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from holdfast.remote.own_slots import OwnSave, OwnSegment, within
from holdfast.remote.uploader import ROOM_TIMEOUT_S, Uploader
from holdfast.rest import replicas
from holdfast.rest.api import Api
from holdfast_formats import memory_bounds
from holdfast_formats.errors import (
    ArenaFull,
    CheckpointError,
    DaemonGone,
    GenerationDropped,
    InvalidRequest,
    RoundAborted,
    from_problem,
)
from holdfast_formats.rest import bodies
from holdfast_formats.root_files import RootMark
from holdfast_formats.staging import arena, messages, wire
from holdfast_formats.staging.messages import Room, SlotRequest, restate

REQUEST_TIMEOUT_S = 30.0

_Reply = TypeVar("_Reply", bound=wire.Reply)


class RemoteLink:
    """One rank's connection to a daemon over HTTP. Requests may come from any thread; outcomes come on other threads."""

    def __init__(
        self,
        url: str,
        on_outcome: Callable[[wire.Outcome], None],
        on_lost: Callable[[CheckpointError], None],
        on_stop: Callable[[], object] = bool,
    ):
        self.url = url
        self._link_events = (on_outcome, on_lost, on_stop)
        self._api = Api(url, REQUEST_TIMEOUT_S)
        self._ids, self._numbers = itertools.count(), itertools.count()
        self._lock = threading.Lock()
        self._courier: Uploader | None = None
        self._segment: OwnSegment | None = None
        self._fds: list[int] = []
        self._receiving = threading.Lock()
        self._closed = False
        self._answers: dict[type[wire.Message], Callable[[Any], wire.Reply]] = {
            wire.Hello: self._hello,
            wire.Reserve: self._reserve,
            wire.Lease: self._lease,
            wire.Foresee: self._foresee,
            wire.Seal: self._seal,
            wire.Abandon: self._abandon,
            wire.Choose: self._choose,
            wire.Ended: self._ended,
            wire.Stopping: self._stopping,
            wire.CopyOf: self._copy_of,
            wire.Held: lambda message: wire.HeldSlots(reply_to=message.id),  # memory that is not shared
            wire.HeldElsewhere: lambda message: wire.HeldSlots(reply_to=message.id),
        }

    @property
    def alive(self) -> bool:
        return not self._closed and (self._courier is None or self._courier.lost is None)

    @property
    def near(self) -> bool:
        return False

    @property
    def daemon(self) -> str:
        return f"the daemon at {self.url}"

    def ping(self, timeout_s: float) -> None:
        try:
            self._api.sign_of_life(timeout_s)
        except RuntimeError as error:  # closed meanwhile
            raise DaemonGone(f"the connection to {self.url} is closed") from error

    def next_id(self) -> int:
        return next(self._ids)

    def request(self, message: wire.Request, kind: type[_Reply], timeout_s: float = REQUEST_TIMEOUT_S) -> _Reply:
        """Execute the message and return the reply; the message's own time limits apply, not `timeout_s`."""
        if self._courier is not None and self._courier.lost is not None:
            raise self._courier.lost
        if type(message) not in self._answers:
            raise InvalidRequest(f"a rank without shared memory cannot send {type(message).__name__}")
        reply = self._answers[type(message)](message)
        assert isinstance(reply, kind), f"{type(message).__name__} is not answered by {kind.__name__}"
        return reply

    def ask(
        self, message: wire.Request, kind: type[_Reply], fds: tuple[int, ...] = (), timeout_s: float = REQUEST_TIMEOUT_S
    ) -> _Reply:
        raise DaemonGone("a rank without shared memory cannot exchange file descriptors")

    def notify(self, message: wire.Request) -> None:
        """Send how long training stalled, with the seal if the upload is not sealed yet; or that the rank waits."""
        if self._courier is not None and isinstance(message, wire.Waits):
            self._courier.waits(restate(message, messages.Waiting))
        save = self._courier.saves.find(message.step) if self._courier and isinstance(message, wire.Measured) else None
        if save is not None and isinstance(message, wire.Measured):
            save.stall_s = message.stall_s

    @property
    def receiving(self) -> AbstractContextManager[object]:
        return self._receiving

    def take_fd(self) -> int:
        """The descriptor of the last reserved segment; the caller closes it."""
        with self._lock:
            if not self._fds:
                raise DaemonGone("no segment was reserved")
            return self._fds.pop(0)

    def take_fds(self, count: int) -> list[int]:
        raise DaemonGone("a rank without shared memory receives no descriptors")

    def keep_average(self, fd: int) -> None:
        raise DaemonGone("a rank without shared memory has no average")

    def close(self, ended: bool = False) -> None:
        """Disconnect: the daemon saves complete uploads, and drops the rest."""
        self._closed = True
        if self._courier is not None:
            self._courier.close()
        self._api.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _hello(self, message: wire.Hello) -> wire.Welcome:
        meant = None if message.root is None else message.root.id
        hello = restate(message, bodies.RankHello, root_id=meant)
        self._courier = Uploader(self._api, uuid.uuid4().hex, hello, self._link_events)
        welcome = self._courier.welcome
        return restate(
            welcome,
            wire.Welcome,
            reply_to=message.id,
            root="",  # a directory of that name on this machine would be another one
            mark=RootMark(id=welcome.root_id),
            url=self.url,  # the address that this rank uses, which may differ from the one that the daemon knows
        )

    def _reserve(self, message: wire.Reserve) -> wire.Segment:
        courier = self._known()
        asked = arena.geometry(message.slots, message.data_bytes, message.table_bytes)
        if self._segment is not None:
            self._segment.give_back()
        geometry, notice = within(asked, memory_bounds.of_process())  # planned again: the memory is this process's own
        segment = OwnSegment(geometry)
        try:
            courier.reserve(restate(message, Room, slots=geometry.slots), segment)
        except CheckpointError:
            os.close(segment.fd)
            raise
        with self._lock:
            self._segment = segment
            self._fds.append(segment.fd)
        made = segment.geometry
        return wire.Segment(
            reply_to=message.id,
            slots=made.slots,
            data_bytes=made.data_bytes,
            table_bytes_max=made.table_bytes_max,
            notice=notice,
        )

    def _lease(self, message: wire.Lease) -> wire.Granted:
        courier, segment = self._known(), self._segment
        if segment is None:
            raise InvalidRequest("reserve a segment before leasing a slot")
        number = next(self._numbers)
        slot = _make_room(courier, segment, number, message)
        save = OwnSave(courier.run, number, restate(message, SlotRequest, policy="wait"), segment, slot)
        try:
            courier.begin(save, restate(message, SlotRequest))
        except CheckpointError:
            segment.release(slot)
            raise
        return wire.Granted(reply_to=message.id, slot=slot, deadline_s=0.0)

    def _foresee(self, message: wire.Foresee) -> wire.Foreseen:
        return wire.Foreseen(reply_to=message.id, slot=None if self._segment is None else self._segment.foresee())

    def _seal(self, message: wire.Seal) -> wire.Sealed:
        courier = self._known()
        save = courier.saves.find(message.step)
        if save is None or not save.staging or save.slot != message.slot:
            raise RoundAborted(f"slot {message.slot} is not leased for step {message.step}")
        save.seal(message.table_digest)
        if not courier.deliver(save):  # another rank has given up meanwhile
            raise from_problem(save.problem or {})
        return wire.Sealed(reply_to=message.id)

    def _abandon(self, message: wire.Abandon) -> wire.Done:
        courier = self._known()
        save = courier.saves.find(message.step)
        if save is not None and save.staging:  # else the save had ended before
            courier.abandon(save, from_problem(message.problem))
        return wire.Done(reply_to=message.id)

    def _choose(self, message: wire.Choose) -> wire.Chosen:
        return restate(self._known().choose(message), wire.Chosen, reply_to=message.id)

    def _ended(self, message: wire.Ended) -> wire.Judged:
        return restate(self._known().ended(message), wire.Judged, reply_to=message.id)

    def _stopping(self, message: wire.Stopping) -> wire.StopAt:
        answer = self._known().stopping(restate(message, messages.PassedStep))
        return restate(answer, wire.StopAt, reply_to=message.id)

    def _copy_of(self, message: wire.CopyOf) -> wire.CopyFound:
        return restate(
            replicas.copied(self._api, self._known().run, message.step, message.tier), wire.CopyFound, reply_to=message.id
        )

    def _known(self) -> Uploader:
        if self._courier is None:
            raise InvalidRequest("the first request must be hello")
        return self._courier


def _make_room(courier: Uploader, segment: OwnSegment, number: int, wanted: wire.Lease) -> int:
    """Find an own slot. If none is free, the policy decides: here among saves not being uploaded, else at the daemon."""
    attempt, policy = courier.welcome.attempt, wanted.policy
    try:
        return segment.lease(wanted.step, attempt, wanted.wait_s if policy == "wait" else 0.0)
    except ArenaFull:
        if policy == "wait":
            raise
    if policy == "newest-wins" and courier.take_back(wanted.step, policy):
        return segment.lease(wanted.step, attempt, 0.0)
    error = GenerationDropped.of(wanted.step, None, policy, courier.awaited())
    if not courier.ask(number, restate(wanted, SlotRequest)):
        raise error
    try:  # the end of saves that the daemon dropped or committed will be reported soon
        return segment.lease(wanted.step, attempt, ROOM_TIMEOUT_S)
    except ArenaFull:
        courier.give_up(number, wanted.step, error)
        raise error from None

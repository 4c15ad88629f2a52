"""Messages between a rank and its node's daemon, over a unix stream socket.

A frame is four bytes of little-endian length and a JSON object with a `type`. A request carries `id`; its reply has the same
number as `reply_to`. `Outcome` and `Stop` come without a request. Descriptors (memfds) are passed with the first byte of the
`Segment` and `HeldSlots` frames, and of the `Attach` frame when a rank brings its segment to another daemon. Bulk data is
never sent this way: it is in the slot, table included. What is also said over HTTP is stated in `messages`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from holdfast_formats.body import Body, first_mistake
from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.memory_bounds import BOUNDS_MAX, Bound
from holdfast_formats.root_files import RootMark
from holdfast_formats.staging import messages

PROTOCOL = 1
FRAME_BYTES_MAX = 2**20
LENGTH_BYTES = 4
HELD_RANKS_MAX = 64  # descriptors that one message may have
RANGES_MAX = 16_384  # in one message
WAIT_MAX_S = 86_400.0
PATH_MAX = 4096
PEERS_MAX = 4096  # ranks on one machine

Bounds = Annotated[tuple[Bound, ...], Field(max_length=BOUNDS_MAX)]


class Message(Body):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Request(Message):
    id: int = Field(ge=0)


class Reply(Message):
    reply_to: int = Field(ge=0)


class Hello(Request, messages.HelloFields):
    """The first message: says which rank connects."""

    type: Literal["hello"] = "hello"
    protocol: int = PROTOCOL
    root: RootMark | None = Field(default=None, description="the expected root; a daemon of another root refuses")


class Welcome(Reply, messages.WelcomeFields):
    type: Literal["welcome"] = "welcome"
    mark: RootMark
    url: str | None = None


class Reserve(Request, messages.Room):
    """Request a segment of up to `slots` slots; the reply is `Segment`, with its descriptor. `bounds` are the limits of
    this rank's own memory, to whose control groups the slots are charged. `average_bytes` are kept free for the average
    of each of the `averages` ranks started on this machine, which reserve them later: slots can be fewer, or on disk,
    but averages cannot.
    """

    type: Literal["reserve"] = "reserve"
    bounds: Bounds = ()
    average_bytes: int = Field(default=0, ge=0)
    averages: int = Field(default=1, ge=1, le=PEERS_MAX)


class Segment(Reply):
    """The granted segment: at least one slot; a spilled segment is a file on disk. `notice` states why it is smaller
    than requested.
    """

    type: Literal["segment"] = "segment"
    slots: int
    data_bytes: int
    table_bytes_max: int
    spilled: bool = False
    notice: str = ""


class Attach(Request):
    """Continue with a segment that another daemon made; its memfd comes with the message.

    `open` are the steps whose end is awaited, and `turns` those of their intents, in the same order. An outcome follows
    for each of them. Slots leased to this rank for any other step are freed.
    """

    type: Literal["attach"] = "attach"
    open: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()


class Lease(Request, messages.SlotRequest):
    """Request a slot for `step`. Under the policy `wait`, the rank waits for at most `wait_s` seconds. `bounds` are those of
    `Reserve` as they are now, from a rank whose saves overlap: another slot may need memory.
    """

    type: Literal["lease"] = "lease"
    wait_s: float = Field(default=0.0, ge=0.0, le=WAIT_MAX_S)
    bounds: Bounds = ()


class Withdraw(Request):
    """Withdraw the lease of this step, whose answer came too late, if it was not processed yet. This rank saves no part
    of the step then, and no other save is dropped for it. The lease's reply is the only one.
    """

    type: Literal["withdraw"] = "withdraw"
    step: int = Field(ge=0)


class Granted(Reply):
    """The slot is the rank's until it seals it, or until `deadline_s` seconds have passed and the save is aborted."""

    type: Literal["granted"] = "granted"
    slot: int
    deadline_s: float


class Foresee(Request):
    """Another save may begin before those under way are written: which slot would it take? `bounds` are as in `Lease`. The
    reply is `Foreseen`.
    """

    type: Literal["foresee"] = "foresee"
    bounds: Bounds = ()


class Foreseen(Reply):
    """The free slot that is leased next; the rank may touch it. None if none is free, or has or can have memory."""

    type: Literal["foreseen"] = "foreseen"
    slot: int | None = None


class Seal(Request):
    type: Literal["seal"] = "seal"
    slot: int = Field(ge=0)
    step: int = Field(ge=0)
    table_digest: str
    turn: int = Field(default=0, ge=0)


class Sealed(Reply):
    """From here on the daemon saves this rank's part, even if the rank dies."""

    type: Literal["sealed"] = "sealed"


class Abandon(Request, messages.AbandonRequest):
    """The rank returns its lease unsealed, which aborts the save."""

    type: Literal["abandon"] = "abandon"
    slot: int = Field(ge=0)
    step: int = Field(ge=0)


class Choose(Request, messages.StepQuestion):
    """This rank's `turn`-th question; every rank's n-th question has the same answer."""

    type: Literal["choose"] = "choose"
    turn: int = Field(ge=0, le=messages.COUNT_MAX)
    wait_s: float = Field(default=0.0, ge=0.0, le=WAIT_MAX_S)


class Chosen(Reply, messages.Answer):
    type: Literal["chosen"] = "chosen"


class Ended(Request, messages.RestoreResult):
    """The reply comes when the other ranks' restores have ended too, or one of them has met damage."""

    type: Literal["ended"] = "ended"
    turn: int = Field(ge=0, le=messages.COUNT_MAX)
    wait_s: float = Field(default=0.0, ge=0.0, le=WAIT_MAX_S)


class Judged(Reply, messages.RestoreVerdict):
    type: Literal["judged"] = "judged"


class Held(Request):
    """Ask whether the daemon still holds the slots from which this step was committed."""

    type: Literal["held"] = "held"
    step: int = Field(ge=0)


class OfSave(Request):
    """Identifies a save of the rank's own run: there may be others of the same step."""

    step: int = Field(ge=0)
    attempt: int = Field(ge=0)
    turn: int = Field(default=0, ge=0)
    world: int = Field(ge=1)


class HeldElsewhere(OfSave):
    """Request other nodes' slots of this save, of ranks above `after`. The reply is `HeldSlots`, of memory of this
    node, with the tables, and of the data only what was fetched (`Fetch`).
    """

    type: Literal["held-elsewhere"] = "held-elsewhere"
    after: int = Field(default=-1, ge=-1)


class Fetch(OfSave):
    """Fetch ranges of other nodes' slots: rank, begin and end, relative to its first byte of data."""

    type: Literal["fetch"] = "fetch"
    ranges: tuple[tuple[int, int, int], ...] = Field(max_length=RANGES_MAX)


class Fetched(Reply):
    """All requested ranges are there, except some of these ranks."""

    type: Literal["fetched"] = "fetched"
    lost: tuple[int, ...] = ()


class HeldPart(Message):
    """A rank's part of that save: its slot, and the digest of the slot's table."""

    rank: int
    slot: int
    table_digest: str


class HeldSlots(Reply):
    """One part for each held rank, with its memfd, in this order; empty if the step is not held.

    A slot may be leased again at any time, unless the reader locks it first: docs/format.md § 11.
    """

    type: Literal["held-slots"] = "held-slots"
    parts: tuple[HeldPart, ...] = Field(default=(), max_length=HELD_RANKS_MAX)


class WatchLinks(Request):
    """Links in this directory keep the run's checkpoints that they lead to."""

    type: Literal["watch-links"] = "watch-links"
    directory: str = Field(min_length=1, max_length=PATH_MAX)


class Measured(Request):
    """How long a save stalled this rank's training, in `save()` and at the fence. There is no reply."""

    type: Literal["measured"] = "measured"
    step: int = Field(ge=0)
    stall_s: float = Field(ge=0.0, le=WAIT_MAX_S)


class ReserveAverage(Request):
    """Request memory for this rank's average; the reply is `Segment` with its memfd (`staging/average`), one slot."""

    type: Literal["reserve-average"] = "reserve-average"
    data_bytes: int = Field(ge=0)
    table_bytes: int = Field(ge=0)
    bounds: Bounds = ()


class AttachAverage(Request):
    """Continue with an average that another daemon made; its memfd comes with the message."""

    type: Literal["attach-average"] = "attach-average"


class Waits(Request, messages.Waiting):
    """Repeated while the rank waits. There is no reply."""

    type: Literal["waits"] = "waits"


class Stopping(Request, messages.PassedStep):
    """Repeated; the reply is `StopAt`. A rank that knows where to stop tells the next daemon as well."""

    type: Literal["stopping"] = "stopping"


class StopAt(Reply, messages.LastStep):
    type: Literal["stop-at"] = "stop-at"


class CopyOf(Request, messages.CopyQuestion):
    """The reply is `CopyFound`."""

    type: Literal["copy-of"] = "copy-of"


class CopyFound(Reply, messages.CopyAnswer):
    type: Literal["copy-found"] = "copy-found"


class RingAverage(Request):
    """This rank has sealed an update of its average, or will not. There is no reply."""

    type: Literal["ring-average"] = "ring-average"


class Ping(Request):
    """Is a daemon running? At any time, also before hello; the reply is `Done`, at once."""

    type: Literal["ping"] = "ping"


class DoJob(Request):
    """Do a job of `rest.jobs` on the root, instead of a hello; only for the daemon's own user. Its paths are the caller's:
    relative ones are below `directory`. The reply is `JobDone`, after `JobProgress` at intervals.
    """

    type: Literal["do-job"] = "do-job"
    root: RootMark | None = None
    directory: str = Field(max_length=PATH_MAX)
    job: dict[str, Any]


class JobProgress(Message):
    """How much of a job is done. Comes without a request."""

    type: Literal["job-progress"] = "job-progress"
    done_bytes: int
    total_bytes: int


class JobDone(Reply):
    type: Literal["job-done"] = "job-done"
    result: dict[str, Any]


class Farewell(Request):
    """The last message of a rank that ends regularly: nothing need be kept for a restart. There is no reply."""

    type: Literal["farewell"] = "farewell"


class Done(Reply):
    type: Literal["done"] = "done"


class Failed(Reply):
    type: Literal["failed"] = "failed"
    problem: dict[str, Any]


class Outcome(Message):
    """The end of a save: committed, or aborted with the reason; `generation-dropped` for a dropped one. `left_out` are
    groups that were staged, or to be added by the daemon, and are not in the checkpoint. `spares` are the boxes of this
    rank's table that another rank of this node stages from now on (`replica_claims.encode_bits`); empty for none.
    """

    type: Literal["outcome"] = "outcome"
    step: int
    attempt: int
    state: Literal["committed", "aborted"]
    problem: dict[str, Any] | None = None
    left_out: tuple[str, ...] = ()
    spares: str = ""


class Stop(Message):
    """Another rank of the launch has sent `Stopping`; this one must send it too. Comes without a request."""

    type: Literal["stop"] = "stop"


ToDaemon = Annotated[
    Hello
    | Reserve
    | Attach
    | Lease
    | Foresee
    | Withdraw
    | Seal
    | Abandon
    | Choose
    | Ended
    | Held
    | HeldElsewhere
    | Fetch
    | WatchLinks
    | ReserveAverage
    | AttachAverage
    | RingAverage
    | Measured
    | Waits
    | Stopping
    | CopyOf
    | Ping
    | DoJob
    | Farewell,
    Field(discriminator="type"),
]
ToRank = Annotated[
    Welcome
    | Segment
    | Granted
    | Foreseen
    | Sealed
    | Chosen
    | Judged
    | HeldSlots
    | Fetched
    | Done
    | Failed
    | StopAt
    | CopyFound
    | JobDone
    | JobProgress
    | Outcome
    | Stop,
    Field(discriminator="type"),
]
TO_DAEMON: TypeAdapter[Any] = TypeAdapter(ToDaemon)
TO_RANK: TypeAdapter[Any] = TypeAdapter(ToRank)


def encode_frame(message: Message) -> bytes:
    """Encode one frame; `LimitExceeded` or `InvalidRequest` for a message that no peer would accept."""
    try:
        body = message.model_dump_json().encode()
    except PydanticSerializationError as error:
        raise InvalidRequest(f"a message that JSON cannot represent: {error}") from error
    if len(body) > FRAME_BYTES_MAX:
        raise LimitExceeded(f"a message of {len(body)} bytes is over the limit of {FRAME_BYTES_MAX}")
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class FrameDecoder:
    """Splits a byte stream into messages. Does no input or output itself."""

    def __init__(self, messages: TypeAdapter[Any]) -> None:
        self._messages = messages
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that are complete now; `InvalidRequest` or `LimitExceeded` ends the connection."""
        self._pending += data
        complete = []
        while len(self._pending) >= LENGTH_BYTES:
            length = int.from_bytes(self._pending[:LENGTH_BYTES], "little")
            if length > FRAME_BYTES_MAX:
                raise LimitExceeded(f"a frame of {length} bytes is over the limit of {FRAME_BYTES_MAX}")
            if len(self._pending) < LENGTH_BYTES + length:
                break
            body = bytes(self._pending[LENGTH_BYTES : LENGTH_BYTES + length])
            del self._pending[: LENGTH_BYTES + length]
            complete.append(self._parse(body))
        return complete

    def _parse(self, body: bytes) -> Any:
        try:
            return self._messages.validate_json(body)
        except ValidationError as error:
            raise InvalidRequest(
                f"a message that this version does not support: {first_mistake(error)}",
                hint="the trainer and the daemon may have different versions of holdfast",
            ) from error

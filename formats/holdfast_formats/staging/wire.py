"""Messages between a rank and its node's daemon, over a unix stream socket.

A frame is four bytes of little-endian length and a JSON object with a `type`. A request carries `id`; its reply carries the
same number as `reply_to`. `Outcome` comes unasked. The file descriptors that travel, memfds, ride on the first byte of the
`Segment`, `HeldSlots` and `Loaded` frames, of the `Attach` frame when a rank brings its segment to another daemon, and of
the `Load` frame. Bulk data never comes this way: it lies in the slot, table included, or in the memfd.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.lineage import Intent
from holdfast_formats.whereabouts import RootMark

PROTOCOL = 4
FRAME_BYTES_MAX = 2**20
LENGTH_BYTES = 4
HELD_RANKS_MAX = 64  # descriptors that one message may bring

Policy = Literal["newest-wins", "oldest-durable", "wait"]  # what gives way where storage is slower than the saves


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Request(Message):
    id: int = Field(ge=0)


class Reply(Message):
    reply_to: int = Field(ge=0)


class Hello(Request):
    """The first message: who speaks. Ranks with the same `launch` share an attempt."""

    type: Literal["hello"] = "hello"
    protocol: int = PROTOCOL
    run: str
    rank: int = Field(ge=0)
    world: int = Field(ge=1)
    launch: str = Field(min_length=1, max_length=256)
    pid: int = 0
    keep_last: int | None = Field(default=None, ge=1)
    process: str = Field(default="", max_length=64, description="ID of this process; the same ID is the same job")
    session: str = Field(default="", max_length=64, description="ID of this checkpointer, the same on all its connections")
    root: RootMark | None = Field(default=None, description="ID of the expected root; a daemon of another root refuses")
    take_over: bool = Field(
        default=False, description="start although another job of this run is active, and shut that job out"
    )


class Welcome(Reply):
    type: Literal["welcome"] = "welcome"
    attempt: int
    node: str
    root: str
    mark: RootMark
    version: str
    url: str | None = None
    notices: tuple[str, ...] = ()


class Reserve(Request):
    """Ask for a segment of up to `slots` slots; the reply is `Segment` and carries its descriptor."""

    type: Literal["reserve"] = "reserve"
    slots: int = Field(ge=1, le=64)
    data_bytes: int = Field(ge=0)
    table_bytes: int = Field(ge=0)


class Segment(Reply):
    """What is given: at least one slot; a spilled segment is a file on disk. `notice` says why it is less than was asked."""

    type: Literal["segment"] = "segment"
    slots: int
    data_bytes: int
    table_bytes_max: int
    spilled: bool = False
    notice: str = ""


class Attach(Request):
    """Go on with a segment that another daemon made; its memfd comes along. `open` are the steps whose end is awaited, and
    `turns` those of their intents, in the same order.

    An outcome is told for each of them. What was leased to this rank for any other step is given back.
    """

    type: Literal["attach"] = "attach"
    open: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()


class Lease(Request):
    """Ask for a slot for `step`. Where none is free, `policy` decides; only under `wait` does `wait_s` count.

    `newest-wins`: an older save that is not being written yet is dropped for it, or else this one. `oldest-durable`: this
    one is. `wait`: one is awaited, for at most `wait_s` seconds. `intent` is that of all ranks.
    """

    type: Literal["lease"] = "lease"
    step: int = Field(ge=0)
    wait_s: float = Field(default=0.0, ge=0.0, le=86_400.0)
    policy: Policy = "wait"
    intent: Intent = Intent()


class Granted(Reply):
    """The slot is the rank's until it seals it, or until `deadline_s` seconds have passed and the round aborts."""

    type: Literal["granted"] = "granted"
    slot: int
    deadline_s: float


class Seal(Request):
    type: Literal["seal"] = "seal"
    slot: int = Field(ge=0)
    step: int = Field(ge=0)
    table_digest: str
    turn: int = Field(default=0, ge=0)


class Sealed(Reply):
    """From here on the daemon saves this rank's part, whatever becomes of the rank."""

    type: Literal["sealed"] = "sealed"


class Abandon(Request):
    """The rank gives its lease back unsealed, which aborts the round."""

    type: Literal["abandon"] = "abandon"
    slot: int = Field(ge=0)
    step: int = Field(ge=0)
    problem: dict[str, Any]


class Choose(Request):
    """Which step does this attempt restore? Asked `turn`-th by this rank; every rank's n-th question has one answer."""

    type: Literal["choose"] = "choose"
    turn: int = Field(ge=0)
    step: int | None = Field(default=None, ge=0)
    groups: tuple[str, ...] = ()
    healthy: bool = False  # the newest healthy one, where no step is named
    wait_s: float = Field(default=0.0, ge=0.0, le=86_400.0)


class Chosen(Reply):
    """`notes` say which newer checkpoints were passed over, since they are damaged."""

    type: Literal["chosen"] = "chosen"
    step: int | None
    notes: tuple[str, ...] = ()


class Ended(Request):
    """How the restore of a turn's step ended: well, or with this problem; the answer says whether this rank goes on.

    It comes when the other ranks' restores have ended too, or one of them has met damage; `alone` asks for this rank only.
    """

    type: Literal["ended"] = "ended"
    turn: int = Field(ge=0)
    step: int = Field(ge=0)
    problem: dict[str, Any] | None = None
    alone: bool = False
    wait_s: float = Field(default=0.0, ge=0.0, le=86_400.0)


class Judged(Reply):
    """Without a problem this rank goes on, or, if `again`, reads the step once more: it is well now.

    With one, no rank goes on from this step, but for those that had gone on when it was found: then `late` is set. `newest`
    is the newest step that is not known to be damaged, for a rank that asked alone.
    """

    type: Literal["judged"] = "judged"
    again: bool = False
    problem: dict[str, Any] | None = None
    late: bool = False
    newest: int | None = None


class Held(Request):
    """Does the daemon still hold the slots from which this step was committed?"""

    type: Literal["held"] = "held"
    step: int = Field(ge=0)


class HeldPart(Message):
    """What one rank put into that save: its slot, and the digest of the slot's table."""

    rank: int
    slot: int
    table_digest: str


class HeldSlots(Reply):
    """One part for each rank of the world that saved, and with it its memfd, in this order; none when nothing is held.

    A slot may be leased again at any time, unless the reader locks it first: docs/format.md § 11.
    """

    type: Literal["held-slots"] = "held-slots"
    parts: tuple[HeldPart, ...] = Field(default=(), max_length=HELD_RANKS_MAX)


class Load(Request):
    """Read, once for all of them, what this rank and others of this machine want of a step; a `listing` of it comes along.

    `peers` are the ranks of its launch on this machine, itself included: they are awaited for a moment. `waits` says that
    reading would wait for a disk or a network, as far as this rank can tell.
    """

    type: Literal["load"] = "load"
    step: int = Field(ge=0)
    peers: int = Field(ge=1)
    waits: bool = True


class Loaded(Reply):
    """Memory that comes along and that nobody can change any more: pieces, each proven, behind a `listing` of them.

    With `pieces` 0 none comes. A piece that is not there this rank reads and proves for itself; `notice` says why, where
    there is a reason but that no other rank wants it.
    """

    type: Literal["loaded"] = "loaded"
    pieces: int = 0
    bytes: int = 0
    notice: str = ""


class Unload(Request):
    """The end of what `Load` began, in any case: the memory is not used any more. `read_bytes` this rank read for itself."""

    type: Literal["unload"] = "unload"
    read_bytes: int = Field(ge=0)


class Measured(Request):
    """How long this rank's training stood still for a save: in `save()`, and at the fence behind it. There is no reply."""

    type: Literal["measured"] = "measured"
    step: int = Field(ge=0)
    stall_s: float = Field(ge=0.0, le=86_400.0)


class Farewell(Request):
    """The last message of a rank that ends as planned: nothing need be held for a restart. There is no reply."""

    type: Literal["farewell"] = "farewell"


class Done(Reply):
    type: Literal["done"] = "done"


class Failed(Reply):
    type: Literal["failed"] = "failed"
    problem: dict[str, Any]


class Outcome(Message):
    """What became of a save: committed, or aborted with the reason; one that was dropped says `generation-dropped`."""

    type: Literal["outcome"] = "outcome"
    step: int
    attempt: int
    state: Literal["committed", "aborted"]
    problem: dict[str, Any] | None = None


ToDaemon = Annotated[
    Hello | Reserve | Attach | Lease | Seal | Abandon | Choose | Ended | Held | Load | Unload | Measured | Farewell,
    Field(discriminator="type"),
]
ToRank = Annotated[
    Welcome | Segment | Granted | Sealed | Chosen | Judged | HeldSlots | Loaded | Done | Failed | Outcome,
    Field(discriminator="type"),
]
TO_DAEMON: TypeAdapter[Any] = TypeAdapter(ToDaemon)
TO_RANK: TypeAdapter[Any] = TypeAdapter(ToRank)


def encode_frame(message: Message) -> bytes:
    """One frame; `LimitExceeded` or `InvalidRequest` for a message that no peer would take."""
    try:
        body = message.model_dump_json().encode()
    except PydanticSerializationError as error:
        raise InvalidRequest(f"a message that JSON cannot represent: {error}") from error
    if len(body) > FRAME_BYTES_MAX:
        raise LimitExceeded(f"a message of {len(body)} bytes is over the limit of {FRAME_BYTES_MAX}")
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class FrameDecoder:
    """Cuts a byte stream into messages, wherever the pieces were torn. Does no input or output itself."""

    def __init__(self, messages: TypeAdapter[Any]) -> None:
        self._messages = messages
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete now; `InvalidRequest` or `LimitExceeded` ends the conversation."""
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
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidRequest(
                f"a message that this version does not understand: {where}: {first['msg']}",
                hint="the trainer and the daemon may have different versions of holdfast",
            ) from error

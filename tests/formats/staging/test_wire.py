"""wire: frames between a rank and its daemon, however the stream is cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import CheckpointError, InvalidRequest, LimitExceeded, Pinned
from holdfast_formats.memory_bounds import Bound
from holdfast_formats.root_files import RootMark
from holdfast_formats.staging import wire
from holdfast_formats.staging.wire import FrameDecoder, Message

TO_DAEMON: list[Message] = [
    wire.Hello(id=0, run="run", rank=1, world=2, launch="launch-7", keep_last=3),
    wire.Reserve(id=1, slots=2, data_bytes=2**40, table_bytes=100, bounds=(Bound("memory.max", 2**40, -5, "2:9"),)),
    wire.Attach(id=6, open=(500, 501)),
    wire.Lease(id=2, step=500, wait_s=1.5, restored=400, turn=1, existing="replace", groups=("model",), again=1),
    wire.Foresee(id=25, bounds=(Bound("memory.max", 2**40, 0),)),
    wire.Seal(id=3, slot=0, step=500, table_digest="0123456789abcdef"),
    wire.Abandon(id=4, slot=1, step=500, problem=Pinned("x", hint="y").problem()),
    wire.Choose(id=5, turn=0, step=None, groups=("model", "optim")),
    wire.Held(id=7, step=500),
    wire.HeldElsewhere(id=14, step=500, attempt=2, turn=1, world=8, after=3),
    wire.Fetch(id=15, step=500, attempt=2, world=8, ranges=((4, 0, 4096), (5, 10, 11))),
    wire.WatchLinks(id=9, directory="/out"),
    wire.ReserveAverage(id=16, data_bytes=2**33, table_bytes=100),
    wire.AttachAverage(id=17),
    wire.RingAverage(id=18),
    wire.Withdraw(id=19, step=500),
    wire.Ping(id=20),
    wire.DoJob(id=23, directory="/home/u", job={"kind": "import"}),
    wire.Waits(id=21, step=500),
    wire.Stopping(id=22, passed=-1, step=500),
    wire.CopyOf(id=24, step=500, tier="cloud"),
    wire.Farewell(id=8),
    wire.Measured(id=13, step=2, stall_s=0.25),
    wire.Ended(id=11, turn=0, step=500, problem={"code": "corrupt-extent"}, wait_s=60.0),
]
TO_RANK: list[Message] = [
    wire.Welcome(reply_to=0, attempt=2, node="n", root="/r", mark=RootMark(id="r", device=1, inode=2), version="0.1.0"),
    wire.Segment(reply_to=1, slots=2, data_bytes=8192, table_bytes_max=4096),
    wire.Granted(reply_to=2, slot=1, deadline_s=60.0),
    wire.Foreseen(reply_to=25, slot=1),
    wire.JobProgress(done_bytes=1, total_bytes=2),
    wire.JobDone(reply_to=23, result={"files": 1}),
    wire.Sealed(reply_to=3),
    wire.Chosen(reply_to=5, step=500, notes=("step 600 is damaged",)),
    wire.Judged(reply_to=11, problem={"code": "corrupt-extent"}, late=True),
    wire.HeldSlots(reply_to=7, parts=(wire.HeldPart(rank=0, slot=1, table_digest="0123456789abcdef"),)),
    wire.Fetched(reply_to=15, lost=(4,)),
    wire.Done(reply_to=4),
    wire.StopAt(reply_to=22, step=500, missing=(1, 2)),
    wire.CopyFound(reply_to=24, copied=False, why="it is being copied"),
    wire.Stop(),
    wire.Failed(reply_to=2, problem=Pinned("x").problem()),
    wire.Outcome(step=500, attempt=2, state="committed", left_out=("ema",), spares="gA=="),
    wire.Outcome(step=500, attempt=2, state="aborted", problem={"code": "no-space", "检": 1}),
]


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(("adapter", "messages"), [(wire.TO_DAEMON, TO_DAEMON), (wire.TO_RANK, TO_RANK)])
@given(data=st.data())
def test_messages_survive_any_cut_of_the_stream(adapter: object, messages: list[Message], data: st.DataObject) -> None:
    """However the kernel hands the bytes over, the same messages come out, in order, each as soon as it is whole."""
    sent = data.draw(st.lists(st.sampled_from(messages), max_size=6))
    stream = b"".join(map(wire.encode_frame, sent))
    cuts = sorted([0, len(stream), *data.draw(st.lists(st.integers(0, len(stream)), max_size=10))])
    decoder = FrameDecoder(adapter)
    received = []
    for start, stop in itertools.pairwise(cuts):
        received += decoder.feed(stream[start:stop])
        whole = sum(len(b"".join(map(wire.encode_frame, sent[: i + 1]))) <= stop for i in range(len(sent)))
        assert len(received) == whole
    assert received == sent


def test_every_message_of_the_protocol_is_exercised_here() -> None:
    """The two lists above hold each message once, and each direction refuses the other's."""
    for adapter, union, messages in ((wire.TO_DAEMON, wire.ToDaemon, TO_DAEMON), (wire.TO_RANK, wire.ToRank, TO_RANK)):
        assert {type(message) for message in messages} == set(union.__origin__.__args__)
        for foreign in TO_RANK if messages is TO_DAEMON else TO_DAEMON:
            with pytest.raises(InvalidRequest):
                FrameDecoder(adapter).feed(wire.encode_frame(foreign))


def test_a_frame_is_what_format_md_says() -> None:
    """Four bytes of little-endian length, then JSON with a type."""
    encoded = wire.encode_frame(wire.Done(reply_to=7))
    assert int.from_bytes(encoded[:4], "little") == len(encoded) - 4
    assert json.loads(encoded[4:]) == {"type": "done", "reply_to": 7}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b'{"type":"done"}',
        b'{"type":"nothing","id":1}',
        b'{"type":"lease","id":-1,"step":5}',
        b'{"type":"lease","id":1,"step":-5}',
        b'{"type":"lease","id":1,"step":5,"wait_s":1e9}',
        b'{"type":"lease","id":1,"step":5,"wait_s":NaN}',
        b'{"type":"lease","id":1,"step":5,"more":1}',
        b'{"type":"lease","id":1}',
        b'{"type":"reserve","id":1,"slots":0,"data_bytes":1,"table_bytes":1}',
        b'{"type":"hello","id":1,"run":"r","rank":0,"world":1,"launch":""}',
        b'{"type":"hello","id":1,"run":"\\ud800","rank":0,"world":1,"launch":"x"}',
        b'{"type":' + b"[" * 100_000,
    ],
)
def test_what_is_not_a_message_is_refused(body: bytes) -> None:
    """Unknown types and fields, numbers out of range, broken JSON: one named error with a hint about versions."""
    with pytest.raises(InvalidRequest, match="does not support") as caught:
        FrameDecoder(wire.TO_DAEMON).feed(frame(body))
    assert "versions" in caught.value.hint


def test_no_frame_is_larger_than_the_limit() -> None:
    """A length over the limit is refused before its bytes are awaited, and such a message is not sent."""
    assert FrameDecoder(wire.TO_DAEMON).feed(wire.FRAME_BYTES_MAX.to_bytes(4, "little")) == []
    with pytest.raises(LimitExceeded, match="a frame of"):
        FrameDecoder(wire.TO_DAEMON).feed((wire.FRAME_BYTES_MAX + 1).to_bytes(4, "little"))
    with pytest.raises(LimitExceeded, match="a message of"):
        wire.encode_frame(wire.Failed(reply_to=1, problem={"detail": "x" * wire.FRAME_BYTES_MAX}))


def test_a_message_that_json_cannot_state_is_not_sent() -> None:
    """Text that is not valid Unicode is a named error on the sender's side."""
    with pytest.raises(InvalidRequest, match="JSON cannot represent"):
        wire.encode_frame(wire.Failed(reply_to=1, problem={"detail": "\ud800"}))


@given(st.binary(max_size=60), st.lists(st.integers(0, 64), max_size=4))
def test_random_bytes_give_named_errors(noise: bytes, cuts: list[int]) -> None:
    """Noise on the socket, framed or not, ends in a named error or waits for more."""
    for stream in (noise, frame(noise), frame(b'{"type":"hello",' + noise + b"}")):
        places = sorted([0, len(stream), *(min(cut, len(stream)) for cut in cuts)])
        decoder = FrameDecoder(wire.TO_DAEMON)
        try:
            assert [m for a, b in itertools.pairwise(places) for m in decoder.feed(stream[a:b])] == []
        except CheckpointError:
            continue

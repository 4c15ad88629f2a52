"""Routes for ranks that share no memory with the daemon: they upload their slots in chunks and ask for outcomes."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Annotated, Literal

import zstandard
from fastapi import APIRouter, Depends, Header, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from holdfast_formats.errors import (
    CheckpointError,
    DaemonGone,
    DeadlineExceeded,
    InvalidRequest,
    LimitExceeded,
    from_problem,
)
from holdfast_formats.rest import bodies
from holdfast_formats.staging import messages
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.access.bodies import OCTETS
from holdfast_service.api.services import Viewer, Wired
from holdfast_service.daemon.arena.shares import ShareRequester
from holdfast_service.daemon.arena.upload import Chunk
from holdfast_service.daemon.remote import RemoteRanks
from holdfast_service.daemon.remote_rank import RemoteRank

CHUNK_BYTES_MAX = 4 * 2**20  # before compression
UPLOAD_BYTES_MAX = 24 * 2**20  # what all chunks together may take of memory at a time, packed and unpacked
BODY_WAIT_MAX_S = 60.0  # for one chunk: slower clients must send smaller chunks
WAIT_MAX_S = 20.0
END_POLL_S = 0.2
ZSTD_WINDOW_BYTES_MAX = 2**23
_NOT_STATED = -1  # zstandard's value for a frame without a content size

_RANK = "/ranks/{rank_id}"
_UPLOAD = f"{_RANK}/uploads/{{number}}"
_CONTENT_RANGE = re.compile(r"bytes (\d{1,16})-(\d{1,16})/(\d{1,16})")
_DIGEST = re.compile(r"xxh3-64=([0-9a-f]{16})")

router = APIRouter(prefix="/v1", tags=["uploads"], responses=problems.RESPONSES)


def _ranks(services: Wired) -> RemoteRanks:
    return services.remote


Ranks = Annotated[RemoteRanks, Depends(_ranks)]
RankId = Annotated[
    str,
    Path(pattern=r"^[0-9a-f]{32}$", description="random ID chosen by the rank; a client that knows it can act as the rank"),
]
Number = Annotated[int, Path(ge=0, le=2**53, description="number of the upload, counted by the rank")]


def _rank(ranks: Ranks, rank_id: RankId, viewer: Viewer) -> RemoteRank:
    """The rank with this ID, if the caller may see its run; otherwise it does not exist."""
    return ranks.find(rank_id, viewer.sees)


def _own(viewer: Viewer, hello: bodies.RankHello) -> bodies.RankHello:
    """Check the parsed hello: its run must be the caller's."""
    viewer.require_run(hello.run)
    return hello


Known = Annotated[RemoteRank, Depends(_rank)]


@router.put(
    _RANK, dependencies=needs("write", "rank", act="rank-registered"), summary="Register a rank; can be repeated safely"
)
def put_rank(
    services: Wired, ranks: Ranks, rank_id: RankId, hello: Annotated[bodies.RankHello, Depends(_own)], viewer: Viewer
) -> bodies.RankWelcome:
    """Ranks with the same `launch` share an attempt. A rank that restarts under another ID replaces its old one.

    Without the scope `admin`, `keep_last` removes nothing; `notices` says so.
    """
    asker = ShareRequester(viewer.tenant, owner=viewer.scope == "admin")
    rank = ranks.hello(rank_id, hello, asker)
    return bodies.RankWelcome(
        attempt=rank.who.attempt,
        node=services.node().name,
        root=services.root.label,
        root_id=ranks.root_id,
        version=services.version,
        silence_max_s=ranks.silence_max_s,
        chunk_bytes_max=CHUNK_BYTES_MAX,
        notices=ranks.notices(hello, asker.owner),
    )


@router.delete(
    _RANK, dependencies=needs("write", "rank"), status_code=204, summary="Disconnect a rank; sealed slots are still saved"
)
def delete_rank(ranks: Ranks, rank_id: RankId, viewer: Viewer) -> None:
    try:
        ranks.find(rank_id, viewer.sees)
    except CheckpointError:
        return  # it has left already, or never registered
    ranks.leave(rank_id)


@router.put(
    f"{_RANK}/segment",
    dependencies=needs("write", "rank"),
    status_code=204,
    summary="Reserve memory for a rank's slots; 413 if the arena has too little",
)
def put_segment(rank: Known, room: messages.Room) -> None:
    rank.reserve(room)


@router.put(
    _UPLOAD,
    dependencies=needs("write", "rank"),
    summary="Start an upload: lease a slot for a step; 409 if the step may not be saved",
)
def put_upload(rank: Known, number: Number, wanted: messages.SlotRequest) -> bodies.Upload:
    """If no slot is free because storage is behind, the policy decides: an older save or this one is dropped (this
    one with 503 `generation-dropped`); under `wait` it is 429 `arena-full`: try again. Safe to repeat.
    """
    return rank.open(number, wanted)


@router.get(_UPLOAD, dependencies=needs("read", "rank"), summary="Progress and outcome of an upload")
def get_upload(rank: Known, number: Number) -> bodies.Upload:
    return rank.state(number)


@router.put(
    f"{_UPLOAD}/{{part}}", dependencies=needs("write", "rank", OCTETS), summary="Upload a chunk of a slot's data or table"
)
async def put_chunk(
    request: Request,
    rank: Known,
    number: Number,
    part: Literal["data", "table"],
    content_range: Annotated[str, Header(description="bytes FIRST-LAST/TOTAL: the position of this chunk in its part")],
    x_content_digest: Annotated[str, Header(description="xxh3-64=…, of the chunk before any Content-Encoding")],
) -> bodies.Upload:
    """Chunks come in order; each is accepted as a whole after its digest was checked, or not at all. A repeated
    chunk changes nothing. `Content-Encoding: zstd` is supported.
    """
    offset, length = _span(content_range)
    stated = _DIGEST.fullmatch(x_content_digest.strip())
    if stated is None:
        raise InvalidRequest(f"X-Content-Digest {x_content_digest!r} is not xxh3-64= and 16 hexadecimal digits")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "zstd"):
        raise InvalidRequest(f"Content-Encoding {encoding!r} is not supported", hint="use zstd, or no encoding")
    rank.check_room(number, part, offset + length)
    packed = encoding == "zstd"
    async with request.app.state.uploads.taken(2 * length if packed else length):
        body = await _body(request, length, exact=not packed)
        chunk = await run_in_threadpool(_chunk, body, offset, length, (encoding, stated[1]))
        return await run_in_threadpool(rank.write, number, part, chunk)


@router.post(
    f"{_UPLOAD}/seal",
    dependencies=needs("write", "rank"),
    summary="Seal the slot: it is complete, and the daemon saves it even if the rank dies",
)
def seal_upload(rank: Known, number: Number, whole: bodies.SealRequest) -> bodies.Upload:
    return rank.seal(number, whole)


@router.post(
    f"{_UPLOAD}/abandon", dependencies=needs("write", "rank"), summary="Abandon an upload, and with it the save of this step"
)
def abandon_upload(rank: Known, number: Number, why: messages.AbandonRequest) -> bodies.Upload:
    return rank.abandon(number, from_problem(why.problem))


@router.put(
    f"{_RANK}/waiting",
    dependencies=needs("write", "rank"),
    status_code=204,
    summary="Report that this rank starts no save before a step's save ends; saves waiting only for such ranks end",
)
def put_waiting(rank: Known, said: messages.Waiting) -> None:
    rank.waits(said.step)


@router.put(
    f"{_RANK}/stopping",
    dependencies=needs("write", "rank"),
    summary="The launch must stop: reports how far this rank is; returns the last step once all ranks have reported",
)
def put_stopping(rank: Known, said: messages.PassedStep) -> messages.LastStep:
    return rank.stopping(said)


@router.get(
    f"{_RANK}/outcomes",
    dependencies=needs("read", "rank"),
    summary="Uploads that have ended; can wait for one. Also keeps the rank alive",
)
async def get_outcomes(
    ranks: Ranks,
    rank: Known,
    after: Annotated[int, Query(ge=0, description="`next` of the previous response")] = 0,
    wait_s: Annotated[float, Query(ge=0, le=WAIT_MAX_S, description="seconds to wait for an upload to end")] = 0,
) -> bodies.Outcomes:
    loop, heard = asyncio.get_running_loop(), asyncio.Event()

    def listener() -> None:
        loop.call_soon_threadsafe(heard.set)

    with rank.listening(listener):
        outcomes = rank.outcomes(after)
        if not (outcomes.items or outcomes.stop) and not ranks.closing:
            try:
                await asyncio.wait_for(heard.wait(), wait_s)
            except asyncio.TimeoutError:
                return outcomes
            outcomes = rank.outcomes(after)
    if ranks.closing:
        raise DaemonGone("the daemon is shutting down")
    return outcomes


@router.put(
    f"{_RANK}/choices/{{turn}}",
    dependencies=needs("write", "rank"),
    summary="Which step to restore; all ranks get the same answer to their n-th request",
)
def put_choice(
    services: Wired, rank: Known, turn: Annotated[int, Path(ge=0, le=2**53)], question: bodies.Question
) -> messages.Answer:
    """504 while earlier saves are still being written: ask again."""
    return _ranks(services).choose(rank.who, turn, question)


@router.put(
    f"{_RANK}/choices/{{turn}}/end",
    dependencies=needs("write", "rank"),
    summary="Report how a restore ended; answers whether this rank continues, once all ranks have reported",
)
async def put_choice_end(
    services: Wired, rank: Known, turn: Annotated[int, Path(ge=0, le=2**53)], end: bodies.RestoreEnd
) -> messages.RestoreVerdict:
    """504 while other ranks have not reported yet: ask again. Reported damage is checked, and ends the turn for
    all ranks.
    """
    limit = time.monotonic() + end.wait_s
    while True:
        try:  # many ranks may wait: none of them keeps a thread meanwhile
            return await asyncio.to_thread(_ranks(services).restores.judge, rank.who, turn, end, 0.0)
        except DeadlineExceeded:
            if time.monotonic() >= limit:
                raise
        await asyncio.sleep(END_POLL_S)


def _span(content_range: str) -> tuple[int, int]:
    """Offset and length of a chunk; `InvalidRequest` or `LimitExceeded` if they are not valid."""
    match = _CONTENT_RANGE.fullmatch(content_range.strip())
    first, last, total = (int(number) for number in match.groups()) if match else (0, 0, 0)
    if not first <= last < total:
        raise InvalidRequest(f"Content-Range {content_range!r} is not bytes FIRST-LAST/TOTAL with FIRST <= LAST < TOTAL")
    if last - first >= CHUNK_BYTES_MAX:
        raise LimitExceeded(f"a chunk of {last - first + 1} bytes is over the limit of {CHUNK_BYTES_MAX}")
    return first, last - first + 1


async def _body(request: Request, length: int, exact: bool) -> bytearray:
    """Read the request's body: `length` bytes if `exact`, otherwise at most that many."""
    try:
        return await asyncio.wait_for(_read(request, length, exact), BODY_WAIT_MAX_S)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(
            f"the chunk did not arrive within {BODY_WAIT_MAX_S:.0f} s", hint="send smaller chunks"
        ) from None
    except ClientDisconnect:
        raise InvalidRequest("the connection broke in the middle of a chunk", hint="send it again") from None


async def _read(request: Request, length: int, exact: bool) -> bytearray:
    body = bytearray()
    async for part in request.stream():
        if len(body) + len(part) > length:
            raise LimitExceeded(f"the body has more than the {length} bytes that its Content-Range states")
        body += part
    if exact and len(body) != length:
        raise InvalidRequest(f"the body has {len(body)} bytes, its Content-Range states {length}")
    return body


def _chunk(body: bytearray, offset: int, length: int, stated: tuple[str, str]) -> Chunk:
    encoding, digest = stated
    return Chunk(offset, body if encoding == "identity" else _unpack(body, length), digest)


def _unpack(body: bytearray, length: int) -> bytes:
    """Decompress exactly `length` bytes from a zstd frame; a frame with more or fewer is refused without further
    memory.
    """
    wrong = f"the zstd frame does not contain the {length} bytes that Content-Range states"
    try:
        stated = zstandard.frame_content_size(body)
        if stated not in (length, _NOT_STATED):  # what it states is what would be reserved
            raise InvalidRequest(wrong)
        # At one stroke: the bytes made are the window, so no other memory is taken.
        unpacked = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX).decompress(
            body, max_output_size=length, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the body is not a valid zstd frame: {error}") from error
    if len(unpacked) != length:
        raise InvalidRequest(wrong)
    return unpacked

"""Files over HTTP: single ranges, validators, and bodies of which every byte was proven before it left (I7)."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import aiofiles
from starlette.responses import Response, StreamingResponse

from holdfast_formats import proof
from holdfast_formats.errors import CorruptManifest, Damaged, InvalidRequest, NoSuchResource, StorageFailed
from holdfast_formats.proof import Piece
from holdfast_service.storage import Tier

log = logging.getLogger(__name__)

_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")
Fetch = Callable[[str, int, int], Awaitable[bytes]]  # file, first byte, length -> the bytes, fewer only at the file's end


class Delivery(NamedTuple):
    """A file that can be sent: what it is, its pieces, and where its bytes come from."""

    name: str
    media_type: str
    etag: str
    size: int
    pieces: Sequence[Piece]
    fetch: Fetch


class TransferAborted(Exception):
    """Damage was found after the first bytes had left: all that is left to do is to cut the connection."""


def fetch_posix(directory: Path) -> Fetch:
    """Read from a directory without blocking the event loop; `StorageFailed` and `CorruptManifest` by file name."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)

    async def fetch(name: str, start: int, length: int) -> bytes:
        try:
            async with aiofiles.open(directory / name, "rb", buffering=0, opener=opener) as file:
                await file.seek(start)
                parts: list[bytes] = []
                while length > 0 and (part := await file.read(length)):
                    parts.append(part)
                    length -= len(part)
        except FileNotFoundError as error:
            raise CorruptManifest(f"{name} is missing", file=name) from error
        except OSError as error:
            raise StorageFailed(f"{name} cannot be read: {error.strerror}", file=name, errno=error.errno) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    return fetch


def fetch_tier(tier: Tier, directory: str) -> Fetch:
    """Read through the tier, in a thread."""

    async def fetch(name: str, start: int, length: int) -> bytes:
        try:
            return await asyncio.to_thread(tier.read, f"{directory}/{name}", start, length)
        except NoSuchResource as error:
            raise CorruptManifest(f"{name} is missing", file=name) from error

    return fetch


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """[start, stop) of a single-range header, or None where it is to be ignored (RFC 9110 § 14.2).

    `InvalidRequest` when no byte of the file is in it.
    """
    match = _RANGE.fullmatch(header.strip().replace(" ", "")) if header else None
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        start, stop = max(size - int(match[2]), 0), size
    else:
        start, stop = int(match[1]), min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    if start >= stop:
        raise InvalidRequest(f"range {header!r} holds no byte of a file of {size} bytes")
    return start, stop


def not_modified(header: str | None, etag: str) -> bool:
    """Whether an If-None-Match header says that the asker has this already."""
    return header is not None and any(tag.strip().removeprefix("W/") in (etag, "*") for tag in header.split(","))


def describe(delivery: Delivery) -> dict[str, str]:
    """The headers that a file always has."""
    return {
        "Accept-Ranges": "bytes",
        "ETag": delivery.etag,
        "Content-Length": str(delivery.size),
        "Content-Type": delivery.media_type,
        "X-Content-Type-Options": "nosniff",
    }


async def deliver(delivery: Delivery, asked: Mapping[str, str]) -> Response:
    """200, 206 or 304. Raises `Damaged` while nothing is sent, `InvalidRequest` for a range outside the file."""
    headers = describe(delivery)
    if not_modified(asked.get("if-none-match"), delivery.etag):
        return Response(status_code=304, headers={"ETag": delivery.etag})
    wanted = asked.get("range")
    if asked.get("if-range") not in (None, delivery.etag):
        wanted = None
    span = parse_range(wanted, delivery.size)
    start, stop = span or (0, delivery.size)
    headers["Content-Length"] = str(stop - start)
    if span is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{delivery.size}"
    body = _proven(delivery, start, stop)
    first = await anext(body, b"")
    return StreamingResponse(_rest(first, body), 206 if span else 200, headers)


async def _proven(delivery: Delivery, start: int, stop: int) -> AsyncIterator[bytes]:
    """The bytes [start, stop), read as whole pieces and checked before they are cut."""
    for batch in proof.batches(proof.overlapping(delivery.pieces, start, stop)):
        at = batch[0].start
        data = memoryview(await delivery.fetch(delivery.name, at, batch[-1].stop - at))
        await asyncio.to_thread(_check, batch, data)
        yield bytes(data[max(start - at, 0) : min(stop, batch[-1].stop) - at])


def _check(batch: Sequence[Piece], data: memoryview) -> None:
    for piece in batch:
        proof.check(piece, data[piece.start - batch[0].start : piece.stop - batch[0].start])


async def _rest(first: bytes, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    try:
        async for part in body:
            yield part
    except (Damaged, StorageFailed) as error:
        log.error("transfer cut: %s", error)
        raise TransferAborted(error.detail) from error

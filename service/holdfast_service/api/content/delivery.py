"""Bodies over HTTP: single ranges, validators, compression, and verification before sending (I7)."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import aiofiles
import zstandard
from starlette.responses import Response, StreamingResponse

from holdfast_formats.disk import verification
from holdfast_formats.disk.verification import PieceColumns
from holdfast_formats.errors import CorruptManifest, Damaged, InvalidRequest, NoSuchResource, StorageFailed
from holdfast_formats.files import Files
from holdfast_service.api import problems
from holdfast_service.api.read_protection import met

log = logging.getLogger(__name__)

ZSTD_LEVEL = 3
SENT_BYTES = 2**19  # handed to the server at once: where larger ones are copied, fresh memory costs more than the copy
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")
_WEIGHT = re.compile(r"q=(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)")
Fetch = Callable[[str, int, int], Awaitable[bytes]]  # file, first byte, length -> the bytes, fewer only at the file's end
Body = Callable[[int, int], AsyncGenerator[bytes, None]]  # first byte, one behind the last -> the bytes


class Delivery(NamedTuple):
    """A body: its length, its strong validator, and its bytes. `vary` lists headers that select it."""

    media_type: str
    etag: str
    size: int
    body: Body
    vary: tuple[str, ...] = ()


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
            raise StorageFailed(f"cannot read {name}: {error.strerror}", file=name, errno=error.errno) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    return fetch


def fetch_stored(files: Files, directory: str) -> Fetch:
    """As `fetch_posix`, for files of another storage."""

    async def fetch(name: str, start: int, length: int) -> bytes:
        try:
            return await asyncio.to_thread(files.read, f"{directory}/{name}", start, length)
        except NoSuchResource as error:
            raise CorruptManifest(f"{name} is missing", file=name) from error

    return fetch


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """[start, stop) of a single-range header, or None to ignore it (RFC 9110 § 14.2). `InvalidRequest` for a range outside
    of the file.
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
        raise InvalidRequest(f"the range {header!r} is outside a file of {size} bytes")
    return start, stop


def not_modified(header: str | None, etag: str) -> bool:
    """Whether an If-None-Match header matches."""
    return header is not None and any(tag.strip().removeprefix("W/") in (etag, "*") for tag in header.split(","))


def weights(header: str) -> dict[str, float]:
    """The values in an Accept or Accept-Encoding header, in lower case, each with its weight (RFC 9110 § 12.4.2)."""
    weights_by_name: dict[str, float] = {}
    for item in header.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        weight = next((match for match in map(_WEIGHT.fullmatch, parameters) if match), None)
        weights_by_name[name] = float(weight[1]) if weight else 1.0
    return weights_by_name


def prefers_zstd(header: str) -> bool:
    """Whether an Accept-Encoding header prefers zstd to every other compression.

    Clients that accept anything list several. They get the length and the ranges that only plain bytes have.
    """
    named = weights(header)
    zstd, plain = named.pop("zstd", 0.0), named.pop("identity", 0.0)
    return zstd > 0 and zstd >= plain and all(zstd > weight for weight in named.values())


def describe(delivery: Delivery, packed: bool = False) -> dict[str, str]:
    """The headers of every body. A compressed one is another representation, with another validator."""
    headers = {
        "ETag": f'{delivery.etag[:-1]}-zstd"' if packed else delivery.etag,
        "Vary": ", ".join((*delivery.vary, "Accept-Encoding")),
        "Content-Type": delivery.media_type,
        "X-Content-Type-Options": "nosniff",
    }
    if packed:
        return {**headers, "Content-Encoding": "zstd"}
    return {**headers, "Accept-Ranges": "bytes", "Content-Length": str(delivery.size)}


async def deliver(delivery: Delivery, asked: Mapping[str, str]) -> Response:
    """200, 206, 304, or 416 for a range outside the body. Raises what the body raises, before anything is sent.

    Ranges are of the plain bytes, whatever Accept-Encoding.
    """
    packed = "range" not in asked and prefers_zstd(asked.get("accept-encoding", ""))
    headers = describe(delivery, packed)
    if not_modified(asked.get("if-none-match"), headers["ETag"]):
        return _unchanged(headers)
    wanted = asked.get("range")
    if asked.get("if-range") not in (None, delivery.etag):
        wanted = None
    try:
        span = parse_range(wanted, delivery.size)
    except InvalidRequest as error:
        return problems.problem_response(error, 416, {"Content-Range": f"bytes */{delivery.size}"})
    start, stop = span or (0, delivery.size)
    if not packed:
        headers["Content-Length"] = str(stop - start)
    if span is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{delivery.size}"
    body = delivery.body(start, stop)
    first = await anext(body, b"")
    sent = _rest(first, body)
    return StreamingResponse(_packed(sent) if packed else sent, 206 if span else 200, headers)


def deliver_head(delivery: Delivery, asked: Mapping[str, str]) -> Response:
    """The headers of `deliver`, without reading the body."""
    packed = "range" not in asked and prefers_zstd(asked.get("accept-encoding", ""))
    headers = describe(delivery, packed)
    if not_modified(asked.get("if-none-match"), headers["ETag"]):
        return _unchanged(headers)
    response = Response(headers=headers)
    if packed:
        del response.headers["Content-Length"]  # unknown without compressing
    return response


def _unchanged(headers: Mapping[str, str]) -> Response:
    return Response(status_code=304, headers={name: headers[name] for name in ("ETag", "Vary")})


def proven(name: str, pieces: PieceColumns, fetch: Fetch) -> Body:
    """The body of a stored file: whole pieces are read, and checked before they are cut."""

    async def body(start: int, stop: int) -> AsyncGenerator[bytes, None]:
        for batch in verification.batches([verification.overlapping(pieces, start, stop)]):
            at = batch.start
            data = memoryview(await fetch(name, at, batch.stop - at))
            await asyncio.to_thread(_check, batch, data)
            for part in parts_of(data[max(start - at, 0) : min(stop, batch.stop) - at]):
                yield part

    return body


def parts_of(data: memoryview) -> Iterator[bytes]:
    """Copies of the bytes, in parts of a good size for the server; the memory may be reused then."""
    for at in range(0, len(data), SENT_BYTES):
        yield bytes(data[at : at + SENT_BYTES])


def _check(batch: PieceColumns, data: memoryview) -> None:
    for piece in batch:
        verification.check(piece, data[piece.start - batch.start : piece.stop - batch.start])


async def _rest(first: bytes, body: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(body):
        yield first
        try:
            async for part in body:
                yield part
        except (Damaged, StorageFailed) as error:
            log.error("transfer cut off: %s", error)
            if isinstance(error, Damaged):
                met(error)
            raise problems.TransferAborted(error.detail) from error


async def _packed(body: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    packer = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj()
    async with aclosing(body):
        async for part in body:
            packed = await asyncio.to_thread(packer.compress, part)
            if packed:
                yield packed
    yield packer.flush()

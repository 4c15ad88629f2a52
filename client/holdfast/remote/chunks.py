"""Sends parts of a slot over HTTP, in chunks that suit the link, compressed with zstd if that is faster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import zstandard

from holdfast.remote.own_slots import OwnSave
from holdfast.rest.api import Api, Part, UploadChunk
from holdfast_formats.digest import digest
from holdfast_formats.rest import bodies

log = logging.getLogger(__name__)

CHUNK_BYTES_MIN = 2**18
CHUNK_SECONDS = 1.0  # what a chunk should take: bounds the loss by a broken link, and how late a change of its speed is seen
ZSTD_LEVEL = 1
ZSTD_GAIN_MIN = 1.25  # compression uses cores that training wants: only for a clear gain
SAMPLE_BYTES = 2**18
SAMPLE_EVERY = 16  # chunks
SMOOTHING = 0.5  # weight of the newest measurement
PROGRESS_EVERY_S = 30.0


class LinkPace:
    """Measured speeds of link and compression, in bytes a second. Starts uncompressed, with small chunks."""

    def __init__(self, chunk_bytes_max: int) -> None:
        self._chunk_bytes_max = chunk_bytes_max
        self.link_bps = 0.0
        self.codec_bps = 0.0
        self.ratio = 1.0  # compressed ÷ plain

    @property
    def chunk_bytes(self) -> int:
        """Bytes to send at a time, before compression."""
        wanted = int(self.link_bps * CHUNK_SECONDS / (self.ratio if self.packs else 1.0))
        return min(max(wanted, CHUNK_BYTES_MIN), self._chunk_bytes_max)

    @property
    def packs(self) -> bool:
        """Whether the next chunk is compressed. Compression runs beside sending, so the slower of the two sets the pace."""
        if not self.link_bps or not self.codec_bps:
            return False
        return min(self.codec_bps, self.link_bps / max(self.ratio, 1e-6)) > ZSTD_GAIN_MIN * self.link_bps

    def sent(self, wire_bytes: int, seconds: float) -> None:
        """Record that a chunk has arrived. Tiny ones measure the round trip, and count only if there are no others."""
        if wire_bytes >= CHUNK_BYTES_MIN // 4 or not self.link_bps:
            self.link_bps = _smoothed(self.link_bps, wire_bytes / max(seconds, 1e-6))

    def packed(self, plain_bytes: int, packed_bytes: int, seconds: float) -> None:
        """Record a compression, of a chunk or a sample."""
        self.ratio = packed_bytes / plain_bytes if not self.codec_bps else _smoothed(self.ratio, packed_bytes / plain_bytes)
        self.codec_bps = _smoothed(self.codec_bps, plain_bytes / max(seconds, 1e-6))


def _smoothed(before: float, measured: float) -> float:
    return measured if not before else before + SMOOTHING * (measured - before)


class Sent(NamedTuple):
    """The cost of one part."""

    plain_bytes: int
    wire_bytes: int


class ChunkSender:
    """Sends parts of one rank's uploads, one after another. Use and `close` it from one thread."""

    def __init__(self, api: Api, rank_id: str, chunk_bytes_max: int) -> None:
        self._api, self._rank_id = api, rank_id
        self.pace = LinkPace(chunk_bytes_max)
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self._prepared = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="holdfast-pack")

    def close(self) -> None:
        self._pool.shutdown()

    def bring(self, save: OwnSave) -> bodies.Upload:
        """Open the upload of a sealed slot (or find it open), send the missing chunks, and seal it."""
        began = time.monotonic()
        assert save.whole is not None, "only a sealed slot can be uploaded"
        reached = self._api.open_upload(self._rank_id, save.number, save.wanted)
        save.open = True
        if reached.state != "open":
            return reached
        data, table = save.contents()
        sent = self.send(save, "data", data, reached.data_bytes)
        self.send(save, "table", table, reached.table_bytes)
        seconds = time.monotonic() - began
        log.info("step %d: %d bytes uploaded as %d in %.1f s", save.step, sent.plain_bytes, sent.wire_bytes, seconds)
        whole = save.whole.model_copy(update={"stall_s": save.stall_s})
        return self._api.seal_upload(self._rank_id, save.number, whole)

    def send(self, save: OwnSave, part: Part, data: memoryview, received: int) -> Sent:
        """Send what the daemon has not `received` yet. Raises what interrupted it; chunks that arrived before stay there."""
        began = reported = time.monotonic()
        first, wire_bytes = received, 0
        ahead = self._prepare(data, received)
        while received < len(data):
            chunk = ahead()
            received = chunk.offset + chunk.length
            ahead = self._prepare(data, received)  # the next one is compressed while this one is sent
            before = time.monotonic()
            self._api.put_chunk(self._rank_id, save.number, part, chunk)
            save.arrived += chunk.length
            now = time.monotonic()
            self.pace.sent(len(chunk.body), now - before)
            wire_bytes += len(chunk.body)
            if now - reported > PROGRESS_EVERY_S:
                reported = now
                log.info("upload %d: %d of %d bytes after %.0f s", save.number, received, len(data), now - began)
        return Sent(received - first, wire_bytes)

    def _prepare(self, data: memoryview, offset: int) -> Callable[[], UploadChunk]:
        try:
            return self._pool.submit(self._chunk, data, offset).result
        except RuntimeError:  # the process is ending, and its sealed saves are sent first: no pool works any more by then
            return partial(self._chunk, data, offset)

    def _chunk(self, data: memoryview, offset: int) -> UploadChunk:
        plain = data[offset : offset + self.pace.chunk_bytes]
        chunk = UploadChunk(offset, len(plain), len(data), digest(plain), plain)
        if not plain:
            return chunk
        self._prepared += 1
        if self.pace.packs:
            packed = self._pack(plain)
            return chunk._replace(body=packed, encoding="zstd") if len(packed) < len(plain) else chunk
        if self._prepared % SAMPLE_EVERY == 1:
            self._pack(plain[:SAMPLE_BYTES])
        return chunk

    def _pack(self, plain: memoryview) -> bytes:
        began = time.monotonic()
        packed = self._compressor.compress(plain)
        self.pace.packed(len(plain), len(packed), time.monotonic() - began)
        return packed

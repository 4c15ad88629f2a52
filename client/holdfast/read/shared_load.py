"""Extents that several ranks of a machine want are read and verified once, by the daemon, into shared memory.

The memory is sealed, so verified bytes cannot change. Extents that only this rank wants it reads itself, and all
of them if sharing fails, which is a note and not an error.
"""

from __future__ import annotations

import bisect
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from holdfast.memory import direct_io
from holdfast.memory.mapping import Mapping
from holdfast.read.overwrite_guard import Overwriting
from holdfast.read.reader import CheckpointReader
from holdfast.read.requests import Want
from holdfast.transport import Transport
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import CheckpointError, DaemonGone, InvalidRequest
from holdfast_formats.staging import piece_list, wire

CHUNK_BYTES = 2**21
PROBES = 16  # pieces looked at to tell whether they are in the page cache
LOAD_WAIT_S = 3600.0  # the disk is waited for, not the daemon: when that ends, so does the wait
_SEALED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK


class LentMemory:
    """Pieces of a checkpoint's files in sealed memory: a source of only these pieces."""

    chunk_bytes = CHUNK_BYTES
    label = "shared memory of this machine's daemon"

    def __init__(self, fd: int) -> None:
        """`InvalidRequest` for memory that can still change, or holds something else. The descriptor stays the caller's."""
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALED == _SEALED
            memory = Mapping(fd, write=False).memory if sealed else memoryview(b"")
        except OSError as error:
            raise InvalidRequest(f"cannot read the daemon's shared memory: {error.strerror}") from error
        if not sealed:
            raise InvalidRequest("the daemon's shared memory is not sealed, so verified bytes could still change")
        self._memory = memory
        held = piece_list.decode(memory)
        rows = held.rows
        ends = rows["at"] + rows["length"]
        if len(rows) and int(ends.max()) > len(memory):
            raise InvalidRequest("the daemon's shared memory is shorter than announced")
        names = [held.files[number] for number in rows["file"].tolist()]
        starts, lengths, digests = rows["start"].tolist(), rows["length"].tolist(), rows["digest"].tolist()
        self._pieces = dict(zip(zip(names, starts, strict=True), zip(lengths, digests, strict=True), strict=True))
        self._runs: dict[str, list[tuple[int, int, int]]] = {name: [] for name in held.files}
        stops = rows["start"] + rows["length"]
        follows = (rows["file"][:-1] == rows["file"][1:]) & (stops[:-1] == rows["start"][1:]) & (ends[:-1] == rows["at"][1:])
        begins = np.flatnonzero(np.concatenate(([True], ~follows))[: len(rows)])
        for first, behind in zip(begins.tolist(), [*begins[1:].tolist(), len(rows)], strict=True):
            stop = starts[behind - 1] + lengths[behind - 1]
            self._runs[names[first]].append((starts[first], stop, int(rows["at"][first])))

    def holds(self, piece: Piece) -> bool:
        """Whether exactly this piece, with this digest, is here; then it is verified."""
        return self._pieces.get((piece.file, piece.start)) == (piece.length, int(piece.digest, 16))

    def view(self, name: str, start: int, stop: int) -> memoryview | None:
        runs = self._runs.get(name, [])
        position = bisect.bisect_right(runs, start, key=_first) - 1
        if position < 0 or stop > runs[position][1]:
            return None
        first, _, at = runs[position]
        return self._memory[at + start - first : at + stop - first]

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        seen = self.view(name, offset, offset + len(buffer))
        if seen is None:
            raise InvalidRequest(f"{self.label} does not contain bytes [{offset}, {offset + len(buffer)}) of {name}")
        buffer[:] = seen
        return len(buffer)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        buffer = bytearray(length or 0)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def size(self, name: str) -> int | None:
        return None  # it holds parts of files

    def file(self, name: str) -> int | None:
        return None

    def waits(self, name: str, offset: int) -> bool:
        return False

    def past_cache(self) -> direct_io.Reader | None:
        return None

    def close(self) -> None:
        """Does nothing: the memory is unmapped with the last view of it."""


class BytesRead(NamedTuple):
    """Bytes of extents that were read. With headers: bytes that the daemon verified for several ranks, and that
    this rank did.
    """

    bytes_read: int
    node_bytes: int
    own_bytes: int
    notes: tuple[str, ...]


class Neighbours:
    """The ranks of this launch on this machine, `count` including this one, reached through their daemon."""

    def __init__(self, link: Transport, count: int) -> None:
        self._link, self._count = link, count

    def borrow(self, step: int, pieces: Sequence[Piece], waits: bool) -> tuple[LentMemory | None, tuple[str, ...]]:
        """Memory with the pieces that other ranks want as well, or None; and a note if sharing failed.

        Waits a moment for the other ranks, and until everything is read. A failure of the daemon is not an error
        here. `waits` says that reading would wait for a disk or a network.
        """
        try:
            memory, notice = self._ask(step, pieces, waits)
        except CheckpointError as error:
            return None, (
                f"not read together with the other ranks of this machine, read separately instead: {error.detail}",
            )
        return memory, (notice,) if notice else ()

    def release(self, read_bytes: int) -> None:
        """The memory is no longer used; also reports how much this rank read itself."""
        with suppress(CheckpointError):  # a daemon that is gone has nothing to take back
            self._link.ask(wire.Unload(id=self._link.next_id(), read_bytes=read_bytes), wire.Done)

    def _ask(self, step: int, pieces: Sequence[Piece], waits: bool) -> tuple[LentMemory | None, str]:
        wish = os.memfd_create("holdfast-wish", os.MFD_CLOEXEC)
        try:
            with open(wish, "wb", closefd=False) as file:
                file.write(piece_list.encode(piece_list.of(pieces)))
            message = wire.Load(id=self._link.next_id(), step=step, peers=self._count, waits=waits)
            loaded = self._link.ask(message, wire.Loaded, (wish,), LOAD_WAIT_S)
        except OSError as error:
            raise DaemonGone(f"no memory for the request: {error.strerror}") from error
        finally:
            os.close(wish)
        if loaded.pieces == 0:
            return None, loaded.notice
        (fd,) = self._link.take_fds(1)
        try:
            return LentMemory(fd), loaded.notice
        finally:
            os.close(fd)


def fill(reader: CheckpointReader, wants: Sequence[Want], neighbours: Neighbours | None, into: Overwriting) -> BytesRead:
    """Fill all wants, each extent after it was verified, or nothing before all are verified. Lent bytes are
    already verified.
    """
    if neighbours is None:
        headers = _prove(reader, wants, into)
        read = reader.load(wants)
        return BytesRead(read, 0, headers + read, ())
    pieces = reader.needed(wants)
    waits = any(reader.source.waits(p.file, p.start) for p in pieces[:: max(len(pieces) // PROBES, 1)])
    memory, notes = neighbours.borrow(reader.manifest.step, pieces, waits)
    whole = sum(piece.length for piece in pieces)
    own = sum(piece.length for piece in pieces if not memory.holds(piece)) if memory is not None else whole
    reader.lent, memory = memory, None
    try:
        _prove(reader, wants, into)
        read = reader.load(wants)
    finally:
        reader.lent = None  # unmapped before the daemon hears of it
        neighbours.release(own)
    return BytesRead(read, whole - own, own, notes)


def _prove(reader: CheckpointReader, wants: Sequence[Want], into: Overwriting) -> int:
    """What is to be proven before anything is overwritten; returns the bytes of the headers."""
    headers = reader.prove(wants) if into.prove_first else reader.check_headers(wants)
    into.begins()
    return headers


def _first(run: tuple[int, int, int]) -> int:
    return run[0]

"""Memory that is filled once with verified pieces of a checkpoint, then sealed and lent to the ranks of this machine.

It is written through its descriptor and never mapped here, because the kernel refuses the write seal on mapped
memory.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from holdfast_formats import digest
from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSpace
from holdfast_formats.staging import piece_list
from holdfast_formats.staging.piece_list import PieceList
from holdfast_service.daemon.shared_reads.sharing import ReadJob, jobs
from holdfast_service.storage import Tier

log = logging.getLogger(__name__)

# Who waits for a disk keeps several requests under way. From memory, more threads than cores only wait for each other's
# pages. Either bounds what is under way, to so many chunks.
READERS_WAITING, READERS_SPARE = 8, 1
CHUNK_BYTES = 2**20  # stays in a core's cache between being read, digested and copied
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class StepFiles(NamedTuple):
    """Where a step's files are, and whether reading them would wait for a disk or a network."""

    tier: Tier
    directory: str
    waits: bool


class SealedMemory:
    """A memfd of `size` bytes. `close` closes our descriptor; ranks with a copy keep the memory."""

    def __init__(self, label: str, size: int) -> None:
        """`NoSpace` when it cannot be had."""
        self.size = size
        self.fd = os.memfd_create(f"holdfast-load-{label}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
        except OSError as error:
            os.close(self.fd)
            raise NoSpace(f"cannot create {size} bytes of shared memory: {error.strerror}") from error

    @property
    def touched_bytes(self) -> int:
        """How much of it is in memory by now."""
        return min(os.fstat(self.fd).st_blocks * 512, self.size)

    def fill(self, source: StepFiles, wanted: PieceList, ended: Callable[[], bool]) -> tuple[PieceList, int]:
        """Read and prove what is wanted, each piece to its `at`, state the good ones at the head, and seal it.

        Returns the good ones, and how many bytes were read. Those that could not be read, or are not what was written, are
        left out. Ends early, with fewer, once `ended()`. `NoSpace` when there is no memory after all.
        """
        filling = _Filling(source, wanted, self.fd)
        todo = deque(jobs(wanted, CHUNK_BYTES))

        def drain() -> None:
            buffer = np.empty(CHUNK_BYTES, np.uint8).data
            try:
                while todo and not ended():
                    filling.take(todo.popleft(), buffer)
            except IndexError:  # another thread was quicker
                return
            except BaseException:
                todo.clear()
                raise

        count = min(READERS_WAITING if source.waits else (os.cpu_count() or 1) + READERS_SPARE, len(todo))
        with ThreadPoolExecutor(max(count, 1), "holdfast-load") as threads:
            for finished in [threads.submit(drain) for _ in range(count)]:
                finished.result()
        good = PieceList(wanted.files, wanted.rows[filling.good])
        _write(self.fd, memoryview(piece_list.encode(good)), 0)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        return good, int(filling.read.sum())

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _Filling:
    """What the threads that fill share: each row of `good` and `read` is written by one of them."""

    def __init__(self, source: StepFiles, wanted: PieceList, fd: int) -> None:
        self._source, self._wanted, self._fd = source, wanted, fd
        self.good = np.zeros(len(wanted.rows), np.bool_)
        self.read = np.zeros(len(wanted.rows), np.int64)

    def take(self, job: ReadJob, buffer: memoryview) -> None:
        """Read, copy and prove the pieces of a job; a large one chunk by chunk."""
        rows = self._wanted.rows[job.first : job.last].tolist()
        number, _, start, _, at = rows[0]
        path = f"{self._source.directory}/{self._wanted.files[number]}"
        total = sum(length for _, length, *_ in rows)
        running = digest.running()
        try:
            for done in range(0, total, len(buffer)):
                part = buffer[: min(len(buffer), total - done)]
                got = self._source.tier.read_into(path, start + done, part)
                self.read[job.first] += got
                if got < len(part):
                    log.warning("%s ends early, at byte %d", path, start + done + got)
                    return
                if len(rows) == 1:
                    running.update(part)
                _write(self._fd, part, at + done)
        except CheckpointError as error:
            log.warning("not shared: %s", error.detail)
            return
        if len(rows) == 1:
            found = [running.intdigest()]
        else:
            found = [digest.number(buffer[begin - start : begin - start + length]) for _, length, begin, *_ in rows]
        self.good[job.first : job.last] = np.array(found, np.uint64) == self._wanted.rows["digest"][job.first : job.last]


def read_listing(fd: int) -> PieceList:
    """What a rank has written into the memfd that it sent; `InvalidRequest` for what is no listing."""
    try:
        size = os.fstat(fd).st_size
        if size > piece_list.LISTING_BYTES_MAX:
            raise InvalidRequest(f"a listing of {size} bytes is over the limit of {piece_list.LISTING_BYTES_MAX}")
        encoded = bytearray(size)
        done = 0
        while done < size:
            got = os.preadv(fd, [memoryview(encoded)[done:]], done)
            if got == 0:
                break
            done += got
    except OSError as error:
        raise InvalidRequest(f"the descriptor cannot be read: {error.strerror}") from error
    return piece_list.decode(bytes(encoded[:done]))


def _write(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(fd, data[done:], at + done)
        except OSError as error:
            raise NoSpace(f"no memory for what several ranks want: {error.strerror}") from error

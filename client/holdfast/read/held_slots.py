"""The slots from which a step was committed, if a daemon still keeps them: requested from it, and locked."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack

import numpy as np

from holdfast.memory.mapping import Mapping
from holdfast.transport import Transport
from holdfast_formats.digest import digest
from holdfast_formats.errors import DaemonGone
from holdfast_formats.staging import arena, slot_table, wire
from holdfast_formats.staging.arena import SlotState
from holdfast_formats.staging.holdings import Bytes
from holdfast_formats.staging.slot_table import SlotTable

TAKE_WAIT_S = 60.0


class HeldSlot:
    """A locked slot of a committed save, which is not leased until `close`.

    `elsewhere`: its data is there only as far as it was fetched from another node.
    """

    def __init__(self, fd: int, part: wire.HeldPart, step: int, elsewhere: bool = False) -> None:
        """`DaemonGone` if the slot has been leased since, or cannot be locked. The descriptor stays the caller's."""
        self.elsewhere = elsewhere
        self.data: Bytes
        self.table: SlotTable
        self._locked: bytes | None = None  # what unlocks it
        try:
            # Opened again, for nothing but the lock, which belongs to the open file and goes with it.
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DaemonGone(f"cannot open the slot: {error.strerror}") from error
        try:
            self._open(fd, part, step)
        except OSError as error:
            self.close()
            raise DaemonGone(f"cannot read the slot any more: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def _open(self, fd: int, part: wire.HeldPart, step: int) -> None:
        memory = Mapping(fd, write=False).memory
        superblock = arena.read_superblock(memory)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, arena.slot_lock(superblock, part.slot, fcntl.F_RDLCK))
        self._locked = arena.slot_lock(superblock, part.slot, fcntl.F_UNLCK)
        header = arena.read_header(memory, superblock, part.slot)  # a lease locks the slot, writes this, and unlocks it
        start = superblock.table_offset(part.slot)
        encoded = memory[start : start + header.table_bytes]
        stated = (header.step, f"{header.seal:016x}", digest(encoded))
        if header.state is SlotState.LEASED or stated != (step, part.table_digest, part.table_digest):
            raise DaemonGone(f"slot {part.slot} of rank {part.rank} has been used for something else")
        self.table = slot_table.decode(encoded, header.data_bytes)
        data = superblock.data_offset(part.slot)
        self.data = np.frombuffer(memory[data : data + header.data_bytes], np.uint8)

    def _unlock(self) -> None:
        """Closing is not enough: a process that was forked meanwhile has the file open too."""
        if self._locked is not None:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._locked)

    def close(self) -> None:
        """Unlock the slot. Views of it stay readable, but their content may change."""
        if self._fd >= 0:
            self._unlock()
            os.close(self._fd)
            self._fd = -1


def take_held(link: Transport, step: int) -> list[HeldSlot]:
    """Request this step's slots from the daemon and lock them; empty if it no longer keeps them. The caller closes them."""
    return take(link, wire.Held(id=link.next_id(), step=step), step)


def take(link: Transport, request: wire.Held | wire.HeldElsewhere, step: int, wait_s: float = TAKE_WAIT_S) -> list[HeldSlot]:
    """The slots in the daemon's reply to a request, locked. The caller closes them."""
    with ExitStack() as undo:
        with link.receiving:
            reply = link.request(request, wire.HeldSlots, wait_s)
            fds = link.take_fds(len(reply.parts))
        for fd in fds:
            undo.callback(os.close, fd)
        with ExitStack() as on_failure:
            held = []
            for fd, part in zip(fds, reply.parts, strict=True):
                held.append(HeldSlot(fd, part, step, elsewhere=isinstance(request, wire.HeldElsewhere)))
                on_failure.callback(held[-1].close)
            on_failure.pop_all()
    return held

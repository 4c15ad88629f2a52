"""How many of a rank's requested slots fit into memory, and the notice if they are fewer."""

from __future__ import annotations

import errno
from typing import NamedTuple

from holdfast_formats.errors import NoSpace, StorageFailed
from holdfast_formats.staging.arena import Geometry

GIB = 2**30
MIB = 2**20
FILES_HINT = "raise the limit of open files (ulimit -n) of {}"
FILE_SIZE_HINT = "raise the file size limit (ulimit -f) of {}, which also applies to shared memory"
_FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS)  # by seccomp, a security module, or an old kernel


class SegmentRoom(NamedTuple):
    """The bytes that a new segment may have, and the limit that applies; `remedy` replaces the general advice."""

    bytes: int
    name: str
    remedy: str = ""


def fitting(asked: Geometry, room: SegmentRoom) -> int:
    """How many of the requested slots fit; 0 if not even one does."""
    counts = range(asked.slots, 0, -1)
    return next((count for count in counts if asked._replace(slots=count).segment_bytes <= room.bytes), 0)


def fewer_notice(asked: Geometry, slots: int, room: SegmentRoom) -> str:
    """The notice for a rank that gets fewer slots than requested."""
    return (
        f"reserved {slots} slot{'s' * (slots > 1)} instead of {asked.slots}: memory has room for "
        f"{amount(room.bytes)} ({room.name}), but {asked.slots} slots of {amount(asked.slot_bytes)} need "
        f"{amount(asked.segment_bytes - room.bytes)} more. A save that starts while {slots} "
        f"{'are' if slots > 1 else 'is'} being written finds no free slot"
    )


def amount(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"


def not_created(size: int, error: OSError, whose: str) -> NoSpace | StorageFailed:
    """The error for a memfd of `size` bytes that the system refuses to create. `whose` names the process."""
    if error.errno in _FORBIDDEN:
        return StorageFailed(
            f"{whose} may not create shared memory, memfd_create: {error.strerror}",
            hint="allow memfd_create in the container's seccomp profile, and set vm.memfd_noexec below 2",
        )
    if error.errno == errno.EFBIG:
        detail = f"{whose} may not create a file, or shared memory, of {size} bytes"
        return StorageFailed(detail, hint=FILE_SIZE_HINT.format(whose))
    hint = "free memory on this machine, or save a smaller state with fewer slots"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        hint = FILES_HINT.format(whose)
    return NoSpace(f"cannot create {size} bytes of shared memory: {error.strerror}", hint=hint)

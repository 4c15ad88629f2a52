"""Decide which pieces of a step are read once for several ranks, and their positions in shared memory.

Only arithmetic: the loader does the reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging import arena, piece_list
from holdfast_formats.staging.piece_list import PieceList, Rows

# What only one rank wants it reads itself, straight into its tensors. What is in the page cache so few ranks read faster
# from there, twice, than memory for all of it is had, filled and freed.
WANTED_BY_MIN, WANTED_BY_MIN_CACHED = 2, 8
ALIGNMENT = 64  # pieces stand in memory as in their file, to this modulus: elements are aligned there if they are here


class SharedPieces(NamedTuple):
    """What is shared, with `at` filled in, and the room for it; `left_out` bytes there was no room for."""

    listing: PieceList
    memory_bytes: int
    left_out: int


class ReadJob(NamedTuple):
    """Rows [first, last) of a listing, which follow one another in a file and in memory."""

    first: int
    last: int


def decide(asked: Sequence[PieceList], room_bytes: int, wanted_by_min: int = WANTED_BY_MIN) -> SharedPieces:
    """The pieces that so many ranks or more want, in the order of files, as far as there is room.

    Raises `InvalidRequest` where ranks take different pieces for those of one file: they read different checkpoints.
    """
    wanted = _wanted_by_several(asked, wanted_by_min)
    if not len(wanted.rows):
        return SharedPieces(wanted, 0, 0)
    head = arena.page_aligned(len(piece_list.encode(wanted)))
    _place(wanted.rows, head)
    ends = wanted.rows["at"] + wanted.rows["length"]
    fitting = int(np.searchsorted(ends, room_bytes, "right"))
    kept = PieceList(wanted.files, wanted.rows[:fitting])
    return SharedPieces(kept, int(ends[fitting - 1]) if fitting else 0, wanted.nbytes - kept.nbytes)


def jobs(shared: PieceList, bytes_max: int) -> Iterator[ReadJob]:
    """How to read it: small pieces that follow one another together, up to `bytes_max`; larger ones alone."""
    rows = shared.rows
    starts_run = _begins_run(rows).tolist()
    ends = np.cumsum(rows["length"], dtype=np.uint64).tolist()
    first, base = 0, 0
    for row, begins in enumerate(starts_run):
        if row > first and (begins or ends[row] - base > bytes_max):
            yield ReadJob(first, row)
            first, base = row, ends[row - 1]
    if len(rows):
        yield ReadJob(first, len(rows))


def _wanted_by_several(asked: Sequence[PieceList], wanted_by_min: int) -> PieceList:
    files = tuple(sorted({name for each in asked for name in each.files}))
    index = {name: number for number, name in enumerate(files)}
    together = [_renumbered(each, index) for each in asked]
    rows = np.concatenate(together) if together else np.empty(0, piece_list.ROW)
    if not len(rows):
        return PieceList(files, rows)
    rows = rows[np.lexsort((rows["digest"], rows["length"], rows["start"], rows["file"]))]
    before, after = rows[:-1], rows[1:]
    same = (before["file"] == after["file"]) & (before["start"] == after["start"])
    if not (before["digest"] == after["digest"])[same].all() or not (before["length"] == after["length"])[same].all():
        raise InvalidRequest("ranks request different bytes at one position of a file")
    firsts = np.flatnonzero(np.concatenate(([True], ~same)))
    counts = np.diff(np.append(firsts, len(rows)))
    shared = rows[firsts[counts >= wanted_by_min]]
    _check_apart(shared)
    return PieceList(files, shared)


def _renumbered(each: PieceList, index: dict[str, int]) -> Rows:
    rows = each.rows.copy()
    numbers = np.array([index[name] for name in each.files], np.uint32)
    rows["file"] = numbers[rows["file"]] if len(rows) else rows["file"]
    return rows


def _check_apart(rows: Rows) -> None:
    before, after = rows[:-1], rows[1:]
    across = (before["file"] == after["file"]) & (before["start"] + before["length"] > after["start"])
    if across.any():
        raise InvalidRequest("ranks request pieces of a file that overlap")


def _begins_run(rows: Rows) -> np.ndarray:
    """For each row, whether it does not follow the one before it in its file."""
    before, after = rows[:-1], rows[1:]
    follows = (before["file"] == after["file"]) & (before["start"] + before["length"] == after["start"])
    return np.concatenate(([True], ~follows))[: len(rows)]


def _place(rows: Rows, head: int) -> None:
    """Fill in `at`: runs one behind the other from `head` on, each aligned as it is in its file."""
    runs = np.flatnonzero(_begins_run(rows))
    lengths = np.add.reduceat(rows["length"].astype(np.int64), runs)
    rooms = -(-(lengths + ALIGNMENT) // ALIGNMENT) * ALIGNMENT
    bases = head + np.concatenate(([0], np.cumsum(rooms)[:-1]))
    firsts = rows["start"][runs].astype(np.int64)
    shifts = bases + firsts % ALIGNMENT - firsts
    rows["at"] = rows["start"].astype(np.int64) + np.repeat(shifts, np.diff(np.append(runs, len(rows))))

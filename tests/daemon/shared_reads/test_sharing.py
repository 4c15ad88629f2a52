"""sharing: which pieces are read once for several ranks, and where they stand in memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging import piece_list
from holdfast_formats.staging.piece_list import PieceList
from holdfast_service.daemon.shared_reads.sharing import ALIGNMENT, decide, jobs

BOUNDLESS = 2**50
FILES = ("a", "b", "c")


def piece(file: str, start: int, length: int = 10, digest: int = 1) -> Piece:
    return Piece(file, start, length, f"{digest:016x}")


def places(found: PieceList) -> list[tuple[str, int, int]]:
    return [(found.files[row["file"]], int(row["start"]), int(row["length"])) for row in found.rows]


@st.composite
def wishes(draw: st.DrawFn) -> list[list[Piece]]:
    """What some ranks want of three files that are cut into pieces."""
    cut = []
    for file in FILES:
        at = draw(st.integers(0, 100))
        for length in draw(st.lists(st.integers(1, 300), max_size=6)):
            cut.append(piece(file, at, length, digest=at))
            at += length + draw(st.sampled_from([0, 0, 1, 77]))
    return [[one for one in cut if draw(st.booleans())] for _ in range(draw(st.integers(1, 4)))]


@given(wishes())
def test_what_two_or_more_want_is_shared_once(wanted: list[list[Piece]]) -> None:
    """Exactly that, in file order; in memory, nothing lies across anything, and all is aligned as in its file."""
    shared = decide([piece_list.of(each) for each in wanted], BOUNDLESS)
    several = {one for each in wanted for one in each if sum(one in other for other in wanted) > 1}
    assert places(shared.listing) == [(p.file, p.start, p.length) for p in sorted(several)]
    assert shared.left_out == 0
    rows = shared.listing.rows
    if len(rows):
        assert int(rows["at"][0]) >= len(piece_list.encode(shared.listing))
        ends = rows["at"] + rows["length"]
        assert (rows["at"][1:] >= ends[:-1]).all() and int(ends[-1]) == shared.memory_bytes
        assert (rows["at"] % ALIGNMENT == rows["start"] % ALIGNMENT).all()


@given(wishes(), st.integers(0, 10_000))
def test_there_is_never_more_than_there_is_room_for(wanted: list[list[Piece]], room: int) -> None:
    """The first pieces in file order, as many as fit, each where it would stand anyway; the rest is said to be left out."""
    asked = [piece_list.of(each) for each in wanted]
    whole, cut = decide(asked, BOUNDLESS), decide(asked, room)
    assert cut.memory_bytes <= room
    fitting = len(cut.listing.rows)
    assert cut.listing.rows.tolist() == whole.listing.rows[:fitting].tolist()
    assert cut.left_out == whole.listing.nbytes - cut.listing.nbytes
    if fitting < len(whole.listing.rows):
        assert int(whole.listing.rows[fitting]["at"]) + int(whole.listing.rows[fitting]["length"]) > room


@given(wishes(), st.integers(1, 500))
def test_jobs_cover_every_piece_once(wanted: list[list[Piece]], bytes_max: int) -> None:
    """A job is one piece, or pieces that follow one another in file and memory and are together no larger than a chunk."""
    shared = decide([piece_list.of(each) for each in wanted], BOUNDLESS).listing
    found = list(jobs(shared, bytes_max))
    assert [row for job in found for row in range(job.first, job.last)] == list(range(len(shared.rows)))
    for job in found:
        rows = shared.rows[job.first : job.last]
        assert len(rows) == 1 or int(rows["length"].sum()) <= bytes_max
        assert (rows["start"][1:] == (rows["start"] + rows["length"])[:-1]).all()
        assert (rows["at"][1:] == (rows["at"] + rows["length"])[:-1]).all() and len(set(rows["file"])) == 1


def test_how_many_ranks_must_want_a_piece_can_be_said() -> None:
    """What fewer want is read by each of them."""
    asked = [piece_list.of([piece("a", 0), piece("b", 0)]), piece_list.of([piece("b", 0)]), piece_list.of([piece("b", 0)])]
    assert places(decide(asked, BOUNDLESS, 3).listing) == [("b", 0, 10)]
    assert places(decide(asked, BOUNDLESS, 4).listing) == []


def test_one_rank_or_none_shares_nothing() -> None:
    """Also ranks that want nothing at all, or nothing in common."""
    for wanted in ([], [[piece("a", 0)]], [[], []], [[piece("a", 0)], [piece("b", 0)], []]):
        shared = decide([piece_list.of(each) for each in wanted], BOUNDLESS)
        assert (len(shared.listing.rows), shared.memory_bytes, shared.left_out) == (0, 0, 0)


@pytest.mark.parametrize("other", [piece("a", 0, digest=2), piece("a", 0, length=9)])
def test_ranks_that_read_different_checkpoints_share_nothing(other: Piece) -> None:
    """Another digest or length at one place of a file is refused by name."""
    with pytest.raises(InvalidRequest, match="different bytes"):
        decide([piece_list.of([piece("a", 0)]), piece_list.of([other])], BOUNDLESS)


def test_verification_across_one_another_are_not_shared() -> None:
    """Two ranks want one piece, two others one that overlaps with it: refused by name."""
    with pytest.raises(InvalidRequest, match="that overlap"):
        decide([piece_list.of([piece("a", at)]) for at in (0, 0, 5, 5)], BOUNDLESS)


def test_a_hundred_thousand_pieces_of_eight_ranks() -> None:
    """Comparing them is arithmetic on arrays: every rank's rows are looked at, none in Python."""
    rows = np.zeros(100_000, piece_list.ROW)
    rows["start"], rows["length"], rows["digest"] = np.arange(100_000) * 4096, 4096, np.arange(100_000)
    shared = decide([PieceList(("a",), rows)] * 8, BOUNDLESS)
    assert shared.listing.nbytes == 100_000 * 4096
    assert sum(1 for _ in jobs(shared.listing, 2**20)) == -(-100_000 * 4096 // 2**20)

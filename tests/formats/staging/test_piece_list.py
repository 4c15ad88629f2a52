"""listing: pieces as rows of numbers, in memory that another process wrote."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import CheckpointError, InvalidRequest
from holdfast_formats.staging import piece_list
from holdfast_formats.staging.piece_list import ROW, PieceList

DIGEST = "00ff00ff00ff00ff"


def made(*rows: tuple[int, int, int], files: tuple[str, ...] = ("a", "b")) -> PieceList:
    """A listing of (file, start, length), not looked at."""
    return PieceList(files, np.array([(file, length, start, 7, 0) for file, start, length in rows], ROW))


@given(
    st.sets(st.tuples(st.sampled_from(["a.safetensors", "b"]), st.integers(0, 2**40)), max_size=20), st.binary(max_size=9)
)
def test_verification_read_back(places: set[tuple[str, int]], behind: bytes) -> None:
    """In order of file and position, whatever stands behind the listing."""
    pieces = [Piece(file, 10 * start, 10, DIGEST) for file, start in places]
    found = piece_list.decode(piece_list.encode(piece_list.of(pieces)) + behind)
    back = [Piece(found.files[row["file"]], int(row["start"]), int(row["length"]), DIGEST) for row in found.rows]
    assert back == sorted(pieces)
    assert found.nbytes == 10 * len(pieces)
    assert {int(row["digest"]) for row in found.rows} <= {int(DIGEST, 16)}


def test_a_listing_is_what_format_md_says() -> None:
    """Magic, version, the bytes of the names, the number of rows; names as JSON; rows of 32 bytes, aligned."""
    encoded = piece_list.encode(PieceList(("f",), np.array([(0, 2, 3, 4, 5)], ROW)))
    assert encoded[:8] == b"HFPIECES" and len(encoded) % 8 == 0
    assert np.frombuffer(encoded, "<u4", 2, 8).tolist() == [1, len(encoded) - 24 - 32]
    assert np.frombuffer(encoded, "<u8", 1, 16).tolist() == [1]
    assert encoded[24:-32].strip() == b'["f"]'
    assert np.frombuffer(encoded[-32:], "<u4", 2).tolist() == [0, 2]
    assert np.frombuffer(encoded[-24:], "<u8").tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (made((0, 0, 5), (0, 4, 5)), "across"),
        (made((1, 0, 5), (0, 9, 5)), "order"),
        (made((0, 0, 0)), "1 to"),
        (made((0, 0, piece_list.PIECE_BYTES_MAX + 1)), "1 to"),
        (made((2, 0, 5)), "no file"),
        (made((0, 2**63, 5)), "no file"),
        (made(files=("../a",)), "no files"),
        (made(files=("b", "a")), "in order"),
        (made(files=("a", "a")), "in order"),
    ],
)
def test_an_impossible_listing_is_refused(wrong: PieceList, reason: str) -> None:
    """By name: pieces across one another, out of order, without bytes, too large, of no file; names that are none."""
    with pytest.raises(InvalidRequest, match=reason):
        piece_list.decode(piece_list.encode(wrong))


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"", "cut off"),
        (b"X" * 64, "no listing"),
        (piece_list.encode(made((0, 0, 5)))[:-1], "does not fit"),
        (piece_list.encode(made()).replace(b'["a", "b"]', b'["a", "b"}'), "cannot be read"),
        (piece_list.encode(made()).replace(b'["a", "b"]', b"[1, 2, 34]"), "no files"),
    ],
)
def test_memory_that_holds_no_listing_is_refused(encoded: bytes, reason: str) -> None:
    """Cut short, of something else, with names that are not JSON text."""
    with pytest.raises(InvalidRequest, match=reason):
        piece_list.decode(encoded)


@given(st.binary(max_size=200), st.integers(0, 100))
def test_noise_gives_named_errors(noise: bytes, at: int) -> None:
    """Whatever stands in the memory, nothing but a named error comes of it."""
    encoded = bytearray(piece_list.encode(made((0, 0, 5), (1, 3, 5))))
    encoded[at : at + len(noise)] = noise
    with suppress(CheckpointError):
        piece_list.decode(bytes(encoded))

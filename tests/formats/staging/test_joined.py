"""What all nodes have brought, in one body: in the order of names, and refused where it is not that."""

from __future__ import annotations

import hashlib

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging import joined
from holdfast_formats.staging.joined import JoinedPart

A, B = JoinedPart("a", (2, 3), "http://a:1", "d" * 64, b"said"), JoinedPart("b", (0, 1), "", "e" * 64, b"")


def test_parts_read_back_in_the_order_of_names() -> None:
    """Whatever order they are encoded in: nodes have their numbers by it."""
    assert joined.encode_parts([B, A]) == joined.encode_parts([A, B])
    assert joined.decode_parts(joined.encode_parts([B, A])) == (A, B)


def test_declarations_read_back_by_their_own_digests() -> None:
    """Not by what somebody says of them. Their name follows from the digests, in any order, and is none of theirs."""
    digests = [hashlib.sha256(body).hexdigest() for body in (b"one", b"two")]
    assert joined.decode_declarations(joined.encode_declarations([b"one", b"two"])) == dict(
        zip(digests, (b"one", b"two"), strict=True)
    )
    assert joined.name_of(digests) == joined.name_of(digests[::-1]) != joined.name_of(digests[:1])
    assert joined.name_of(digests[:1]) not in digests


@pytest.mark.parametrize("broken", [b"", b"\x91", b"\x91\x01", b"\x91" * 100_000, b"{}"])
def test_what_is_no_such_body_is_refused(broken: bytes) -> None:
    """Whatever a catalog gives back."""
    with pytest.raises(InvalidRequest, match="cannot read the joined parts"):
        joined.decode_parts(broken)
    with pytest.raises(InvalidRequest, match="cannot read the joined parts"):
        joined.decode_declarations(broken)

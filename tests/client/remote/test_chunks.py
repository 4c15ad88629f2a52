"""When chunks are packed, and how large they are: what was measured decides."""

from __future__ import annotations

import pytest

from holdfast.remote.chunks import CHUNK_BYTES_MIN, LinkPace

MIB = 2**20


def measured(link_bps: float, codec_bps: float, ratio: float) -> LinkPace:
    """A pace that has seen this link and this codec."""
    pace = LinkPace(8 * MIB)
    pace.sent(int(link_bps), 1.0)
    pace.packed(MIB, int(MIB * ratio), MIB / codec_bps)
    return pace


@pytest.mark.parametrize(
    ("link_bps", "codec_bps", "ratio", "packs"),
    [
        (10e6, 500e6, 0.5, True),  # a slow link: half the bytes in half the time
        (1e9, 500e6, 0.1, False),  # a link faster than the codec
        (10e6, 500e6, 0.99, False),  # nothing to gain
        (10e6, 11e6, 0.1, False),  # the codec would be the narrow place
        (100e6, 500e6, 0.7, True),
    ],
)
def test_chunks_are_packed_only_for_a_clear_gain(link_bps: float, codec_bps: float, ratio: float, packs: bool) -> None:
    """The slower of codec and link, over packed bytes, must be clearly faster than the link over plain ones."""
    assert measured(link_bps, codec_bps, ratio).packs is packs


def test_nothing_is_packed_before_anything_was_measured() -> None:
    """The first chunk goes out small and plain."""
    pace = LinkPace(8 * MIB)
    assert not pace.packs
    assert pace.chunk_bytes == CHUNK_BYTES_MIN


def test_chunks_grow_and_shrink_with_the_link() -> None:
    """A chunk is what a second carries, within the limits of both sides."""
    assert measured(2 * MIB, 1e9, 1.0).chunk_bytes == 2 * MIB
    assert measured(10_000, 1e9, 1.0).chunk_bytes == CHUNK_BYTES_MIN
    assert measured(1e9, 1e9, 1.0).chunk_bytes == 8 * MIB


def test_a_link_that_changes_is_followed() -> None:
    """After a few chunks over a link that has become slow, packing begins."""
    pace = measured(1e9, 500e6, 0.3)
    assert not pace.packs
    for _ in range(10):
        pace.sent(MIB, 0.1)
    assert pace.packs

"""Digests of a rank's boxes, by which differing replicas are found.

Of each box there are two numbers, both XXH3 and both 0 if not stated:

    sample    of up to 64 KiB of the box, in places that follow from the save's step and the box's length alone
    whole     of all its bytes

A box with a sample is a *claim*: every rank that holds it has these bytes. A box with only a whole digest may differ
from rank to rank: buffers of modules, and tensors of the group `extra`. If those differ, each rank has its own.

Once a save that claims a whole box was committed, one rank of a node stages the box for all ranks of that node which hold
it. The others still state samples, so that replicas which drift apart are found.
"""

from __future__ import annotations

import re
import struct
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import digest

ROW_BYTES = 16  # per box: the two numbers, unsigned and little-endian
SAMPLE_BYTES = 2**16
STRETCHES, STRETCH_BYTES = 16, 2**12  # of a box that is longer than a sample
SPARED_BYTES_MIN = 2**18  # of a box that one rank stages for others: they would save little memory, and sample all the same

HOME = "extra"  # the group for tensors that differ between ranks
_APART = re.compile(r"ranks/(\d{5,})/\$([a-z][a-z0-9_]{0,63})/(.+)", re.DOTALL)
_MASK = 2**64 - 1


def places(nbytes: int, step: int) -> list[int]:
    """The beginnings of a sample's stretches in a box of more than `SAMPLE_BYTES`: one at random in each sixteenth of it."""
    room = nbytes // STRETCHES - STRETCH_BYTES + 1
    return [nbytes // STRETCHES * i + mix(step * STRETCHES + i) % room for i in range(STRETCHES)]


def sample(box: Any, step: int) -> int:
    """The sample's digest of a box's bytes, a contiguous buffer; equal to that of `native_copy.c`."""
    if len(box) <= SAMPLE_BYTES:
        return digest.number(box)
    parts = [digest.number(box[at : at + STRETCH_BYTES]) for at in places(len(box), step)]
    return digest.number(struct.pack(f"<{STRETCHES}Q", *parts))


def mix(value: int) -> int:
    """A 64-bit hash of a 64-bit number (the finalizer of Vigna's splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def apart(rank: int, group: str, name: str) -> str:
    """The name, in the group `HOME`, of one rank's version of a tensor that differs between ranks."""
    return f"ranks/{rank:05d}/${group}/{name}"


def parse_apart(group: str, name: str) -> tuple[int, str, str] | None:
    """Rank, group and name of a name made by `apart`; None for any other tensor."""
    match = _APART.fullmatch(name) if group == HOME else None
    return None if match is None else (int(match[1]), match[2], match[3])


def encode_bits(bits: NDArray[np.bool_]) -> str:
    """One bit for each box of a table, as text; empty if none is set."""
    return b64encode(np.packbits(bits).tobytes()).decode() if bits.any() else ""


def decode_bits(text: str, boxes: int) -> NDArray[np.bool_]:
    """The bits of so many boxes. Missing ones are not set."""
    octets = np.frombuffer(b64decode(text), np.uint8)
    bits = np.zeros(boxes, np.bool_)
    given = np.unpackbits(octets)[:boxes]
    bits[: len(given)] = given
    return bits

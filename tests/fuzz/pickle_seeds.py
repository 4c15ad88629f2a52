"""Pickles and torch files to begin from, and hostile versions of them."""

from __future__ import annotations

import io
import pickle
import random
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .mutating import SIZES, bytes_changed

RECORDS = ("tests.fuzz.pickle_seeds.Record",)
# Opcodes with arguments that do much with few bytes, and what runs code where it is let.
_PIECES = (
    *(bytes((code,)) for code in b"NRbQ()]}tua0123se.\x81\x85\x86\x87\x88\x8f\x90\x91\x92\x93\x94oidlIFLVSPp"),
    b"h\x00" * 50,
    b"h\x00h\x00\x86\x94" * 60,
    b"q\x00",
    b"j\xff\xff\xff\xff",
    b"r\xff\xff\xff\x7f",
    b"X\xff\xff\xff\x7f",
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x8b\xff\xff\xff\x7f",
    b"\x8a\xff" + b"\x7f" * 255,
    b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"(" * 5000,
    b"]" * 5000,
    b"\x85" * 5000,
    b"cos\nsystem\nX\x02\x00\x00\x00id\x85R",
    b"cbuiltins\neval\nX\x02\x00\x00\x00id\x85R",
    b"\x8c\x08builtins\x94\x8c\x04exec\x94\x93\x94\x8c\x04pass\x94\x85\x94R",
    b"(ios\nsystem\n",
    b"\x82\x01",
    b"\x97\x98",
)


class Record:
    """A class whose objects the reader is allowed to have as records."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def _value() -> dict[str, Any]:
    shared = (1, 2)
    return {
        "w": np.arange(12, dtype="<f4").reshape(3, 4),
        "f": np.asfortranarray(np.arange(6, dtype="<u2").reshape(2, 3)),
        "n": np.int64(5),
        "list": [1, 2**40, -5, 2.5, None, True, "text", b"bytes", shared, [shared] * 3, {1, 2}, frozenset((3,))],
        "record": Record(shape=shared, inner=Record(a=1)),
        "ordered": OrderedDict(a=1, b={"c": (1, (2, (3,)))}),
        "complex": 1 + 2j,
    }


@cache
def plain() -> tuple[bytes, ...]:
    """Pickles of every protocol that is read."""
    return tuple(pickle.dumps(_value(), protocol) for protocol in (2, 3, 4, 5))


@cache
def torch_files() -> tuple[bytes, ...]:
    """Files of torch.save in both forms. One zip has checksums, at which nearly all that is changed in it ends."""
    import torch

    made = []
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"state_dict": OrderedDict(w=weight, t=weight.t(), p=torch.nn.Parameter(weight[0].bfloat16())), "step": 3}
    try:
        for zipped, protocol, summed in ((True, 2, False), (True, 4, False), (True, 4, True), (False, 2, True)):
            torch.serialization.set_crc32_options(summed)
            buffer = io.BytesIO()
            torch.save(state, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
            made.append(buffer.getvalue())
    finally:
        torch.serialization.set_crc32_options(True)
    return tuple(made)


def write(directory: Path) -> None:
    """All of them as files, those of torch.save with `.pt`."""
    for number, data in enumerate(plain()):
        (directory / f"{number}.pkl").write_bytes(data)
    for number, data in enumerate(torch_files()):
        (directory / f"{number}.pt").write_bytes(data)


def mutated(chance: random.Random, seed: bytes) -> bytes:
    """One hostile version: opcodes put in, lengths overwritten, parts of it again, bits turned."""
    if chance.random() < 0.4:
        return bytes_changed(chance, seed)
    found = bytearray(seed)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(5):
            case 0:
                found[at:at] = chance.choice(_PIECES)
            case 1:
                piece = chance.choice(_PIECES)
                found[at : at + len(piece)] = piece
            case 2:
                begin = chance.randrange(len(found) + 1)
                found[at:at] = found[begin : begin + chance.choice((1, 3, 10, 100))] * chance.choice((1, 2, 30))
            case 3:
                width = chance.choice((1, 2, 4, 8))
                found[at : at + width] = (chance.choice(SIZES) % 2 ** (8 * width)).to_bytes(width, "little")
            case _:
                del found[at : at + chance.choice((1, 1, 2, 9))]
    return bytes(found)

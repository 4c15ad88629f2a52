"""Writes dicts of arrays as `paddle.save` and numpy pickle them: arrays' bytes are streamed between known opcodes."""

from __future__ import annotations

import struct
from typing import Any

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.target_files import GrowingFile
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.exports.safetensors_files import KnownTensor
from holdfast_service.wings.convert.foreign import pickle_writer
from holdfast_service.wings.convert.foreign.pickle_writer import GlobalCall, NamedGlobal
from holdfast_service.wings.convert.foreign.pickled.dtypes import NUMPY

Held = MappedTensor | KnownTensor
_RECONSTRUCT = GlobalCall(NamedGlobal("numpy.core.multiarray._reconstruct"), (NamedGlobal("numpy.ndarray"), (0,), b"b"))
# Numpy's code of the stored array, by dtype; Paddle has these. bfloat16 is stored as its bits.
_CODES = {"BF16": "u2", **{NUMPY[code]: code for code in ("f2", "f4", "f8", "i8", "i4", "i2", "i1", "u1", "b1")}}


class PickledArrays:
    """A dict whose items are put one after the other; `bytes` is the file's length so far."""

    def __init__(self) -> None:
        self._file = GrowingFile()
        self._file.put(b"\x80\x04}")  # protocol 4, and an empty dict

    @property
    def bytes(self) -> int:
        return self._file.bytes

    @property
    def has_tensors(self) -> bool:
        return self._file.has_tensors

    def put(self, key: str, tensor: Held, name: str | None = None) -> None:
        """An array under a key, or a pair of a name and an array, as Paddle pickles its tensors."""
        before, after = around(key, tensor.spec, name)
        self._file.put(before)
        if isinstance(tensor, KnownTensor):
            self._file.put(tensor.data)
        else:
            self._file.stream(tensor)
        self._file.put(after)

    def put_value(self, key: str, value: Any) -> None:
        self._file.put(_opcodes(key) + _opcodes(value) + b"s")

    def begin_inner(self, key: str) -> None:
        """Begin a dict under a key; what is put until `end_inner` are its items."""
        self._file.put(_opcodes(key) + b"}")

    def end_inner(self) -> None:
        self._file.put(b"s")

    def ended(self) -> GrowingFile:
        self._file.put(b".")
        return self._file


def around(key: str, spec: TensorSpec, name: str | None = None) -> tuple[bytes, bytes]:
    """The opcodes before and after the bytes of an array, which becomes an item of the dict on the stack.

    `StateMismatch` for a dtype that Paddle lacks.
    """
    if spec.dtype not in _CODES:
        raise StateMismatch(
            f"{spec.name!r} is {spec.dtype}, which Paddle does not support",
            hint="export only the model with `--as hf`, or everything with `--as dcp`",
            tensor=spec.name,
        )
    code = _CODES[spec.dtype]
    order = "|" if code.endswith("1") else "<"
    kind = _opcodes(GlobalCall(NamedGlobal("numpy.dtype"), (code, False, True)))
    kind += _opcodes((3, order, None, None, None, -1, -1, 0)) + b"b"
    size = spec.nbytes
    length = b"B" + struct.pack("<I", size) if size < 2**32 else b"\x8e" + struct.pack("<Q", size)
    state = b"(" + _opcodes(1) + _opcodes(tuple(spec.shape)) + kind + _opcodes(False) + length
    named = b"" if name is None else _opcodes(name)
    return _opcodes(key) + named + _opcodes(_RECONSTRUCT) + state, b"tb" + (b"" if name is None else b"\x86") + b"s"


def _opcodes(value: Any) -> bytes:
    """The opcodes that push the value: its pickle without the protocol and the stop. They use no memo of earlier ones."""
    return pickle_writer.dumps(value)[2:-1]

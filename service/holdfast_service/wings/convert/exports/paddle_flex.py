"""Exports a FlexCheckpoint of Paddle: pickles of numpy arrays, with metadata of the file of each array.

All of it is in Paddle's layout. The arrays' bytes are streamed; the opcodes around them are known before.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from holdfast_formats.disk.packing import FILE_BYTES_MAX, natural_key
from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.target_files import GrowingFile, TargetFile
from holdfast_formats.rest.jobs import EXPORT_KINDS
from holdfast_service.wings.convert.exports import paddle_state
from holdfast_service.wings.convert.exports.hugging_face import configured
from holdfast_service.wings.convert.exports.paddle_state import POWERS, PaddleState
from holdfast_service.wings.convert.exports.paddle_trainer import FILES, trainer_files
from holdfast_service.wings.convert.exports.plan import ExportKind, ExportOptions, ExportPlan, small_file
from holdfast_service.wings.convert.exports.safetensors_files import KnownTensor
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.exports.tied_tensors import renamed
from holdfast_service.wings.convert.foreign import pickle_writer
from holdfast_service.wings.convert.foreign.pickle_writer import GlobalCall, MadeObject, NamedGlobal, ObjectKeys
from holdfast_service.wings.convert.foreign.pickled.dtypes import NUMPY, TORCH_NAMES

NAME = "paddle-flex"
SETS = ("model_state", "optimizer_state", "master_weight")
METADATA = "0.metadata"
SIGNAL = "saved_signal_0"
_PACKAGE = "paddle.distributed.flex_checkpoint.dcp.metadata"
_RECONSTRUCT = GlobalCall(NamedGlobal("numpy.core.multiarray._reconstruct"), (NamedGlobal("numpy.ndarray"), (0,), b"b"))
# Numpy's code of the stored array, by dtype; Paddle has these. bfloat16 is stored as its bits.
_CODES = {"BF16": "u2", **{NUMPY[code]: code for code in ("f2", "f4", "f8", "i8", "i4", "i2", "i1", "u1", "b1")}}

_NOT_FLAT = {"is_flattened": False, "flattened_range": None}

Held = MappedTensor | KnownTensor


def plan(source: ExportSource, options: ExportOptions) -> ExportPlan:
    """One directory for each of model, optimizer and masters, the trainer's small files, and the checkpoint's own."""
    state = paddle_state.collect(source, options, model_too=True)
    model = [state.layout.of(name, tensor) for name, tensor in state.model.items()]
    masters = [renamed(tensor, SETS[2], f"{name}.w_0") for name, tensor in state.masters.items()]
    sets: list[list[Held]] = [list(model), _optimizer(state), list(masters)]
    files = [file for name, held in zip(SETS, sets, strict=True) for file in array_files(name, held)]
    trainer = trainer_files(source, state)
    assets, notes = configured(source, options.dtype, FILES | {SIGNAL})
    small = [*trainer.files, small_file(SIGNAL, b"1"), *assets]
    return ExportPlan((*files, *small), (*state.notes, *trainer.notes, *notes), state.left_out)


def array_files(directory: str, tensors: Iterable[Held], file_bytes_max: int = FILE_BYTES_MAX) -> list[TargetFile]:
    """The arrays of a set in files of about `file_bytes_max` bytes, and the metadata with their places."""
    made: list[TargetFile] = []
    placed: list[_Placed] = []
    file = _begun()
    for tensor in sorted(tensors, key=lambda one: natural_key(one.spec.name)):
        before, after = _around(tensor)
        if file.has_tensors and file.bytes + len(before) + tensor.spec.nbytes > file_bytes_max:
            made.append(_ended(file, directory, len(made)))
            file = _begun()
        file.put(before)
        if isinstance(tensor, KnownTensor):
            file.put(tensor.data)
        else:
            file.stream(tensor)
        file.put(after)
        placed.append(_Placed(tensor, _name(len(made))))
    metadata = pickle_writer.dumps(_metadata(placed))
    return [*made, _ended(file, directory, len(made)), small_file(f"{directory}/{METADATA}", metadata)]


def _begun() -> GrowingFile:
    file = GrowingFile()
    file.put(b"\x80\x04}")  # protocol 4, and an empty dict
    return file


def _ended(file: GrowingFile, directory: str, number: int) -> TargetFile:
    file.put(b".")
    return file.made(f"{directory}/{_name(number)}")


def _name(number: int) -> str:
    return f"{number}_0.distcp"


class _Placed(NamedTuple):
    tensor: Held
    file: str


def _around(tensor: Held) -> tuple[bytes, bytes]:
    """The opcodes before and after the bytes of an array, which becomes an item of the dict on the stack."""
    spec = tensor.spec
    if spec.dtype not in _CODES:
        raise StateMismatch(f"{spec.name!r} is {spec.dtype}, which Paddle does not support", tensor=spec.name)
    code = _CODES[spec.dtype]
    order = "|" if code.endswith("1") else "<"
    kind = _opcodes(GlobalCall(NamedGlobal("numpy.dtype"), (code, False, True)))
    kind += _opcodes((3, order, None, None, None, -1, -1, 0)) + b"b"
    size = spec.nbytes
    length = b"B" + struct.pack("<I", size) if size < 2**32 else b"\x8e" + struct.pack("<Q", size)
    state = b"(" + _opcodes(1) + _opcodes(tuple(spec.shape)) + kind + _opcodes(False) + length
    return _opcodes(spec.name) + _opcodes(_RECONSTRUCT) + state, b"tbs"


def _opcodes(value: Any) -> bytes:
    """The opcodes that push the value: its pickle without the protocol and the stop. They use no memo of earlier ones."""
    return pickle_writer.dumps(value)[2:-1]


def _metadata(placed: Iterable[_Placed]) -> MadeObject:
    described: dict[str, list[MadeObject]] = {}
    stored: list[tuple[MadeObject, str]] = []
    for tensor, file in placed:
        spec = tensor.spec
        shape, origin = tuple(spec.shape), (0,) * len(spec.shape)
        dtype = TORCH_NAMES[spec.dtype].removeprefix("torch.")  # Paddle calls them the same
        local = {"global_offset": origin, "local_shape": shape, "dtype": dtype, "global_shape": shape}
        described[spec.name] = [_object("LocalTensorMetadata", {**local, **_NOT_FLAT})]
        index = {"tensor_key": spec.name, "global_offset": origin, **_NOT_FLAT, "replica_id": None, "local_shape": shape}
        stored.append((_object("LocalTensorIndex", index), file))
    names = {name: (name,) for name in described}
    attributes = {"state_dict_metadata": described, "storage_metadata": ObjectKeys(stored), "flat_mapping": names}
    return _object("Metadata", attributes)


def _object(kind: str, attributes: Mapping[str, Any]) -> MadeObject:
    return MadeObject(NamedGlobal(f"{_PACKAGE}.{kind}"), attributes)


def _optimizer(state: PaddleState) -> list[Held]:
    helds: list[Held] = []
    for name, one in state.optimizer.items():
        helds += [renamed(tensor, SETS[1], f"{name}.{kind}") for kind, tensor in one.moments.items()]
        helds += [
            paddle_state.power_tensor(SETS[1], f"{name}.{kind}", p) for kind, p in zip(POWERS, one.powers, strict=True)
        ]
    return helds


KIND = ExportKind(NAME, EXPORT_KINDS[NAME], plan)

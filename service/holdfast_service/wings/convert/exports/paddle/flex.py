"""Exports a FlexCheckpoint of Paddle: pickles of numpy arrays, with metadata of the file of each array.

All of it is in Paddle's layout. The arrays' bytes are streamed; the opcodes around them are known before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from holdfast_formats.disk.packing import FILE_BYTES_MAX, natural_key
from holdfast_formats.mapping.target_files import TargetFile
from holdfast_formats.rest.jobs import EXPORT_KINDS
from holdfast_service.wings.convert.exports.hugging_face import configured
from holdfast_service.wings.convert.exports.paddle import state as paddle_state
from holdfast_service.wings.convert.exports.paddle.pickled_arrays import Held, PickledArrays, around
from holdfast_service.wings.convert.exports.paddle.state import POWERS, PaddleState
from holdfast_service.wings.convert.exports.paddle.trainer import FILES, trainer_files
from holdfast_service.wings.convert.exports.plan import ExportKind, ExportOptions, ExportPlan, small_file
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.exports.tied_tensors import renamed
from holdfast_service.wings.convert.foreign import pickle_writer
from holdfast_service.wings.convert.foreign.pickle_writer import MadeObject, NamedGlobal, ObjectKeys
from holdfast_service.wings.convert.foreign.pickled.dtypes import TORCH_NAMES

NAME = "paddle-flex"
SETS = ("model_state", "optimizer_state", "master_weight")
METADATA = "0.metadata"
SIGNAL = "saved_signal_0"
_PACKAGE = "paddle.distributed.flex_checkpoint.dcp.metadata"
_NOT_FLAT = {"is_flattened": False, "flattened_range": None}


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
    file = PickledArrays()
    for tensor in sorted(tensors, key=lambda one: natural_key(one.spec.name)):
        before, _ = around(tensor.spec.name, tensor.spec)
        if file.has_tensors and file.bytes + len(before) + tensor.spec.nbytes > file_bytes_max:
            made.append(file.ended().made(f"{directory}/{_name(len(made))}"))
            file = PickledArrays()
        file.put(tensor.spec.name, tensor)
        placed.append(_Placed(tensor, _name(len(made))))
    metadata = small_file(f"{directory}/{METADATA}", pickle_writer.dumps(_metadata(placed)))
    return [*made, file.ended().made(f"{directory}/{_name(len(made))}"), metadata]


def _name(number: int) -> str:
    return f"{number}_0.distcp"


class _Placed(NamedTuple):
    tensor: Held
    file: str


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

"""Exports a unified checkpoint of PaddleFormers: model, masters and optimizer as safetensors files with an index each.

The model is in Hugging Face's layout, as PaddleFormers saves it by default; masters and optimizer are in Paddle's.
"""

from __future__ import annotations

from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.target_files import TargetFile
from holdfast_formats.rest.jobs import EXPORT_KINDS
from holdfast_service.wings.convert.exports.hugging_face import configured
from holdfast_service.wings.convert.exports.paddle import state as paddle_state
from holdfast_service.wings.convert.exports.paddle.state import POWERS, PaddleState
from holdfast_service.wings.convert.exports.paddle.trainer import FILES, trainer_files
from holdfast_service.wings.convert.exports.plan import ExportKind, ExportOptions, ExportPlan
from holdfast_service.wings.convert.exports.safetensors_files import KnownTensor, shard_set
from holdfast_service.wings.convert.exports.source import ExportSource

NAME = "paddle-uc"
MODEL, MASTERS, OPTIMIZER = "model", "master_weights", "optimizer"
# On one card PaddleFormers reads only the first file of masters and optimizer, without a word about the others.
_ONE_FILE = 2**62


def plan(source: ExportSource, options: ExportOptions) -> ExportPlan:
    """The three sets with their indexes, the trainer's small files, and the checkpoint's own."""
    state = paddle_state.collect(source, options, model_too=False)
    model = shard_set(MODEL, state.model.values(), "pt", numbered=True)
    files = [*model.files, model.index_file(f"{MODEL}.safetensors.index.json"), *training_files(state)]
    trainer = trainer_files(source, state)
    assets, notes = configured(source, options.dtype, FILES)
    return ExportPlan((*files, *trainer.files, *assets), (*state.notes, *trainer.notes, *notes), state.left_out)


def training_files(state: PaddleState) -> list[TargetFile]:
    """The sets of masters and optimizer, with their indexes."""
    files: list[TargetFile] = []
    if state.optimizer:
        held = shard_set(OPTIMIZER, _optimizer(state), "np", numbered=True, file_bytes_max=_ONE_FILE)
        index = {"master_weights": bool(state.masters), "quant_ckpt_resume_times": 0}
        files += [*held.files, held.index_file(f"{OPTIMIZER}.safetensors.index.json", index)]
    if state.masters:
        masters = shard_set(MASTERS, state.masters.values(), "np", numbered=True, file_bytes_max=_ONE_FILE)
        files += [*masters.files, masters.index_file(f"{MASTERS}.safetensors.index.json")]
    return files


def _optimizer(state: PaddleState) -> list[MappedTensor | KnownTensor]:
    tensors: list[MappedTensor | KnownTensor] = []
    for name, one in state.optimizer.items():
        tensors += one.moments.values()
        tensors += [
            paddle_state.power_tensor(OPTIMIZER, f"{name}/{kind}", p) for kind, p in zip(POWERS, one.powers, strict=True)
        ]
    return tensors


KIND = ExportKind(NAME, EXPORT_KINDS[NAME], plan)

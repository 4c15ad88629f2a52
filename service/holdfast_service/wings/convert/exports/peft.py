"""Exports an adapter as a directory that PEFT loads."""

from __future__ import annotations

from holdfast_formats.dtypes import FLOATS
from holdfast_formats.errors import InvalidRequest, NoSuchResource, StateMismatch
from holdfast_formats.mapping.box_moves import same
from holdfast_formats.mapping.committed_files import refuse_sub_byte
from holdfast_formats.mapping.listing import TensorKey, is_of_rank
from holdfast_formats.rest.jobs import EXPORT_KINDS
from holdfast_service.wings.convert.exports.plan import (
    ExportKind,
    ExportOptions,
    ExportPlan,
    LeftOut,
    copied_assets,
    other_groups,
    values_of_weights,
)
from holdfast_service.wings.convert.exports.safetensors_files import shard_set
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.exports.tied_tensors import said, tied
from holdfast_service.wings.convert.exports.weights import roundings

GROUPS = ("adapter", "adapter_model")  # an imported adapter, and one that a trainer saved
CONFIG = "adapter_config.json"
STEM = "adapter_model"
_OF_THE_BASE = frozenset({"config.json", "generation_config.json"})
_PROMPTS = frozenset({"prompt_embeddings", "prefix_task_cols", "prefix_task_rows"})  # of prompt learning, without a prefix
_FILE_BYTES_MAX = 2**62  # PEFT reads one file


def plan(source: ExportSource, options: ExportOptions) -> ExportPlan:
    """adapter_model.safetensors under the checkpoint's names, which are PEFT's, with adapter_config.json.

    Raises `NoSuchResource` for a checkpoint without an adapter or its configuration.
    """
    if options.layout is not None or options.weights != "model" or options.program is not None:
        raise InvalidRequest("an adapter is exported unchanged", hint="leave --layout, --weights and --program out")
    group = next((group for group in GROUPS if source.group(group)), None)
    if group is None:
        raise NoSuchResource(
            f"the checkpoint has no adapter: no group {' or '.join(GROUPS)}",
            hint=f"groups: {', '.join(source.groups) or 'none'}",
        )
    if CONFIG not in source.assets:
        raise NoSuchResource(
            f"the checkpoint has no {CONFIG}, which PEFT needs to load the adapter",
            hint="pass it as an asset when you save: assets=holdfast.integrations.peft.adapter_config(model)",
        )
    tensors = {name: tensor for name, tensor in source.group(group).items() if not is_of_rank(name)}
    refuse_sub_byte(tensors)
    ties = source.ties(group)  # PEFT reads every name, and takes its own values for one that is missing
    foreign = [name for name in (*tensors, *ties) if not name.startswith("base_model.") and name not in _PROMPTS]
    if foreign:
        raise StateMismatch(f"{min(foreign)!r} is not a PEFT name", hint="PEFT's names begin with base_model.")
    mapped = [
        same(tensor, TensorKey(STEM, name), options.dtype if options.dtype and tensor.spec.dtype in FLOATS else None)
        for name, tensor in tensors.items()
    ]
    with_ties = tied({one.spec.name: one for one in mapped}, ties)
    files = shard_set(STEM, with_ties.values(), "pt", file_bytes_max=_FILE_BYTES_MAX)
    notes = [*roundings(source, mapped), *said(ties)]
    left_out = other_groups(source, frozenset({group}), "a PEFT directory holds only the adapter")
    left_out += values_of_weights(source, frozenset({group}))
    left_out += [LeftOut(name, "it belongs to the base model") for name in source.assets if name in _OF_THE_BASE]
    return ExportPlan((*files.files, *copied_assets(source, _OF_THE_BASE)), tuple(notes), tuple(left_out))


KIND = ExportKind("peft", EXPORT_KINDS["peft"], plan)

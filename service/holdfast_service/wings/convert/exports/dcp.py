"""Exports tensors and values as a directory that `torch.distributed.checkpoint` loads."""

from __future__ import annotations

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.jobs import EXPORT_KINDS
from holdfast_service.wings.convert.exports import weights
from holdfast_service.wings.convert.exports.ordered_tensors import arrange, renamed_documents
from holdfast_service.wings.convert.exports.plan import ExportKind, ExportOptions, ExportPlan, LeftOut, copied_assets
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.exports.tied_tensors import said, tied
from holdfast_service.wings.convert.foreign.dcp.export import target_files
from holdfast_service.wings.convert.foreign.dcp.export_names import LAYOUTS

DEFAULT_LAYOUT = LAYOUTS[0]


def plan(source: ExportSource, options: ExportOptions) -> ExportPlan:
    """Everything under the names of `options.layout`, with the checkpoint's small files.

    `options.dtype` converts the model's weights only.
    """
    if options.weights != "model":
        raise InvalidRequest("a torch.distributed.checkpoint directory always holds all groups", hint="leave --weights out")
    arranged = arrange(source, options.program)
    chosen = weights.choose(source, arranged, options) if arranged.group("model") else None
    groups = {group: dict(held) for group, held in arranged.groups.items()}
    if chosen is not None:
        groups["model"] |= chosen.tensors
    notes = list(arranged.notes if chosen is None else chosen.notes)
    for group, ties in source.aliases.items() if options.program is None else ():
        groups[group] = tied(groups[group], ties)  # torch loads every name of a state dict
        notes += said(ties, f"tied tensors of group {group} are stored under both names")
    tensors = [mapped for held in groups.values() for mapped in held.values()]
    dcp_export = target_files(tensors, renamed_documents(source, arranged), options.layout or DEFAULT_LAYOUT)
    left_out = [LeftOut(what, why) for what, why in dcp_export.left_out]
    left_out += [LeftOut(name, "it differs between ranks") for name in source.ranked]
    return ExportPlan((*dcp_export.files, *copied_assets(source)), tuple(notes), tuple(left_out))


KIND = ExportKind("dcp", EXPORT_KINDS["dcp"], plan)

"""Exports tensors and values as a directory that `torch.distributed.checkpoint` loads."""

from __future__ import annotations

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.exports import weights
from holdfast_formats.exports.arranged import arrange, renamed_documents
from holdfast_formats.exports.plan import ExportKind, ExportOptions, ExportPlan, LeftOut, copied_assets
from holdfast_formats.foreign.committed import ExportSource
from holdfast_formats.foreign.dcp.export import target_files
from holdfast_formats.foreign.dcp.export_names import LAYOUTS

DEFAULT_LAYOUT = LAYOUTS[0]


def plan(source: ExportSource, options: ExportOptions) -> ExportPlan:
    """Everything in the names of `options.layout`, with the checkpoint's small files beside it.

    With `options.dtype` the model's weights are converted, and what trains them is not.
    """
    if options.weights != "model":
        raise InvalidRequest("a directory of torch.distributed.checkpoint holds all groups", hint="leave --weights out")
    arranged = arrange(source, options.program)
    chosen = weights.choose(source, arranged, options) if arranged.group("model") else None
    model = [] if chosen is None else list(chosen.tensors.values())
    others = [mapped for group, held in arranged.groups.items() if group != "model" for mapped in held.values()]
    made = target_files([*model, *others], renamed_documents(source, arranged), options.layout or DEFAULT_LAYOUT)
    left_out = [LeftOut(what, why) for what, why in made.left_out]
    left_out += [LeftOut(name, "it differs between ranks") for name in source.ranked]
    notes = arranged.notes if chosen is None else chosen.notes
    return ExportPlan((*made.files, *copied_assets(source)), notes, tuple(left_out))


KIND = ExportKind("dcp", "a directory of torch.distributed.checkpoint", plan)

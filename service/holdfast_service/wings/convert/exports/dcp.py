"""Exports tensors and values as a directory that `torch.distributed.checkpoint` loads."""

from __future__ import annotations

from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.optimizer_state import masters_in
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

    `options.weights` are exported in place of the model's, in their own dtypes. `options.dtype` converts only them.
    """
    arranged, layout = arrange(source, options.program), options.layout or DEFAULT_LAYOUT
    groups = {group: dict(held) for group, held in arranged.groups.items()}
    notes, left_out = list(arranged.notes), list[LeftOut]()
    documents = renamed_documents(source, arranged)
    if weights.GROUP in groups or options.weights != weights.GROUP:
        chosen = weights.choose(source, arranged, options, as_stored=True)
        groups[weights.GROUP] |= chosen.tensors
        notes, left_out = list(chosen.notes), list(chosen.left_out)
    for group, ties in source.aliases.items() if options.program is None else ():
        groups[group] = tied(groups[group], ties)  # torch loads every name of a state dict
        notes += said(ties, f"tied tensors of group {group} are stored under both names")
    if options.weights != weights.GROUP:
        kept = set[str]()
        if options.weights == optimizer_state.MASTER_GROUP and layout != "plain":
            kept = {name for held in documents.get(optimizer_state.GROUP, {}).values() for name in masters_in(held)}
        groups[options.weights] = {name: one for name, one in groups[options.weights].items() if name in kept}
        left_out.append(LeftOut("the model's own weights", f"group {options.weights} was chosen in their place"))
    tensors = [mapped for held in groups.values() for mapped in held.values()]
    dcp_export = target_files(tensors, documents, layout)
    left_out += [LeftOut(what, why) for what, why in dcp_export.left_out]
    left_out += [LeftOut(name, "it differs between ranks") for name in source.ranked]
    return ExportPlan((*dcp_export.files, *copied_assets(source)), tuple(notes), tuple(left_out))


KIND = ExportKind("dcp", EXPORT_KINDS["dcp"], plan)

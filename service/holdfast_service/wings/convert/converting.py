"""Converts another program's checkpoint for a third one: its listing is exported, without an intermediate checkpoint."""

from __future__ import annotations

from typing import Any, NamedTuple

from holdfast_files.opened import open_checkpoint
from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.rest.jobs import ConvertArguments
from holdfast_service.daemon.copying.watched_source import WatchedSource
from holdfast_service.storage import read_once
from holdfast_service.wings.convert import foreign_export, import_report, importing
from holdfast_service.wings.convert.exports.source import of_listing
from holdfast_service.wings.convert.foreign.kinds import ForeignKind, choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.foreign_export import PlannedExport


class Conversion(NamedTuple):
    """A conversion before its first byte is written. A Holdfast checkpoint is read by its manifest, without a listing."""

    export: PlannedExport
    watched: WatchedSource
    listing: ForeignListing | None

    def check_unchanged(self) -> None:
        """`StateMismatch` if a file of the source has changed since it was first read, or files were added or removed."""
        if self.listing is not None:
            self.watched.check_unchanged([use.file for use in self.listing.files if use.use != "unused"])
            self.watched.check_names()


def plan_conversion(source: Files, wanted: ConvertArguments) -> Conversion:
    """Plan a conversion. Reads only tensors that a program assumes to be equal or zeros.

    Raises what reading a kind and planning an export raise.
    """
    watched = WatchedSource(read_once(source))
    if importing.is_ours(source, wanted.kind, wanted.chosen):
        manifest = open_checkpoint(source, "").manifest
        return Conversion(foreign_export.plan_export(source, "", manifest, wanted), watched, None)
    foreign_kind: ForeignKind = choose(watched, wanted.kind, KINDS, wanted.leave_out)
    listing = foreign_kind.read(watched, wanted)
    if not listing.tensors:
        raise StateMismatch(f"{foreign_kind.title} has no tensors to convert", hint="check the directory's path")
    return Conversion(foreign_export.planned_of(of_listing(watched, listing), watched, wanted), watched, listing)


def report(conversion: Conversion) -> dict[str, Any]:
    """The report of the export, and every file of the source with its use."""
    listing = conversion.listing
    if listing is None:
        source: dict[str, Any] = {"kind": importing.OURS, "files": [], "notes": []}
    else:
        source = import_report.listed_files(conversion.watched, listing)
    written = [{"file": file.name, "bytes": file.bytes} for file in conversion.export.plan.files]
    report_source = {"source": source, "written": written[: import_report.FILES_LISTED]}
    return {**foreign_export.report(conversion.export), **report_source}

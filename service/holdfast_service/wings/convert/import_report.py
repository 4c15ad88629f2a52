"""The report of an import, in state.json and in the result of its job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast_formats.disk.packing import natural_key
from holdfast_formats.mapping.listing import FileUse, ForeignListing, PartLeftOut
from holdfast_service.daemon.copying.watched_source import WatchedSource
from holdfast_service.wings.convert.importing import PlannedImport

FILES_LISTED = 200  # in a job's result; state.json has all
NAMED = 3  # tensors of a group, as examples


def source_of(planned: PlannedImport, read: bool = True) -> dict[str, Any]:
    """The `source` object of state.json; digests of files are known once everything is `read`."""
    summary = _summary(planned.source, planned.listing, _notes(planned), read)
    return {"kind": summary.pop("kind"), "job": planned.job, **summary, **planned.chosen, **planned.about}


def listed_files(source: WatchedSource, listing: ForeignListing) -> dict[str, Any]:
    """The kind of a source, and the use of each of its files, without digests."""
    return _shortened(_summary(source, listing, list(listing.notes), read=False))


def _summary(source: WatchedSource, listing: ForeignListing, notes: Iterable[str], read: bool) -> dict[str, Any]:
    files = [_listed_file(source, use, read) for use in listing.files]
    about: dict[str, Any] = {} if listing.step is None else {"step": listing.step}
    if listing.left_out:
        about["left_out"] = [_part_left_out(part) for part in listing.left_out]
    return {"kind": listing.kind, "files": files, "notes": list(map(_unicode, notes)), **about}


def _part_left_out(part: PartLeftOut) -> dict[str, Any]:
    return {"what": _unicode(part.what), "reason": _unicode(part.reason), "tensors": part.tensors, "bytes": part.bytes}


def _shortened(source: dict[str, Any]) -> dict[str, Any]:
    short = dict(source)
    for key in ("files", "left_out"):
        more = len(source.get(key, ())) - FILES_LISTED
        if more > 0:
            short |= {key: source[key][:FILES_LISTED], f"more_{key}": more}
    return short


def report(planned: PlannedImport, source: dict[str, Any]) -> dict[str, Any]:
    """The conversion, for the result of a job, and of a dry run."""
    groups: dict[str, Any] = {}
    for file in planned.plan.files:
        for tensor in file.tensors:
            spec = tensor.spec
            group = groups.setdefault(spec.group, {"tensors": 0, "bytes": 0, "dtypes": set(), "names": []})
            group["tensors"] += 1
            group["bytes"] += spec.nbytes
            group["dtypes"].add(spec.dtype)
            group["names"].append(spec.name)
    for group in groups.values():
        group["dtypes"] = sorted(group["dtypes"])
        group["names"] = sorted(group["names"], key=natural_key)[:NAMED]
    for name, values in planned.wanted.documents.items():
        groups.setdefault(name, {"tensors": 0, "bytes": 0, "dtypes": [], "names": []})["values"] = sorted(values)
    written = [{"file": file.name, "bytes": file.bytes} for file in planned.files]
    return {
        "run": planned.plan.run,
        "step": planned.plan.step,
        "tensors": sum(len(file.tensors) for file in planned.plan.files),
        "groups": groups,
        "written": written[:FILES_LISTED],
        "source": _shortened(source),
    }


def _listed_file(source: WatchedSource, use: FileUse, read: bool) -> dict[str, Any]:
    size = source.size(use.file)
    entry: dict[str, Any] = {"file": _unicode(use.file), "bytes": size, "use": use.use}
    if read and size is not None and use.use != "unused":
        entry["xxh3"] = source.digest_of(use.file)
    if use.reason:
        entry["reason"] = _unicode(use.reason)
    return entry


def _notes(planned: PlannedImport) -> list[str]:
    notes, listing = [*planned.listing.notes, *planned.wanted.notes], planned.listing
    if listing.step is not None and listing.step != planned.plan.step:
        notes.append(f"the training was at step {listing.step}; the checkpoint is imported as step {planned.plan.step}")
    return notes


def _unicode(text: str) -> str:
    """The text with escaped non-Unicode bytes of file names, which other programs' JSON cannot hold."""
    return text.encode(errors="backslashreplace").decode()

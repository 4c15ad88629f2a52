"""Runs as a whole over the REST API: metadata, changes, removal and the trash. One function per route."""

from __future__ import annotations

from urllib.parse import quote

from holdfast.rest.api import Api
from holdfast_formats.rest.runs import RenamedRun, RunAbout, RunChange, Trash, TrashedRun


def about(api: Api, run: str) -> RunAbout:
    """A run's metadata; `NoSuchRun`."""
    return api.get(f"{_run(run)}/about", RunAbout)


def change(api: Api, run: str, wanted: RunChange) -> RunAbout:
    """Set owner, notes or tags, archive or unarchive it, acknowledge its death; returns its metadata."""
    return api.parsed(api.request("PATCH", _run(run), json=wanted.model_dump(exclude_none=True)).content, RunAbout)


def delete(api: Api, run: str, marked: bool = False, dry_run: bool = False) -> TrashedRun:
    """Move a run to the trash, or with `dry_run` return what that would be; `marked`: pinned checkpoints included."""
    return api.parsed(api.request("DELETE", _run(run), params={"marked": marked, "dry_run": dry_run}).content, TrashedRun)


def undelete(api: Api, run: str, entry: str | None = None) -> TrashedRun:
    """Restore a run from its last entry in the trash, or from this one."""
    return api.parsed(api.request("POST", f"{_run(run)}/undelete", params=_entry(entry)).content, TrashedRun)


def rename(api: Api, run: str, to: str) -> RenamedRun:
    """Rename a run."""
    return api.parsed(api.request("POST", f"{_run(run)}/rename", params={"to": to}).content, RenamedRun)


def trash(api: Api) -> Trash:
    return api.get("/v1/trash", Trash)


def empty_trash(api: Api, run: str, entry: str | None = None) -> Trash:
    """Remove a run's entries, or this entry, from the trash for good; returns them."""
    return api.parsed(api.request("DELETE", f"{_run(run)}/trash", params=_entry(entry)).content, Trash)


def _entry(entry: str | None) -> dict[str, str]:
    return {} if entry is None else {"entry": entry}


def _run(run: str) -> str:
    return f"/v1/runs/{quote(run, safe='')}"

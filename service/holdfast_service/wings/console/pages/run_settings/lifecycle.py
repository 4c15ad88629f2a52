"""A run as a whole: its owner and launches, and the actions that archive it or delete it."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from typing import Any, NamedTuple

from fastapi import Request
from starlette.responses import Response

from holdfast_formats.errors import CheckpointError, InvalidRequest
from holdfast_formats.rest import bodies
from holdfast_formats.rest.flat_values import flat
from holdfast_formats.rest.runs import RunAbout, RunChange, RunLaunch, TrashedRun
from holdfast_service.wings.console.rendering import page, see
from holdfast_service.wings.console.routing import Form, Posted, filled, page_router
from holdfast_service.wings.console.viewer_api import Asked, at, to

router = page_router()


class LaunchLine(NamedTuple):
    """A launch on the page: its commit, and other metadata."""

    launch: RunLaunch
    commit: Any
    git: str
    facts: dict[str, str]
    others: dict[str, str]
    changes: list[LaunchChange]  # against the launch before


class LaunchChange(NamedTuple):
    """A value that a launch said and the one before said otherwise; None where one has not said it."""

    name: str
    before: str | None
    now: str | None


_DONE = {
    "archive": (RunChange(archived=True), "archived"),
    "unarchive": (RunChange(archived=False), "unarchived"),
}
CHANGES_SHOWN = 50
_LINES = ("user", "host", "python", "torch")
_SHOWN = ("git", "launcher", "command", "directory", "owner", "notes", "tags", *_LINES)


@router.get("/runs/{run}/about")
async def show_about(request: Request, api: Asked, run: str) -> Response:
    """Owner, notes, tags and launches, with a form for what people may set."""
    metadata = await api.get(RunAbout, at(run) + "/about")
    return page(request, "about.html", run=run, about=metadata, launches=_lines(metadata.launches))


@router.post("/runs/{run}/about")
async def set_about(api: Asked, run: str, form: Posted) -> Response:
    """Only the tags that were added or removed in the form are: another person may have changed others meanwhile."""
    before, tags = form.text("tags_before").split(), form.text("tags").split()
    wanted = {
        "owner": form.text("owner"),
        "notes": form.lines("notes"),
        "tag": [tag for tag in tags if tag not in before],
        "untag": [tag for tag in before if tag not in tags],
    }
    await api.request("PATCH", at(run), body=filled(RunChange, wanted))
    return see(to(run) + "/about", "noted")


@router.post("/runs/{run}/life")
async def change_life(api: Asked, run: str, form: Posted) -> Response:
    """Archive it, or take it back from the archive."""
    what = form.text("what")
    if what not in _DONE:
        raise InvalidRequest(f"{what!r} is not an action for a run", hint=f"one of {', '.join(_DONE)}")
    change, message = _DONE[what]
    await api.request("PATCH", at(run), body=change)
    return see(to(run), message)


@router.get("/runs/{run}/delete")
async def confirm_deletion(request: Request, api: Asked, run: str) -> Response:
    """Show what would be deleted, or why that is refused, before anything happens."""
    run_found = await api.get(bodies.Run, at(run))
    refused: CheckpointError | None = None
    trashed_run: TrashedRun | None = None
    try:
        answer = await api.request("DELETE", at(run), dry_run="true")
        trashed_run = TrashedRun.model_validate_json(answer.content)
    except CheckpointError as error:
        refused = error
    return page(request, "delete_run.html", run=run_found, told=trashed_run, refused=refused)


@router.post("/runs/{run}/delete")
async def delete(api: Asked, run: str, form: Posted) -> Response:
    """Move it to the trash, if its name was typed once more."""
    _confirmed(form, run)
    await api.request("DELETE", at(run), marked="true" if form.text("marked") else None)
    return see("/trash", "deleted")


@router.get("/runs/{run}/rename")
async def ask_name(request: Request, api: Asked, run: str) -> Response:
    """Ask for the new name, and for the old one once more."""
    return page(request, "rename.html", run=await api.get(bodies.Run, at(run)))


@router.post("/runs/{run}/rename")
async def rename(api: Asked, run: str, form: Posted) -> Response:
    """Rename it, if its name was typed once more."""
    _confirmed(form, run)
    name = form.text("name")
    await api.request("POST", at(run) + "/rename", to=name)
    return see(to(name), "renamed")


def _confirmed(form: Form, run: str) -> None:
    if form.text("confirm") != run:
        raise InvalidRequest(
            f"you typed {form.text('confirm')!r}, but the run is {run!r}", hint="go back and type the run's name"
        )


def _lines(launches: list[RunLaunch]) -> list[LaunchLine]:
    by_attempt = sorted(launches, key=lambda launch: launch.attempt)
    before = {newer.attempt: older for older, newer in pairwise(by_attempt)}
    return [_line(launch, _changes(before.get(launch.attempt), launch)) for launch in launches]


def _changes(older: RunLaunch | None, newer: RunLaunch) -> list[LaunchChange]:
    """What differs, nested values by their path; the first so many."""
    if older is None:
        return []
    was = flat(older.info) | {"ranks": str(older.world)}
    now = flat(newer.info) | {"ranks": str(newer.world)}
    names = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
    return [LaunchChange(name, was.get(name), now.get(name)) for name in names[:CHANGES_SHOWN]]


def _line(launch: RunLaunch, changes: list[LaunchChange]) -> LaunchLine:
    """Parses metadata defensively: trainers may have set anything under any name."""
    info = launch.info
    git = info.get("git")
    facts = {name.capitalize(): _command(info.get(name)) for name in ("launcher", "command")}
    facts["Directory"] = info.get("directory")
    facts |= {name.capitalize(): info.get(name) for name in _LINES}
    return LaunchLine(
        launch,
        git.get("commit") if isinstance(git, dict) else git,
        _git_notes(git) if isinstance(git, dict) else "",
        {name: str(value) for name, value in facts.items() if value},
        {
            name: value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
            for name, value in info.items()
            if name not in _SHOWN
        },
        changes,
    )


def _command(words: Any) -> Any:
    return shlex.join(map(str, words)) if isinstance(words, list) else words


def _git_notes(git: dict[str, Any]) -> str:
    dirty = "with uncommitted changes" if git.get("dirty") else ""
    return ", ".join(str(text) for text in (git.get("branch"), dirty) if text)

"""A run's metadata as lines of text."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from holdfast.terminal import console
from holdfast_formats.rest.runs import RunAbout, RunLaunch

LAUNCHES_SHOWN = 5
STEPS_SHOWN = 10
VALUE_CHARACTERS_MAX = 400
_KNOWN = ("git", "launcher", "command", "directory", "user", "host", "python", "torch", "owner", "notes", "tags")


def lines(metadata: RunAbout) -> Iterator[Text]:
    yield Text(metadata.run, "bold")
    since = f" ({console.human_age(metadata.life_since)})" if metadata.life_since else ""
    facts = {
        "state": f"{metadata.standing or metadata.life}{since}",
        "owner": metadata.owner or "none",
        "notes": metadata.notes or "none",
    }
    if metadata.tags:
        facts["tags"] = ", ".join(metadata.tags)
    if metadata.missing:
        shown = ", ".join(map(str, metadata.missing[:STEPS_SHOWN])) + ", …" * (len(metadata.missing) > STEPS_SHOWN)
        facts["missing"] = f"step {shown}: removed by something other than Holdfast"
    if metadata.archived:
        facts["archived"] = console.human_age(metadata.archived)
    if metadata.acknowledged:
        when = f", {console.human_age(metadata.acknowledged_at)}" if metadata.acknowledged_at else ""
        facts["death seen"] = f"by {metadata.acknowledged_by or 'an unknown user'}{when}"
    for name, value in facts.items():
        yield Text(f"{name:<11} {value}")
    for launch in metadata.launches[:LAUNCHES_SHOWN]:
        yield from _launch(launch)
    if len(metadata.launches) > LAUNCHES_SHOWN:
        yield Text(f"and {len(metadata.launches) - LAUNCHES_SHOWN} earlier launches (--json has them)", "dim")


def _launch(launch: RunLaunch) -> Iterator[Text]:
    ranks = f"{launch.world} {'rank' if launch.world == 1 else 'ranks'}"
    yield Text(f"attempt {launch.attempt}   {console.human_age(launch.at)}, {ranks}", "bold")
    info = launch.info
    if git := git_text(info.get("git")):
        yield Text(f"  git         {git}")
    for name in ("launcher", "command"):
        if isinstance(command := info.get(name), list):
            yield Text(f"  {name:<11} {shlex.join(map(str, command))}")
    if info.get("directory"):
        yield Text(f"  directory   {info['directory']}")
    where = " on ".join(str(info[name]) for name in ("user", "host") if info.get(name))
    versions = ", ".join(f"{name} {info[name]}" for name in ("python", "torch") if info.get(name))
    if where or versions:
        yield Text(f"  by          {where}" + (f" ({versions})" if versions else ""))
    for name, value in info.items():
        if name not in _KNOWN:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            cut = f"{text[:VALUE_CHARACTERS_MAX]} …" if len(text) > VALUE_CHARACTERS_MAX else text
            yield Text(f"  {name:<11} {cut}")


def git_text(git: Any) -> str:
    """A commit as `1ec1c9bc main, with changes`."""
    if not isinstance(git, Mapping) or not isinstance(git.get("commit"), str):
        return git if isinstance(git, str) else ""
    branch = f" {git['branch']}" if git.get("branch") else ""
    return f"{git['commit'][:12]}{branch}" + (", with changes that are not committed" if git.get("dirty") else "")

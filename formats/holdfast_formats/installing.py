"""How an optional part of Holdfast is installed, as hints say it: from where this installation came from."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "holdfast-checkpoint"


def install(extra: str) -> str:
    """The command that installs an extra, such as `service`.

    It names the directory or the repository that pip installed Holdfast from. No package index has Holdfast, so
    otherwise it is the command in a clone.
    """
    try:
        origin = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url = str(origin.get("url", ""))
    if "vcs_info" in origin:
        return "pip install " + shlex.quote(f"{DISTRIBUTION}[{extra}] @ {origin['vcs_info']['vcs']}+{url}")
    directory = Path(unquote(urlsplit(url).path))
    if "dir_info" in origin and (directory / "pyproject.toml").is_file():
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}" + shlex.quote(f"{directory}[{extra}]")
    return f"pip install '.[{extra}]' in a clone of Holdfast's repository"

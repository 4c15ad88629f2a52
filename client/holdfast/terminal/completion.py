"""Shell completion: runs, and after `@` their steps. It prints nothing else and never waits long."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from typer import Context

from holdfast.read.library import open_library
from holdfast_formats.errors import CheckpointError

OFFERED_MAX = 50


def runs(context: Context, incomplete: str) -> list[str]:
    """Names of runs."""
    try:
        with closing(open_library(*_where(context))) as library:
            return [run.name for run in library.runs() if run.name.startswith(incomplete)][:OFFERED_MAX]
    except (CheckpointError, OSError):
        return []


def checkpoints(context: Context, incomplete: str) -> list[str]:
    """Names of runs; after RUN@ its steps, newest first."""
    name, at, step = incomplete.partition("@")
    if not at:
        return runs(context, incomplete)
    try:
        with closing(open_library(*_where(context))) as library:
            steps = [*library.names, *(str(checkpoint.step) for checkpoint in library.checkpoints(name).checkpoints)]
    except (CheckpointError, OSError):
        return []
    return [f"{name}@{found}" for found in steps if found.startswith(step)][:OFFERED_MAX]


def _where(context: Context) -> tuple[Path | None, str | None]:
    root, url = context.params.get("root"), context.params.get("url")
    return (Path(root) if root else None), url

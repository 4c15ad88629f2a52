"""Shell completion: runs, and after `@` their steps. It prints nothing else and never waits long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path

from typer import Context

from holdfast.read.checkpoint_index import open_library
from holdfast_formats.errors import CheckpointError

OFFERED_MAX = 50
WAIT_S = 2.0  # for one answer: a service that hangs, or a file system, must not hold up a shell


def runs(context: Context, incomplete: str) -> list[str]:
    def ask() -> Iterator[str]:
        with closing(open_library(*_where(context))) as library:
            yield from library.run_names(incomplete)

    return _offered(ask, incomplete)


def deleted(context: Context, incomplete: str) -> list[str]:
    def ask() -> Iterator[str]:
        from holdfast.config import default_url
        from holdfast.rest import runs as rest
        from holdfast.rest.api import Api

        with Api(_where(context)[1] or default_url()) as api:
            yield from dict.fromkeys(one.run for one in rest.trash(api).items)

    return _offered(ask, incomplete)


def checkpoints(context: Context, incomplete: str) -> list[str]:
    """Names of runs; after RUN@ its steps, newest first."""
    name, at, _ = incomplete.partition("@")
    if not at:
        return runs(context, incomplete)

    def ask() -> Iterator[str]:
        with closing(open_library(*_where(context))) as library:
            steps = iter(library.steps(name))
            newest = list(islice(steps, 1))  # without a service nothing is offered
            yield from (f"{name}@{one}" for one in (*library.names, *newest))
            yield from (f"{name}@{step}" for step in steps)

    return _offered(ask, incomplete)


def _offered(ask: Callable[[], Iterator[str]], incomplete: str) -> list[str]:
    """Completions found in time. A thread that is still asking ends with the process."""
    offered: list[str] = []

    def asking() -> None:
        with suppress(CheckpointError, OSError):
            offered.extend(islice((one for one in ask() if one.startswith(incomplete)), OFFERED_MAX))

    thread = threading.Thread(target=asking, name="holdfast-completion", daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return list(offered)


def _where(context: Context) -> tuple[Path | None, str | None]:
    root, url = context.params.get("root"), context.params.get("url")
    return (Path(root) if root else None), url

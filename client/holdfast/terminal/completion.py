"""Shell completion: runs, and after `@` their steps. It prints nothing else and never waits long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

from typer import Context

from holdfast.read import names
from holdfast.read.checkpoint_root import root_of
from holdfast_formats.errors import CheckpointError

OFFERED_MAX = 50
WAIT_S = 2.0  # for one answer: a service that hangs, or a file system, must not hold up a shell


def runs(context: Context, incomplete: str) -> list[str]:
    return _offered(lambda: _place(context).runs(incomplete), incomplete)


def tags(context: Context, incomplete: str) -> list[str]:
    return _offered(lambda: _place(context).tags(incomplete), incomplete)


def deleted(context: Context, incomplete: str) -> list[str]:
    return _offered(lambda: _place(context).deleted(), incomplete)


def checkpoints(context: Context, incomplete: str) -> list[str]:
    """Names of runs; after RUN@ its steps, newest first."""
    name, at, _ = incomplete.partition("@")
    if not at:
        return runs(context, incomplete)
    return _offered(lambda: _place(context).checkpoints(name), incomplete)


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


def _place(context: Context) -> names.NamePlace:
    root, url = context.params.get("root"), context.params.get("url")
    return names.place(root_of(root) if isinstance(root, str) else root, url)

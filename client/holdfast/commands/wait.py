"""`holdfast wait`: until every save is safe."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.config import default_url
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.errors import DaemonGone, DeadlineExceeded, InvalidRequest

LOOK_S = 0.25
TIMEOUT_S = 300.0

Idle = Annotated[bool, typer.Option("--idle", help="Until no save is under way, and every checkpoint is read back.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Give up after so long.")]


def wait(idle: Idle = False, timeout: Timeout = TIMEOUT_S, url: Url = None, as_json: AsJson = False) -> None:
    """Wait until the daemon has saved and verified all it was given: before a machine is drained, or a volume unmounted.

    A daemon that is not there has nothing left to do. Exit status 6 when the time is over before that.
    """
    with console.reporting(as_json):
        if not idle:
            raise InvalidRequest("say what to wait for: --idle", hint="holdfast wait --help")
        began = time.monotonic()
        with Api(url or default_url()) as api:
            while _busy(api):
                if time.monotonic() - began >= timeout:
                    raise DeadlineExceeded(
                        f"saves were still under way after {timeout:.0f} s", hint="holdfast top and /v1/rounds show them"
                    )
                time.sleep(LOOK_S)
        if as_json:
            console.print_json({"idle": True, "seconds": round(time.monotonic() - began, 3)})


def _busy(api: Api) -> bool:
    try:
        return any(node.busy for node in api.nodes())
    except DaemonGone:
        return False

"""`holdfast wait`: wait until every save is durable and verified."""

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

Idle = Annotated[bool, typer.Option("--idle", help="Wait until no save is in progress and every checkpoint is verified.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Give up after this many seconds.")]


def wait(idle: Idle = False, timeout: Timeout = TIMEOUT_S, url: Url = None, as_json: AsJson = False) -> None:
    """Wait until the daemon has written and verified all saves: before you drain a machine or unmount a volume.

    If no daemon runs, there is nothing to wait for. Exit status 6 if the timeout is over first.
    """
    with console.reporting(as_json):
        if not idle:
            raise InvalidRequest("no condition to wait for: pass --idle", hint="see `holdfast wait --help`")
        began = time.monotonic()
        with Api(url or default_url()) as api:
            while _busy(api):
                if time.monotonic() - began >= timeout:
                    raise DeadlineExceeded(
                        f"saves were still in progress after {timeout:.0f} s",
                        hint="`holdfast top` and GET /v1/rounds show the saves",
                    )
                time.sleep(LOOK_S)
        if as_json:
            console.print_json({"idle": True, "seconds": round(time.monotonic() - began, 3)})


def _busy(api: Api) -> bool:
    try:
        return any(node.busy for node in api.nodes())
    except DaemonGone:
        return False

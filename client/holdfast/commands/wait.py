"""`holdfast wait`: wait until a step is a verified checkpoint, or until every save is durable and verified."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.commands.labels_and_pins import named
from holdfast.config import default_url
from holdfast.rest import replicas
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.errors import (
    DaemonGone,
    DeadlineExceeded,
    InvalidRequest,
    NoSuchCheckpoint,
    NoSuchRun,
    NotFound,
    Unavailable,
    from_problem,
)
from holdfast_formats.timestamps import check_seconds

LOOK_S = 0.25
TIMEOUT_S = 300.0

Target = Annotated[str | None, typer.Argument(metavar="RUN@STEP", help="Wait until this step is saved and verified.")]
Idle = Annotated[bool, typer.Option("--idle", help="Wait until no save is in progress and every checkpoint is verified.")]
Committed = Annotated[bool, typer.Option("--committed", help="Do not wait until RUN@STEP is read back and verified.")]
Tier = Annotated[str | None, typer.Option("--tier", metavar="NAME", help="Wait until RUN@STEP is copied to this tier too.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Give up after this many seconds.")]


def wait(  # noqa: PLR0913 - each is an option
    target: Target = None,
    idle: Idle = False,
    committed: Committed = False,
    tier: Tier = None,
    timeout: Timeout = TIMEOUT_S,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Wait for a step, or until all saves are done. A save is done once it is written and verified.

    With --idle, if no daemon runs, there is nothing to wait for. With RUN@STEP, a daemon that does not answer is asked
    again until the time is over. Exit status 6 if the time is over first, 5 if the checkpoint turns out damaged.
    """
    with console.reporting(as_json):
        check_seconds(timeout, "--timeout")
        if tier == "":
            raise InvalidRequest("the tier has no name", hint="`holdfast nodes` lists the tiers of each daemon")
        if idle == (target is not None) or (idle and (committed or tier)) or (committed and tier):
            raise InvalidRequest(
                "wait for either RUN@STEP (alone, or with --committed or --tier) or --idle",
                hint="see `holdfast wait --help`",
            )
        with Api(url or default_url()) as api:
            if target is None:
                _wait_idle(api, timeout, as_json)
            else:
                _Awaited(api, *named(target), committed, tier).wait(timeout, as_json)


class _Awaited:
    def __init__(self, api: Api, run: str, step: int, committed: bool, tier: str | None) -> None:
        self._api, self._run, self._step, self._committed, self._tier = api, run, step, committed, tier
        self._why = f"{run}@{step} is not a checkpoint yet"

    def wait(self, timeout: float, as_json: bool) -> None:
        """Return when it exists; raises its damage, or `DeadlineExceeded`."""
        began = time.monotonic()
        if self._tier is not None:  # one that there is not is refused before anything is awaited
            self._copied()
        while (state := self._look()) is None:
            if time.monotonic() - began >= timeout:
                raise DeadlineExceeded(
                    f"after {timeout:.0f} s, {self._why}",
                    hint=f"see `holdfast ls {self._run}`, and `holdfast events {self._run}` for saves that failed",
                )
            time.sleep(LOOK_S)
        if as_json:
            seconds = round(time.monotonic() - began, 3)
            console.print_json({"run": self._run, "step": self._step, "state": state, "seconds": seconds})
        else:
            to = "" if self._tier is None else f" to {self._tier}"
            console.out().print(f"{self._run}@{self._step} is {state}{to}", markup=False, highlight=False)

    def _look(self) -> str | None:
        """The checkpoint's state if it is the awaited one. An abandoned one is not: its step is saved again."""
        try:
            checkpoint = self._api.checkpoint(self._run, self._step)
        except NotFound:
            self._why = f"{self._run}@{self._step} is not a checkpoint yet"
            return self._copied()  # the root may have removed it
        except Unavailable as away:
            self._why = away.detail
            return None
        if checkpoint.abandoned:
            self._why = f"{self._run}@{self._step} is abandoned, and has not been saved again"
            return None
        if checkpoint.damage is not None:
            raise from_problem(checkpoint.damage)
        if not (checkpoint.verified or self._committed):
            self._why = f"{self._run}@{self._step} is committed but not verified yet"
            return None
        return checkpoint.state if self._tier is None else self._copied(committed=True)

    def _copied(self, committed: bool = False) -> str | None:
        """The state of a checkpoint that is in the tier. One that is not `committed` need not exist."""
        try:
            return "copied" if self._tier is not None and self._is_in(self._tier) else None
        except (NoSuchRun, NoSuchCheckpoint):
            if committed:
                raise
            return None

    def _is_in(self, tier: str) -> bool:
        """Whether the tier has a copy that was read back."""
        try:
            found = replicas.copied(self._api, self._run, self._step, tier)
        except Unavailable as away:
            self._why = away.detail
            return False
        self._why = found.why
        return found.copied


def _wait_idle(api: Api, timeout: float, as_json: bool) -> None:
    began = time.monotonic()
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

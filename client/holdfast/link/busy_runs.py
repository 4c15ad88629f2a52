"""Waits for a run whose last job was killed: the run counts as active until it was silent for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from holdfast_formats.errors import RunBusy

log = logging.getLogger(__name__)

SILENT_WAIT_S = 60.0  # a dead job falls silent within this time, although its last request may still be under way
PAUSE_MAX_S = 5.0

_Answer = TypeVar("_Answer")


def until_free(ask: Callable[[], _Answer]) -> _Answer:
    """The answer to a hello, repeated while ranks of a dead job may still count as alive: those that speak over HTTP.

    A request sent before the job died may count as a sign of life later, so this retries until a dead job has surely
    timed out.
    """
    began = time.monotonic()
    while True:
        try:
            return ask()
        except RunBusy as error:
            left_s = float(error.members.get("retry_after_s") or 0)
            waited_s = time.monotonic() - began
            if left_s <= 0 or waited_s > SILENT_WAIT_S:
                raise _still_busy(error, waited_s) from None
            log.warning("%s; trying again in %.0f s", error.detail, min(left_s, PAUSE_MAX_S))
            time.sleep(min(left_s, PAUSE_MAX_S))


def _still_busy(error: RunBusy, waited_s: float) -> RunBusy:
    if waited_s < 1:
        return error
    text = f"{error.detail}; waited {waited_s:.0f} s for its ranks to disconnect, but they are still active"
    return RunBusy(text, hint=error.hint, **error.members)

"""Deletes acknowledgements with their alerts: one that occurs again counts again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from holdfast_formats.errors import CheckpointError
from holdfast_service.control.insight.acknowledgements import Acknowledgements, AlertKey

log = logging.getLogger(__name__)

LOOK_S = 5.0


class AcknowledgementWatch:
    """A thread that deletes acknowledgements with their alerts."""

    def __init__(
        self,
        acknowledgements: Acknowledgements,
        still: Callable[[Collection[str]], Collection[AlertKey]],
        look_s: float = LOOK_S,
    ) -> None:
        self._acknowledgements, self._still, self._look_s = acknowledgements, still, look_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-alerts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._look_s):
            try:
                self._acknowledgements.forget_ended(self._still)
            except CheckpointError as error:  # the catalog's outage is reported already; retried at the next look
                log.debug("cannot read acknowledgements: %s", error.detail)
            except Exception:
                log.exception("reading acknowledgements failed")

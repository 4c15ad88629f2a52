"""Alerts and their acknowledgement, notifications of people, and watched daemons. README.md describes this wing."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from holdfast_service.wing import Wing

if TYPE_CHECKING:
    from holdfast_service.api.services import Services
    from holdfast_service.config import Config
    from holdfast_service.wings.notify.running import Notifying


def _start(config: Config, services: Services, stack: ExitStack) -> Notifying:
    from holdfast_service.wings.notify import running  # a daemon without an API starts without it

    return running.start(config, services, stack)


WING = Wing("notify", routes=f"{__name__}.routes", start=_start)

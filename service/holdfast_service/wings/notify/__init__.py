"""Alerts and their acknowledgement, notifications of people, and watched daemons. README.md describes this wing."""

from holdfast_service.wing import Wing
from holdfast_service.wings.notify.running import start

WING = Wing("notify", routes=f"{__name__}.routes", start=start)

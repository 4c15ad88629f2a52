"""The parts of a daemon that do jobs, for the kinds of the core and of wings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.daemon.copying.repair import Repairer
from holdfast_service.daemon.scrub import CheckJobs


class Workers(NamedTuple):
    """What does the jobs of a root. A wing makes handlers of it for the kinds of jobs that it does."""

    catalog: Catalog
    control: Control
    checks: CheckJobs
    repairer: Repairer
    place: Path | None = None  # the only directory that jobs may name, if any
    trains: Callable[[str], bool] = lambda run: False  # whether ranks of a run are connected, to any node

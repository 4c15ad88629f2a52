"""Which environment of `make integrations` this process runs in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.daemons import free_port

TOP = Path(__file__).parents[2]
BUILT = TOP / "build" / "integrations"
IN_USE = "integration.txt"


def current() -> str | None:
    """Its name; None in any other environment."""
    about = Path(sys.prefix) / IN_USE
    return about.read_text() if about.is_file() else None


def stand_alone() -> None:
    """Set what torchrun sets, for a script that was started without it: for frameworks that know only ranks."""
    if "RANK" not in os.environ:
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(one, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))

"""Which environment of `make integrations` this process runs in."""

from __future__ import annotations

import sys
from pathlib import Path

TOP = Path(__file__).parents[2]
IN_USE = "integration.txt"


def current() -> str | None:
    """Its name; None in any other environment."""
    about = Path(sys.prefix) / IN_USE
    return about.read_text() if about.is_file() else None

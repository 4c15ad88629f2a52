"""Nested JSON values as texts by their paths, so that two configs can be compared."""

from __future__ import annotations

import json
from typing import Any


def flat(value: Any, path: str = "") -> dict[str, str]:
    """Each value that is not a mapping as text, by the names that lead to it: `optim.lr`. Other values as JSON."""
    if isinstance(value, dict):
        parts = (flat(part, f"{path}.{name}" if path else str(name)) for name, part in value.items())
        return {name: text for part in parts for name, text in part.items()}
    return {path: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}

"""Arguments and results of jobs, and details of events, as text with names and units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Measure = Callable[[float], str]  # a number of bytes, or of seconds, in words
ITEMS_MAX = 20  # of a list

_NAMES = {
    "as": "Format",
    "as_is": "Names left as they are",
    "assemble_flat": "Flat slices joined",
    "bytes": "Size",
    "code": "Code",
    "dry_run": "Dry run",
    "dtype": "Converted to",
    "from": "Source",
    "id": "Job",
    "int16": "16-bit integers are",
    "layouts": "Restore tested in",
    "leave_out": "Left out by name",
    "left": "Left as they are",
    "nonfinite": "Not finite",
    "repair": "Repairs damage",
    "repaired": "Repaired",
    "salvaged": "Kept from the old catalog",
    "seconds": "It took",
    "set_aside": "Old catalog moved to",
    "shards": "Ranks that wrote shards",
    "to": "Written to",
    "weights_only": "Only the weights",
}


class Fact(NamedTuple):
    name: str
    text: str


def facts(values: Mapping[str, Any], size: Measure, duration: Measure) -> list[Fact]:
    """The facts of a job or an event, in the order of its keys, without empty values."""
    return [
        Fact(_name(key), _text(key, value, size, duration)) for key, value in sorted(values.items()) if value is not None
    ]


def _name(key: str) -> str:
    known = key.removesuffix("_s") if key.endswith("_s") else key
    return _NAMES.get(key) or known.replace("_", " ").replace("-", " ").capitalize()


def _text(key: str, value: Any, size: Measure, duration: Measure) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        if key == "bytes" or key.endswith("_bytes") or key.startswith("bytes_"):
            return size(value)
        if key == "seconds" or key.endswith(("_s", "_seconds")):
            return duration(value)
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    if isinstance(value, Mapping):
        parts = [
            f"{_name(name).lower()} {_text(name, one, size, duration)}" for name, one in value.items() if one is not None
        ]
        return ", ".join(parts) or "none"
    if isinstance(value, (list, tuple)):
        shown = [_text(key if not isinstance(one, (int, float)) else "", one, size, duration) for one in value[:ITEMS_MAX]]
        more = [f"and {len(value) - ITEMS_MAX} more"] if len(value) > ITEMS_MAX else []
        return "; ".join([*shown, *more]) or "none"
    return str(value)

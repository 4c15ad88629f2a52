"""Bytes in words."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """1234567 -> 1.2 MB, in decimal units as Hugging Face counts."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"

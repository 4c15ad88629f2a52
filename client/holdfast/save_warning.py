"""The category of warnings about saves."""

from __future__ import annotations


class SaveWarning(UserWarning):
    """An earlier save failed in the background, or was dropped; the checkpoints before it are untouched."""

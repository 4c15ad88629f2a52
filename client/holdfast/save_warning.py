"""The warning category for saves."""

from __future__ import annotations


class SaveWarning(UserWarning):
    """An earlier save failed in the background, or was dropped. Earlier checkpoints are not affected."""

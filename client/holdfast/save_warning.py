"""The warning category for saves, and warnings that name the caller's line."""

from __future__ import annotations

import sys
import warnings


class SaveWarning(UserWarning):
    """An earlier save failed in the background, or was dropped. Earlier checkpoints are not affected.

    Example:
        >>> warnings.simplefilter("error", SaveWarning)  # let a run stop at a failed save
    """


def warn(text: str, category: type[Warning] = SaveWarning) -> None:
    """Warn at the line that called holdfast, however many of our own frames are in between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == __package__:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)

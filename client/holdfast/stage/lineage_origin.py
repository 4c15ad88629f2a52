"""Tracks where the trained state comes from: the step that was restored last. Every save states it."""

from __future__ import annotations

from collections.abc import Collection

from holdfast_formats.lineage import Existing, Intent


class TrainingOrigin:
    """The origin of the state, the same on all ranks of a launch, because all restore and save alike."""

    def __init__(self) -> None:
        self._restored: int | None = None
        self._turn = 0
        self._again = 0
        self._saved = False

    def restored(self, step: int, groups: Collection[str], held: Collection[str]) -> None:
        """Record a restore. It becomes the origin if it had all `held` groups, or if nothing was restored before; a
        later partial restore, such as a teacher's weights, does not change the origin.
        """
        if set(held) <= set(groups) or not (self._saved or self._turn):
            self._restored, self._turn, self._again = step, self._turn + 1, 0

    def replaces(self) -> None:
        """Count a save that replaces an existing step, whether or not it succeeds: all ranks count alike."""
        self._turn, self._again = self._turn + 1, self._again + 1

    def intent(self, existing: Existing, groups: Collection[str]) -> Intent:
        self._saved = True
        return Intent(self._restored, self._turn, existing, tuple(groups), self._again)

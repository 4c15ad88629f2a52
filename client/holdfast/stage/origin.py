"""Tracks where the trained state comes from: the step that was restored last. Every save states it."""

from __future__ import annotations

from collections.abc import Collection

from holdfast_formats.lineage import Existing, Intent


class TrainingOrigin:
    """The origin of the state. It is the same on all ranks of a launch, because all restore and save alike."""

    def __init__(self) -> None:
        self._restored: int | None = None
        self._turn = 0
        self._again = 0
        self._saved = False

    def restored(self, step: int, groups: Collection[str], held: Collection[str]) -> None:
        """Note that a step was restored, in these of the `held` groups.

        Training goes on from that step if these are all groups, or if nothing was restored before. A part that is restored
        later, such as the weights of a teacher, does not change the origin.
        """
        if set(held) <= set(groups) or not (self._saved or self._turn):
            self._restored, self._turn, self._again = step, self._turn + 1, 0

    def replaces(self) -> None:
        """Note that a save was requested that replaces an existing step. All ranks count it alike, whatever becomes of the
        save.
        """
        self._turn, self._again = self._turn + 1, self._again + 1

    def intent(self, existing: Existing, groups: Collection[str]) -> Intent:
        """The statement that goes with a save of these groups."""
        self._saved = True
        return Intent(self._restored, self._turn, existing, tuple(groups), self._again)

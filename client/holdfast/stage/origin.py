"""Where the state that is trained comes from: the step that was restored last, which every save says of itself."""

from __future__ import annotations

from collections.abc import Collection

from holdfast_formats.lineage import Existing, Intent


class TrainingOrigin:
    """The same on all ranks of a launch, since all restore and save alike."""

    def __init__(self) -> None:
        self._restored: int | None = None
        self._turn = 0
        self._again = 0
        self._saved = False

    def restored(self, step: int, groups: Collection[str], held: Collection[str]) -> None:
        """A step was restored, in these of the `held` groups. Training goes on from it if that is all of them, or if there
        was nothing before; a part that is restored later, such as the weights of a teacher, takes it nowhere else.
        """
        if set(held) <= set(groups) or not (self._saved or self._turn):
            self._restored, self._turn, self._again = step, self._turn + 1, 0

    def replaces(self) -> None:
        """A save was asked for that takes the place of whatever stands there; on all ranks alike, whatever becomes of it."""
        self._turn, self._again = self._turn + 1, self._again + 1

    def intent(self, existing: Existing, groups: Collection[str]) -> Intent:
        """What a save of these groups says of itself."""
        self._saved = True
        return Intent(self._restored, self._turn, existing, tuple(groups), self._again)

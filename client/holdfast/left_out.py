"""Notes on what a save leaves out, or a restore ignores or replaces, of which users are warned."""

from __future__ import annotations


class LeftOutNote(str):
    """Something of the state was not saved, not restored, or replaced. Used among other notes, in `Snapshot.notes` or a
    `PartPlan`; `Session.tell` makes a warning and a notice of it.
    """

    __slots__ = ()


class LeftOutWarning(UserWarning):
    """A save left values out, or a restore replaced values or did not use them, as its options allow.

    Example:
        >>> warnings.simplefilter("error", LeftOutWarning)  # let a run stop there
    """

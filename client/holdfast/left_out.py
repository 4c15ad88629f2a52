"""What a save leaves out, or a restore does not use or replaces: one kind of note, which users are warned of."""

from __future__ import annotations


class LeftOutNote(str):
    """A note that something of the state is not saved, not restored, or replaced by something else than was saved.

    It goes wherever notes go: into `Snapshot.notes` or a `PartPlan`. `Session.tell` makes a warning and a notice of it.
    """

    __slots__ = ()


class LeftOutWarning(UserWarning):
    """A save left something out, or a restore did not use it or replaced it, as it was allowed to."""

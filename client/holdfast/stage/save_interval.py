"""Which groups a save has, if some are saved only every n-th time."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, SupportsIndex

from holdfast.tensors.leaves import check_groups
from holdfast_formats.errors import InvalidRequest


class Due(NamedTuple):
    """The groups of one save (None: all), and a sentence on those that are not due."""

    groups: tuple[str, ...] | None
    note: str | None


class SaveInterval:
    """Counts the saves of a Checkpointer with `every=`. All ranks make the same calls, so their counts agree."""

    def __init__(self) -> None:
        self._saves = 0

    def due(self, every: Mapping[str, SupportsIndex], groups: Collection[str] | None, held: Sequence[str]) -> Due:
        """The requested (or all held) groups that are due; the first save has all of them. A refused save does not
        count.

        Raises `InvalidRequest` for an unknown group, a number below 1, and if no group would be left.
        """
        counts = _checked(every, held)
        wanted = check_groups(groups, held)
        left = {name: self._saves % count for name, count in counts.items() if name in wanted}
        kept = tuple(group for group in held if group in wanted and not left.get(group))
        if not kept:
            raise InvalidRequest(
                f"every={dict(counts)} leaves no group for this save",
                hint="remove at least one group from every=, so that each save has a group",
            )
        self._saves += 1
        waiting = {name: counts[name] - passed for name, passed in left.items() if passed}
        if not waiting:
            return Due(None if groups is None else kept, None)
        when = ", ".join(f"{name} (in {n} {'save' if n == 1 else 'saves'})" for name, n in sorted(waiting.items()))
        return Due(kept, f"left out until it is their turn: {when}")


def _checked(every: object, held: Sequence[str]) -> dict[str, int]:
    if not isinstance(every, Mapping):
        raise InvalidRequest(
            f"every must be a mapping of groups to numbers, not a {type(every).__name__}", hint='every={"optim": 5}'
        )
    check_groups(tuple(every), held)
    counts: dict[str, int] = {}
    for name, count in every.items():
        try:
            counts[name] = 0 if isinstance(count, bool) else operator.index(count)
        except TypeError:
            counts[name] = 0
        if counts[name] < 1:
            raise InvalidRequest(
                f"every={{{name!r}: {count!r}}}: pass a whole number n of at least 1, to include the group in "
                "every n-th save"
            )
    return counts

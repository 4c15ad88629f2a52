"""Compares the state to be saved with the one its slots were made for: which tensors are new, gone, or of another size."""

from __future__ import annotations

from collections.abc import Sequence
from operator import indexOf, is_
from typing import NamedTuple

from holdfast.tensors.leaves import Leaf

MIB = 2**20
EXAMPLES_MAX = 3


class Need(NamedTuple):
    """The room that a slot must have, and the tensors from which it was computed.

    `spare_bytes` are added when slots are made, for larger assets of later saves. `expected`: no save needs it yet, so
    nothing has outgrown its slots. `average_bytes` are what the daemon's average needs beside the slots. `spared` tensors
    of a whole state are staged by another rank: slots need no more than this.
    """

    data_bytes: int
    table_bytes: int
    leaves: tuple[Leaf, ...]
    spare_bytes: int = 0
    expected: bool = False
    average_bytes: int = 0
    spared: int = 0


class Change(NamedTuple):
    """Changed tensors by `group/name`."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]  # of another dtype or shape, or another part of it on this rank

    def __str__(self) -> str:
        counts = [f"{len(names)} {what}" for what, names in self._asdict().items() if names]
        examples = [*self.added, *self.changed, *self.removed][:EXAMPLES_MAX]
        if not counts:
            return "tensors are unchanged, only other values or assets changed"
        return f"tensors: {', '.join(counts)}, for example {', '.join(examples)}"


def compare(before: Sequence[Leaf], now: Sequence[Leaf]) -> Change:
    """The differences, for the groups that are saved now. Identical leaves at the beginning of both are skipped."""
    try:
        same = indexOf(map(is_, before, now), False)
    except ValueError:
        same = min(len(before), len(now))
    groups = {leaf.group for leaf in now} if same < len(before) else set()
    old = {leaf.path: _size(leaf) for leaf in before[same:] if leaf.group in groups}
    new = {leaf.path: _size(leaf) for leaf in now[same:]}
    return Change(
        tuple(path for path in new if path not in old),
        tuple(path for path in old if path not in new),
        tuple(path for path, size in new.items() if path in old and old[path] != size),
    )


def outgrown(change: Change, before: int, now: int) -> str:
    """The notice for a state that needed larger slots, with the bytes of one slot before and now."""
    return (
        f"the state no longer fits its slots of {before / MIB:.1f} MiB ({change}): reserved new slots of "
        f"{now / MIB:.1f} MiB. The first save into them is slower, because the new memory must be faulted in"
    )


def _size(leaf: Leaf) -> tuple[object, ...]:
    return leaf.dtype, leaf.shape, tuple(piece.box for piece in leaf.pieces)

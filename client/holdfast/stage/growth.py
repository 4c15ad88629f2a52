"""How the state to be saved has changed since its slots were made: what is new, gone, or of another size."""

from __future__ import annotations

from collections.abc import Sequence
from operator import indexOf, is_
from typing import NamedTuple

from holdfast.tensors.leaves import Leaf

MIB = 2**20
EXAMPLES_MAX = 3


class Need(NamedTuple):
    """What a slot must have room for, and the tensors of which that is the sum."""

    data_bytes: int
    table_bytes: int
    leaves: tuple[Leaf, ...]


class Change(NamedTuple):
    """Tensors by `group/name`."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]  # another dtype, shape, or part of it on this rank

    def __str__(self) -> str:
        counts = [f"{len(names)} {what}" for what, names in self._asdict().items() if names]
        examples = [*self.added, *self.changed, *self.removed][:EXAMPLES_MAX]
        return (
            f"tensors: {', '.join(counts)}, for example {', '.join(examples)}" if counts else "no tensors, only other values"
        )


def compare(before: Sequence[Leaf], now: Sequence[Leaf]) -> Change:
    """What differs, of the groups that are saved now. What both begin with, the very same leaves, is not looked at."""
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
    """What a user is told whose state needed larger slots: bytes of one slot, then and now."""
    return (
        f"the state no longer fits its slots of {before / MIB:.1f} MiB ({change}): reserved new slots of "
        f"{now / MIB:.1f} MiB. The first save into them is slower, because the new memory has to be faulted in"
    )


def _size(leaf: Leaf) -> tuple[object, ...]:
    return leaf.dtype, leaf.shape, tuple(piece.box for piece in leaf.pieces)

"""Which entries of a full log are evicted: those of the writer with the most, so that a flood evicts only itself."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import pairwise
from typing import TypeVar

Group = TypeVar("Group", bound=Hashable)


def evictions(counts: Mapping[Group, int], excess: int) -> dict[Group, int]:
    """How many entries of each group to remove, so that `excess` go, and those with the most lose them."""
    if excess <= 0:
        return {}
    left, level = sorted(counts.values(), reverse=True), 0
    for number, (now, below) in enumerate(pairwise([*left, 0]), 1):
        if number * (now - below) >= excess:
            level = now - -(-excess // number)
            break
        excess -= number * (now - below)
    return {group: count - level for group, count in counts.items() if count > level}

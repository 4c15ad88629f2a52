"""Lineage: which checkpoints lead to the present state, and which are abandoned. Pure; docs/format.md § 3.

A launch that has restored a step, and saves, continues from there. If newer checkpoints exist then that it has not saved
itself, its saves begin a line of their own: a *rewind* from that step, identified by attempt and turn. Every checkpoint
lists the rewinds on the way to it. The line that was begun last is the living one; checkpoints that do not lead to it are
abandoned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Literal, NamedTuple, Protocol

from .errors import InvalidRequest

Existing = Literal["refuse", "replace", "same"]
Key = tuple[int, int]  # of a line: the attempt that began it, and its turn
ROOT: Key = (0, 0)  # the line that begins with nothing
NOTHING = -1  # the step of a rewind to no checkpoint at all


class Rewind(NamedTuple):
    """The launch of this attempt continued, at its `turn`-th restore, from this step, although there were newer ones."""

    attempt: int
    turn: int
    step: int


Way = tuple[Rewind, ...]  # oldest first


class Lineage(NamedTuple):
    """Where a checkpoint comes from: its launch's last restored step, the number of that restore, and all rewinds."""

    restored: int | None = None  # None: nothing, or not by Holdfast
    turn: int = 0
    rewinds: Way = ()


class Intent(NamedTuple):
    """A rank's declaration before a save: where its state comes from, and what to do if the step exists already.

    A save that replaces begins a turn too, so that its checkpoint is distinct from the replaced one. `again` is the number
    of such saves of the launch since the last restore.
    """

    restored: int | None = None
    turn: int = 0
    existing: Existing = "refuse"
    groups: tuple[str, ...] = ()
    again: int = 0


NO_INTENT = Intent()


class Elsewhere(NamedTuple):
    """What other roots have made of a run, as found in a tier: the attempts of their launches, and the way to the newest of
    their lines.
    """

    attempts: frozenset[int] = frozenset()
    way: Way = ()


NOWHERE = Elsewhere()


class PlacedCheckpoint(Protocol):
    """The fields of a checkpoint that place it among others."""

    @property
    def step(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def turn(self) -> int: ...
    @property
    def rewinds(self) -> Sequence[Rewind]: ...


def line(rewinds: Sequence[Rewind]) -> Key:
    return rewinds[-1][:2] if rewinds else ROOT


def way(placed_checkpoints: Iterable[PlacedCheckpoint]) -> Way:
    """The rewinds to the living line: the one that was begun last."""
    return max((tuple(c.rewinds) for c in placed_checkpoints), key=line, default=())


def is_on(way: Way, placed_checkpoint: PlacedCheckpoint) -> bool:
    """Whether this checkpoint is on the way to the living line, or on it."""
    return leads(way, line(placed_checkpoint.rewinds), placed_checkpoint.step)


def leads(way: Way, key: Key, step: int) -> bool:
    """`is_on` of a checkpoint of which step and line are known."""
    ahead = (*way, None)
    lines = (ROOT, *(rewind[:2] for rewind in way))
    ends = {at: inf if nxt is None else nxt.step for at, nxt in zip(lines, ahead, strict=True)}
    return step <= ends.get(key, NOTHING - 1)


def abandoned(placed_checkpoints: Sequence[PlacedCheckpoint]) -> set[int]:
    """The abandoned steps."""
    living = way(placed_checkpoints)
    return {c.step for c in placed_checkpoints if not is_on(living, c)} if living else set()


def is_own(placed_checkpoint: PlacedCheckpoint, launch: Key, again: int = 0) -> bool:
    """Whether this launch, given by attempt and turn, has saved it since its last restore; `again` is that of `Intent`."""
    attempt, turn = launch
    return placed_checkpoint.attempt == attempt and turn - again <= placed_checkpoint.turn <= turn


def others(placed_checkpoints: Sequence[PlacedCheckpoint], launch: Key, after: int, again: int = 0) -> list[int]:
    """The living steps after `after` that this launch has not saved since its last restore."""
    living = way(placed_checkpoints)
    return sorted(c.step for c in placed_checkpoints if c.step > after and not is_own(c, launch, again) and is_on(living, c))


def went_on(
    placed_checkpoints: Sequence[PlacedCheckpoint],
    launch: Key,
    restored: int | None,
    again: int = 0,
    elsewhere: Elsewhere = NOWHERE,
) -> Way:
    """The rewinds of this launch's saves, which continue from the `restored` step.

    A launch that goes on from another root's checkpoint, or beside another root's line, begins a line of its own: the other
    root may have newer checkpoints that were never copied here.
    """
    here = way(placed_checkpoints)
    if restored is None:
        return here
    living = max(here, elsewhere.way, key=line)
    source = next((c for c in placed_checkpoints if c.step == restored), None)
    is_taken_over = line(elsewhere.way) > line(here) or (source is not None and source.attempt in elsewhere.attempts)
    begins = is_taken_over and line(living) != launch
    if not begins and (source is None or is_on(living, source)) and not others(placed_checkpoints, launch, restored, again):
        return living
    before = tuple(source.rewinds) if source is not None else tuple(r for r in living if r.step < restored)
    return (*before, Rewind(*launch, restored))


def check(lineage: Lineage) -> None:
    """Raise `InvalidRequest` for an impossible lineage."""
    keys = [ROOT, *(rewind[:2] for rewind in lineage.rewinds)]
    if keys != sorted(set(keys)) or any(rewind.step < NOTHING for rewind in lineage.rewinds):
        raise InvalidRequest(f"the rewinds {[list(rewind) for rewind in lineage.rewinds]} are not a valid history")
    if lineage.turn < 0 or (lineage.restored is not None and lineage.restored < 0):
        raise InvalidRequest(f"turn {lineage.turn} and restored step {lineage.restored} must not be negative")

"""What a new process got when it resumed, told from digests alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from benchmarks.state import wrong

Digests = Mapping[str, str]


class Kind(Enum):
    """From the best to the worst."""

    NEWEST = "newest"  # the newest save, right in every tensor
    EARLIER = "earlier"  # an earlier save, right in every tensor
    REFUSED = "refused"  # an error, and an earlier save loads when it is asked for
    LOST = "lost"  # an error, and no save loads
    NOTHING = "nothing"  # no error, and no checkpoint was found: training would begin anew
    WRONG = "wrong"  # no error, and values that were not saved, or not at the step that the peer says


BADNESS = tuple(Kind)


class Loaded(NamedTuple):
    """A load that raised nothing: the step that the peer says, and what the tensors hold now."""

    step: int
    digests: Digests


class Report(NamedTuple):
    """What a new process has to say. With an `error`, `loaded` is the newest step that loads when it is asked for."""

    loaded: Loaded | None
    error: str = ""


class Outcome(NamedTuple):
    """`step` is what was loaded, at once or when it was asked for; `named`: the error has the damaged file's name."""

    kind: Kind
    step: int = 0
    named: bool = False
    error: str = ""


def judge(saved: Mapping[int, Digests], report: Report, damaged: Sequence[str] = ()) -> Outcome:
    """`saved` has the digests of every save that was begun; `damaged` are names of the files that were damaged."""
    named = any(name in report.error for name in damaged)
    loaded = report.loaded
    right = loaded is not None and loaded.step in saved and is_same(saved[loaded.step], loaded.digests)
    if report.error:
        if loaded is not None and right:
            return Outcome(Kind.REFUSED, loaded.step, named, report.error)
        return Outcome(Kind.LOST, 0, named, report.error)
    if loaded is None or loaded.step == 0:
        return Outcome(Kind.NOTHING)
    if not right:
        return Outcome(Kind.WRONG, loaded.step)
    return Outcome(Kind.NEWEST if loaded.step == max(saved) else Kind.EARLIER, loaded.step)


def is_same(expected: Digests, found: Digests) -> bool:
    """Every tensor is there, and none differs."""
    return set(expected) == set(found) and not wrong(expected, found)


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    return max(outcomes, key=lambda outcome: BADNESS.index(outcome.kind))

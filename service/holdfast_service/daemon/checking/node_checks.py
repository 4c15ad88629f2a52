"""Checks of one checkpoint by several nodes, and claims of nodes that scrub one root.

On one machine there are none: `OneNodeChecks`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from holdfast_formats.naming import CheckpointId
from holdfast_formats.staging.shared_check import CheckProgress
from holdfast_service.control.findings.checks import Fence


class WrittenSpan(NamedTuple):
    """The bytes [begin, end) of a file, and the node that wrote them."""

    file: str
    begin: int
    end: int
    node: str


class CheckDistributor(Protocol):
    """Distributes checks over all nodes."""

    def begin(self, run: str, step: int, written: Sequence[WrittenSpan]) -> str | None:
        """Have a checkpoint checked by all nodes; the SHA-256 of its manifest, None if there is nothing to divide."""

    def follow(self, run: str, step: int, sha256: str, is_over: Callable[[], bool]) -> bool:
        """Wait until this check has ended; False if `is_over` comes first."""

    def going(self) -> Collection[tuple[str, int]]:
        """The run and step of each shared check."""

    def progress(self, run: str, step: int) -> CheckProgress | None: ...

    def close(self) -> None: ...


class OneNodeChecks:
    """One node reads everything."""

    def begin(self, run: str, step: int, written: Sequence[WrittenSpan]) -> str | None:
        return None

    def follow(self, run: str, step: int, sha256: str, is_over: Callable[[], bool]) -> bool:
        return True

    def going(self) -> Collection[tuple[str, int]]:
        return ()

    def progress(self, run: str, step: int) -> CheckProgress | None:
        return None

    def close(self) -> None: ...


ONE_NODE = OneNodeChecks()


class ScrubClaims(Protocol):
    """Which checkpoints this node reads back, of several that scrub one root."""

    def take(self, places: Sequence[CheckpointId]) -> CheckpointId | None:
        """Claim the first of these that no node reads."""

    def leave(self, place: CheckpointId) -> None: ...

    def fence(self, place: CheckpointId) -> Fence:
        """A check that this node still has the claim, run in the transaction that records the result."""

"""Declares attempts of launches, and stores their descriptions. Nothing waits for the catalog."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_formats import naming
from holdfast_formats.rest.runs import RunLaunch
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.catalog.attempts import Member
from holdfast_service.control.launches.restore_choice import RestoreSelector
from holdfast_service.control.parts import CheckpointParts
from holdfast_service.control.recovery import Recovery
from holdfast_service.control.retention.requests import RetentionRequests
from holdfast_service.control.signals import Signal


class LaunchRegistry:
    """The launches of the runs of one root. Thread-safe."""

    def __init__(
        self, parts: CheckpointParts, wishes: RetentionRequests, recovery: Recovery, restores: RestoreSelector
    ) -> None:
        self._catalog, self._record_queue, self._events, self._nodes = (
            parts.catalog,
            parts.record_queue,
            parts.events,
            parts.nodes,
        )
        self._attempts, self._rounds, self._abouts, self._lineage_index = (
            parts.attempts,
            parts.rounds,
            parts.run_metadata,
            parts.lineage_index,
        )
        self._retention_requests, self._recovery, self._restores = wishes, recovery, restores
        self.unknown: Signal[[str]] = Signal()  # a run that is new here; subscribers raise while it may be in a tier
        self.known: Signal[[str]] = Signal()  # any other; subscribers wait a moment for what other machines have made of it

    def meet(self, run: str) -> None:
        """Return once it is known whether a run that is new to this root has checkpoints in a tier: if it has, its attempts
        continue theirs. `StorageFailed` while that is not known.
        """
        self._recovery.learn_attempts()
        if self._attempts.newest(run) == 0:  # as far as known here: a launch does not wait for a catalog
            self.unknown.publish(run)
        else:
            self.known.publish(run)

    def declare(  # noqa: PLR0913 - each is one thing that a rank says
        self,
        run: str,
        launch: str,
        world: int,
        keep_last: int | None,
        rank: int = 0,
        session: str = "",
        take_over: bool = False,
    ) -> int:
        """The attempt number of this launch; the first rank of a launch declares it.

        `keep_last` is the run's policy until one is set. New to a run, it removes nothing committed before this launch.
        """
        naming.check_run(run)
        self._recovery.learn_attempts()
        member = Member(rank, session, world, take_over)
        attempt, new = self._attempts.declare(run, launch, lambda: self._rounds.complete(run), member)
        if new:
            at = utc_now()
            self._record_queue.enqueue(
                f"that attempt {attempt} of {run} has started",
                lambda: self._catalog.declare_attempt(run, launch, world, at, attempt),
            )
            text = f"attempt {attempt} has started with {world} {'rank' if world == 1 else 'ranks'}"
            self._events.enqueue("attempt-declared", text, run, attempt=attempt, world=world, launch=launch)
        self._retention_requests.take(run, keep_last, attempt, new)
        if new:
            self._record_queue.enqueue(f"that {run} is training again", lambda: self._abouts.resumed(run))
        self._lineage_index.learn(run)
        return attempt

    def is_declared(self, run: str, launch: str, rank: int = 0, session: str = "", world: int = 0) -> bool:
        """Whether this launch has an attempt already that this rank, with this checkpointer, can join."""
        return self._attempts.of(run, launch, Member(rank, session, world)) is not None

    def record_info(self, run: str, attempt: int, world: int, info: Mapping[str, Any]) -> None:
        """Store the description of an attempt's launch; returns at once where the catalog is away."""
        made = RunLaunch(attempt=attempt, at=utc_now(), world=world, info=dict(info))
        self._record_queue.enqueue(
            f"what attempt {attempt} of {run} reports about itself", lambda: self._abouts.launched(run, made)
        )

    def parted(self, run: str, attempt: int) -> None:
        """The ranks of this attempt have left."""
        self._restores.parted(run, attempt)
        self._nodes.parted(run)

"""What other roots have made of a run that drains to the same tier: their launches, and their line of training.

Machines that train one run in turns have a root each. A checkpoint in the tier that no launch of this root has made is
another root's: later launches here exceed its attempt and begin lines of their own, and what its line has left behind here
is not copied (docs/object-storage.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast_formats import lineage
from holdfast_formats.errors import StateMismatch
from holdfast_formats.rest import bodies
from holdfast_service.control.catalog import lineage_records
from holdfast_service.control.catalog.attempts import Attempts
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import RunRow

log = logging.getLogger(__name__)


class OtherRoots:
    """The other roots of a tier, as far as their checkpoints were seen there. Thread-safe."""

    def __init__(self, database: Database, attempts: Attempts, events: Events) -> None:
        self._database, self._attempts, self._events = database, attempts, events
        self.tiers: set[str] = set()  # whose runs this root begins with; what is in another replica is asked for by name

    def found(self, name: str, run: str, copies: Sequence[lineage.PlacedCheckpoint]) -> None:
        """These copies of a tier are not of this root's checkpoints. The first time an event tells which line is newest."""
        others = [
            copy for copy in copies if name in self.tiers and copy.attempt and not self._attempts.is_own(run, copy.attempt)
        ]
        if not others:
            return
        attempts, way = {copy.attempt for copy in others}, lineage.way(others)
        known = max(self._attempts.newest(run), *self._attempts.elsewhere(run).attempts, 0)
        if not self._attempts.saw_elsewhere(run, attempts, way) or max(attempts) <= known:
            return
        newest = max(others, key=lambda copy: (copy.attempt, copy.step))
        since = f", from step {way[-1].step}" if way else ""
        text = (
            f"another machine has trained on as attempt {newest.attempt}{since}; tier {name} has its step {newest.step}. "
            "restore() follows the newest line, and what it has left behind here is not copied there"
        )
        log.warning("%s: %s", run, text)
        self._events.add("run-continued", text, run, newest.step, "warning", tier=name, attempt=newest.attempt)

    def refuse_left(self, checkpoint: bodies.CheckpointInfo) -> None:
        """`StateMismatch` for a checkpoint that must not be copied: another root's line goes another way, or its attempt is
        one of two machines.
        """
        run, step, attempt = checkpoint.run, checkpoint.step, checkpoint.attempt
        elsewhere = self._attempts.elsewhere(run)
        if not elsewhere.attempts:
            return
        with self._database.read() as session:
            here = lineage_records.of(session, run) if session.get(RunRow, run) is not None else []
        living = max(lineage.way(here), elsewhere.way, key=lineage.line)
        if not lineage.is_on(living, checkpoint):
            why = f"the run went on from step {living[-1].step} as attempt {living[-1].attempt}"
        elif attempt in elsewhere.attempts and self._attempts.is_own(run, attempt):
            why = f"another machine has had an attempt {attempt}, too"
        else:
            return
        raise StateMismatch(
            f"step {step} of {run}, of attempt {attempt}, is not copied: {why}",
            hint="it stays in this root by its retention; `restore(step=…)` begins a line of its own with it",
        )

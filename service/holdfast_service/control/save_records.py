"""What became of saves, for the catalog and for who asks for events; and what they staged, cleared away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Literal

from holdfast_formats.disk.manifest import Manifest
from holdfast_formats.errors import CheckpointError, GenerationDropped
from holdfast_formats.naming import Place
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import Level
from holdfast_formats.staging.joint import ShareHandover
from holdfast_service.control.catalog.book import Book
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.rounds import Rounds
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.launches.choosing import stands
from holdfast_service.storage import Store

log = logging.getLogger(__name__)


class SaveRecords:
    """The ends of saves. Nothing here waits for the catalog. Thread-safe."""

    def __init__(self, store: Store, catalog: Catalog, book: Book, rounds: Rounds, tell: Callable[..., None]) -> None:
        """`tell` records an event, by and by."""
        self._store, self._catalog, self._book, self._rounds, self._tell = store, catalog, book, rounds, tell

    def committed(self, round_id: int, made: Manifest, measured: Mapping[str, float], staging: Place | None) -> None:
        """A checkpoint stands. `staging`: of a save of several nodes."""
        self._book.tell(f"that the checkpoint {made.run}@{made.step} is committed", lambda: self.record(made))
        self._rounds.end(round_id, "committed", measured=measured)
        self.clear(staging or Place(made.run, made.step, made.attempt))
        self._tell(
            "checkpoint-committed",
            f"step {made.step} is committed",
            made.run,
            made.step,
            bytes=made.bytes,
            measured=measured,
        )

    def without_average(self, made: Manifest) -> None:
        """The ranks of this checkpoint keep an average, which is not in it."""
        text = (
            f"step {made.step} was saved without the group ema: no update was in the average yet, or its parts on the ranks "
            "were not of the same updates, or not alike where they have to be, which the daemon's log names"
        )
        self._tell("average-left-out", text, made.run, made.step, "warning")

    def written_for(self, made: Manifest, handover: ShareHandover) -> None:
        """A node could not write its share of this checkpoint."""
        why = handover.problem.get("detail", "it could not write")
        told = f"{why}; node {handover.helper} has written the share of node {handover.node} of step {made.step}"
        self._tell(
            "share-handed-over",
            told,
            made.run,
            made.step,
            "warning",
            unable=handover.node,
            helper=handover.helper,
            problem=dict(handover.problem),
        )

    def aborted(
        self, round_id: int, error: CheckpointError, staging: Place | None, measured: Mapping[str, float] | None = None
    ) -> None:
        """End a save without a checkpoint and remove its staged files; leftovers are removed by the next sweep."""
        state: Literal["aborted", "dropped"] = "dropped" if isinstance(error, GenerationDropped) else "aborted"
        kind = "save-dropped" if state == "dropped" else "save-aborted"
        level: Level = "info" if state == "dropped" else "warning"

        detail, problem = error.detail, error.problem()  # the error itself holds on to who met it

        def tell(run: str, step: int) -> None:
            self._tell(kind, f"step {step} was not saved: {detail}", run, step, level, problem=problem)

        self._rounds.end(round_id, state, error.code, error.detail, measured or {}, tell)
        if staging is not None and error.members.get("outcome") != "unknown":  # else it may be what a power cut brings back
            self.clear(staging)

    def record(self, made: Manifest) -> None:
        """Tell the catalog of a checkpoint."""
        if stands(self._store.files, made.run, made.step):  # else it was removed while the catalog was away
            self._catalog.record_checkpoint(bodies.describe(made), roots.stamp(self._store, made.run, made.step))

    def clear(self, place: Place) -> None:
        """Remove what is staged at a place; what cannot be removed now, the next sweep removes."""
        try:
            self._store.discard(place)
        except CheckpointError as failure:
            log.warning("%s stays until it is swept: %s", place.path, failure.detail)

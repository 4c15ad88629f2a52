"""Decisions about imports: their attempt, whether they fit, and when they become visible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import AlreadyCommitted, InUse
from holdfast_formats.lineage import Lineage, Way
from holdfast_formats.naming import Place
from holdfast_formats.rest import bodies
from holdfast_formats.staging.plan import Receipt, WritePlan
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.checkpoints import commit
from holdfast_service.control.checkpoints.commit import Vouched
from holdfast_service.control.signals import Signal
from holdfast_service.storage import Store


class SpaceCheck(Protocol):
    """Checks whether a checkpoint fits, before it is written and after."""

    def admit(self, plan: WritePlan) -> None: ...
    def check_quotas(self, run: str, step: int, need: int) -> None: ...


class Imports:
    """Imports checkpoints into one root. `room` checks the space, as for a save; `way` returns a live run's rewinds: an
    import is on that run's line, whatever its own lineage is.
    """

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        events: Events,
        room: SpaceCheck,
        way: Callable[[str], Way],
        published: Signal[[Manifest]],
    ) -> None:
        self._store, self._catalog, self._events = store, catalog, events
        self._room, self.way, self._published = room, way, published
        self._lock, self._staged = threading.Lock(), set[Place]()

    def attempt(self, run: str, step: int, wanted: int | None = None) -> int:
        """The attempt of an import; `AlreadyCommitted` if the step is already a checkpoint.

        Never above the declared attempts: that would shut out an active training run (I6). Without any, it is the one
        `wanted`.
        """
        if naming.check_step(step) in self._store.steps(run):
            raise AlreadyCommitted(f"{run}@{step} is already committed", hint="remove it first, or choose another step")
        newest = self._catalog.newest_attempt(run)
        return (wanted or 0) if newest == 0 else min(wanted or 0, newest)

    @contextmanager
    def alone(self, place: Place) -> Iterator[None]:
        """Stage there; `InUse` while another thread does, which makes the same checkpoint."""
        with self._lock:
            if place in self._staged:
                raise InUse(
                    f"{place.run}@{place.step} is already being created by an identical import",
                    hint="wait for it to finish, or stop it",
                )
            self._staged.add(place)
        try:
            yield
        finally:
            with self._lock:
                self._staged.remove(place)

    def admit(self, plan: WritePlan) -> None:
        """Return if it fits; `QuotaExceeded` or `NoSpace`."""
        self._room.admit(plan)

    def vouch(self, plan: WritePlan, receipt: Receipt) -> Vouched:
        """The manifest and small files of what is staged, for reading it back before it is published."""
        return commit.vouch(plan, receipt, self._events.now(), Lineage(rewinds=self.way(plan.run)))

    def publish(self, place: Place, encoded: bytes, commit_bytes: bytes, how: str = "imported") -> Manifest:
        """Publish a staged and proven checkpoint with its manifest and COMMIT; `how` it was made is for people."""
        self._room.check_quotas(place.run, place.step, manifests.stated_bytes(commit_bytes))
        manifest = commit.publish_copy(self._store, place, encoded, commit_bytes)
        self._catalog.record_checkpoint(bodies.describe(manifest))
        text = f"step {manifest.step} was {how} and is committed"
        self._events.add("checkpoint-committed", text, manifest.run, manifest.step, bytes=manifest.bytes, imported=True)
        self._published.publish(manifest)
        return manifest

"""The worker that thins checkpoints to their weights: proves what stays, stages it without a copy, and has it published.

It runs at idle priority, and reads no faster than its pace. A crash leaves the whole checkpoint or the thin one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec

from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import manifest, thinning
from holdfast_formats.disk.thinning import ThinCheckpoint
from holdfast_formats.errors import CheckpointError, Conflict, Damaged, NoSuchCheckpoint, NotFound, StateMismatch
from holdfast_formats.moments import utc_now
from holdfast_formats.naming import Place
from holdfast_service.daemon.copying.copies import CopyStopped, Going, carry, read_back, read_pair
from holdfast_service.daemon.ports import ThinBook
from holdfast_service.daemon.writing.priority import give_way
from holdfast_service.storage import Store, Tier
from holdfast_service.storage.pacing import Pace

log = logging.getLogger(__name__)

CLOSE_S = 10.0  # a worker that hangs in a disk is left behind


class Thinner:
    """Thins what is due of the runs that it is told of. Its thread starts with the first of them."""

    def __init__(
        self,
        tier: Tier,
        store: Store,
        book: ThinBook,
        *,
        node: str = "",
        pace: Pace | None = None,
        suspect: Callable[[str, int, Damaged], None] = lambda run, step, error: None,
    ) -> None:
        """`suspect` is told of a checkpoint that is damaged, and so was not thinned. `node` tells nodes of a root apart."""
        self._tier, self._store, self._book = tier, store, book
        self._node, self._pace, self._suspect = node, pace, suspect
        self._changed = threading.Condition()
        self._due: dict[str, None] = {}
        self._closed = threading.Event()
        self._busy = False
        self._refused: set[str] = set()  # manifests of checkpoints that cannot be thinned
        self._thread: threading.Thread | None = None

    def due(self, run: str) -> None:
        """Look at this run soon; returns at once."""
        with self._changed:
            if self._closed.is_set():
                return
            self._due[run] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="holdfast-thinner", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self, wait_s: float = 30.0) -> bool:
        """Wait until all that is due was looked at; False when it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy and not self._due, wait_s)

    def close(self) -> None:
        """Stop, and wait for that; what is staged is removed, or swept at the next start."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def look(self, run: str) -> list[int]:
        """Thin everything of a run that is due now, oldest first; the steps that were. Who fails keeps no other back."""
        done = []
        for step in self._book.due(run):
            if self._closed.is_set():
                break
            try:
                if self._thin(run, step):
                    done.append(step)
            except Damaged as error:
                log.error("%s@%s is damaged, and stays whole: %s", run, step, error.detail)
                self._suspect(run, step, error)
            except (Conflict, NotFound) as error:  # a reader, a mark or a removal came first
                log.info("%s@%s stays as it is for now: %s", run, step, error.detail)
        return done

    def _thin(self, run: str, step: int) -> bool:
        directory = naming.checkpoint_path(run, step)
        pair = read_pair(self._tier, directory)
        sha256 = manifest.stated_sha256(pair.commit)
        if pair.made.thinned is not None or sha256 in self._refused:
            return False
        try:
            thin = thinning.thin(pair.made, pair.encoded, self._tier.read(f"{directory}/{naming.STATE}"), utc_now())
        except StateMismatch as error:
            log.warning("%s is not thinned: %s", f"{run}@{step}", error.detail)
            self._refused.add(sha256)
            return False
        place = naming.job_place(run, step, digest(f"{self._node} thin {sha256}".encode()))
        going = Going(self._pace, self._closed.is_set)
        try:
            stage(self._tier, self._store, place, thin, going)
            encoded = manifest.encode(thin.made)
            self._book.publish(place, encoded, manifest.encode_commit(thin.made, encoded), pair.commit)
        except CheckpointError as error:
            if error.members.get("outcome") != "unknown":  # else a power cut may bring the whole one back from there
                self._book.clear(place)
            raise
        except CopyStopped:
            self._book.clear(place)
            raise
        freed = pair.made.bytes - thin.made.bytes
        log.info("%s@%s was thinned to its weights: %d of %d bytes are free", run, step, freed, pair.made.bytes)
        return True

    def _loop(self) -> None:
        give_way()
        while (run := self._awaited()) is not None:
            try:
                self.look(run)
            except CopyStopped:
                return
            except CheckpointError as error:
                log.error("thinning of %s: %s", run, error.detail)
            except Exception:
                log.exception("thinning of %s failed", run)

    def _awaited(self) -> str | None:
        """The next run to look at; None after this was closed."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._due or self._closed.is_set())
            if self._closed.is_set():
                return None
            run = next(iter(self._due))
            del self._due[run]
            self._busy = True
            return run


def stage(tier: Tier, store: Store, place: Place, thin: ThinCheckpoint, going: Going) -> None:
    """Stage what stays of a checkpoint of `tier`, whose bytes are proven first: as second names of its files, or where there
    are none as copies.

    Raises `Damaged` for bytes that fail their digest, `NoSuchCheckpoint` where the checkpoint goes meanwhile, `CopyStopped`.
    """
    directory = naming.checkpoint_path(place.run, place.step)
    try:
        read_back(tier, directory, thin.proof, going)
    except Damaged:
        if not tier.list(directory):
            raise NoSuchCheckpoint(f"{place.run}@{place.step} was removed meanwhile") from None
        raise
    tier.remove_tree(place.path)  # of an earlier start
    staged = store.begin(place)
    if not all(staged.take(entry.name, place.step) for entry in thin.stays):
        tier.remove_tree(place.path)
        carry(tier, directory, tier, place.path, thin.proof, going)
    staged.put(naming.STATE, thin.state)
    state = tuple(entry for entry in thin.made.files if entry.name == naming.STATE)
    read_back(tier, place.path, msgspec.structs.replace(thin.made, files=state, tensors={}, aliases={}), going)

"""Readers: which checkpoints are being read, so that they are not removed meanwhile (I4). Every hold expires.

Readers of the bare directory are not known here: removal renames first, and open files stay readable.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count

from holdfast_formats.errors import CatalogUnavailable, InUse, NoSuchCheckpoint
from holdfast_service.control.nodes import ONE_NODE, SharedReaders
from holdfast_service.control.signals import Signal

READ_MAX_S = 86_400.0  # the longest that one reader may take
OPENED = "HTTP"  # it opens files before it answers, and reads on whatever replaces them
CHECK = "a check"  # it ends early when a save waits to replace what it reads, and begins again later
ANNOUNCED_S = 20.0  # other nodes keep an announced reader's checkpoint for longer than this
LINGER_S = 60.0  # a reader of one range after the other keeps its hold in between
READERS_WAIT_S, READERS_POLL_S = 2.0, 0.05  # for readers of a checkpoint that is being replaced
CHECKS_WAIT_S = 30.0  # for the daemon's own checks: they end on request, at a low priority, between two reads

_Key = tuple[str, int]


class Readers:
    """The holds of all readers in this process. Thread-safe. `freed` publishes the run of each hold that ends.

    Where several nodes serve a root, a hold is announced to the others before the read, and their holds count. Checks are
    not announced: they detect that their checkpoint is gone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, shared: SharedReaders = ONE_NODE) -> None:
        self._clock, self._shared = clock, shared
        self._lock = threading.Lock()
        self._holds: dict[_Key, dict[str, float]] = {}  # by reader: until when
        self._removing: set[_Key] = set()
        self._awaited: Counter[_Key] = Counter()
        self._numbers = count()
        self.freed: Signal[[str]] = Signal()
        self._announced: dict[tuple[_Key, bool], float] = {}  # until when the other nodes know of it

    def hold(self, run: str, step: int, who: str, seconds: float) -> None:
        """Keep the checkpoint for so long; again for the same `who` renews the hold.

        Raises `NoSuchCheckpoint` for one that is being removed, and `InUse` for a check of one that is awaited.
        """
        with self._lock:
            if who.startswith(CHECK) and (run, step) in self._awaited:
                raise InUse(
                    f"{run}@{step} is being replaced by a new save", hint="check it again when the new save is committed"
                )
            if (run, step) in self._removing:
                raise NoSuchCheckpoint(
                    f"{run}@{step} is being removed", hint=f"list its checkpoints with `holdfast ls {run}`"
                )
            self._holds.setdefault((run, step), {})[who] = self._clock() + seconds
            opened = who.startswith(OPENED)
            known = max(self._announced.get(((run, step), kind), 0.0) for kind in {False, opened}) > self._clock()
            announced = not known and not who.startswith(CHECK)
            if announced:
                self._announced[(run, step), opened] = self._clock() + ANNOUNCED_S
        if announced:
            self._shared.announce(run, step, opened)

    def release(self, run: str, step: int, who: str) -> None:
        """End a hold; idempotent."""
        with self._lock:
            held = self._holds.get((run, step), {})
            if held.pop(who, None) is None:
                return
            if not held:
                del self._holds[run, step]
        self.freed.publish(run)

    @contextmanager
    def reading(self, run: str, step: int, what: str = "the daemon", linger_s: float = 0.0) -> Iterator[None]:
        """Hold a checkpoint for the length of a block, and for `linger_s` behind it; for `READ_MAX_S` at most."""
        who = f"{what} {next(self._numbers)}"
        self.hold(run, step, who, READ_MAX_S)
        try:
            yield
        finally:
            if linger_s:
                with suppress(NoSuchCheckpoint):  # it took longer than a reader may
                    self.hold(run, step, what, linger_s)
            self.release(run, step, who)

    def checking(self, run: str, step: int) -> AbstractContextManager[None]:
        """As `reading`, for a check: it ends when `is_awaited` says that a save waits to take the checkpoint's place."""
        return self.reading(run, step, CHECK)

    def held(self, run: str, opened: bool = True) -> dict[int, float]:
        """The steps of a run that are being read, and the seconds until their last hold ends.

        Without `opened`, not those with readers of open files only.
        """
        elsewhere = self._elsewhere(run, opened)
        now = self._clock()
        with self._lock:
            for key in [key for key in self._holds if key[0] == run]:
                left = {who: until for who, until in self._holds[key].items() if until > now}
                if left:
                    self._holds[key] = left
                else:
                    del self._holds[key]
            found = {key[1]: _ends(held, opened) for key, held in self._holds.items() if key[0] == run}
            here = {step: max(ends) - now for step, ends in found.items() if ends}
        return here | {step: max(left, here.get(step, 0.0)) for step, left in elsewhere.items()}

    def places(self) -> dict[tuple[str, int], bool]:
        """What is being read here now, except by checks, and whether only by readers of open files."""
        now = self._clock()
        with self._lock:
            reading = {
                key: [who.startswith(OPENED) for who, until in held.items() if until > now and not who.startswith(CHECK)]
                for key, held in self._holds.items()
            }
            # The caller ends at the other nodes what is not read here, so its next reader announces it again.
            self._announced = {key: until for key, until in self._announced.items() if until > now and reading.get(key[0])}
        return {key: all(opened) for key, opened in reading.items() if opened}

    def _elsewhere(self, run: str, opened: bool) -> Mapping[int, float]:
        """What other nodes read. A save that replaces a checkpoint does not fail because this cannot be queried."""
        try:
            return self._shared.elsewhere(run, opened)
        except CatalogUnavailable:
            if opened:
                raise
            return {}

    @contextmanager
    def awaited(self, run: str, step: int) -> Iterator[None]:
        """Ask checks of this checkpoint to end; none begins within the block."""
        with self._lock:
            self._awaited[run, step] += 1
        try:
            yield
        finally:
            with self._lock:
                self._awaited -= Counter({(run, step): 1})

    def is_awaited(self, run: str, step: int) -> bool:
        """Whether a save waits for the readers of this checkpoint to end."""
        with self._lock:
            return (run, step) in self._awaited

    def wait_until_free(self, run: str, step: int) -> None:
        """Wait a moment for the readers of a checkpoint that is being replaced."""
        began = time.monotonic()
        while self.held(run, opened=False).get(step):
            limit = CHECKS_WAIT_S if self.only_checked(run, step) else READERS_WAIT_S
            if time.monotonic() > began + limit:
                return
            time.sleep(READERS_POLL_S)

    def only_checked(self, run: str, step: int) -> bool:
        """Whether only checks hold this checkpoint; they end on request."""
        with self._lock:
            return all(who.startswith((CHECK, OPENED)) for who in self._holds.get((run, step), {}))

    @contextmanager
    def removing(self, run: str, step: int, opened: bool = True) -> Iterator[bool]:
        """Whether nothing reads this checkpoint (see `held`); if so, no reader begins here within the block.

        Readers at other nodes wait for the lock under which the removal is decided.
        """
        elsewhere = step in self._elsewhere(run, opened)
        with self._lock:
            now = self._clock()
            free = not elsewhere and all(until <= now for until in _ends(self._holds.get((run, step), {}), opened))
            if free:
                self._removing.add((run, step))
        try:
            yield free
        finally:
            if free:
                with self._lock:
                    self._removing.discard((run, step))


def _ends(held: dict[str, float], opened: bool) -> list[float]:
    return [until for who, until in held.items() if opened or not who.startswith(OPENED)]

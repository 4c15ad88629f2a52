"""Restores of one machine's ranks: what several of them want is read and verified once, into shared memory.

The memory is a memfd that is sealed before anybody gets it, so nobody can change verified bytes. It comes from the
arena's budget and is freed as soon as the last rank has copied its part.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, DaemonGone
from holdfast_formats.staging import wire
from holdfast_formats.staging.piece_list import PieceList
from holdfast_service.daemon.arena.arena import Arena, Loan
from holdfast_service.daemon.shared_reads.sealed_memory import SealedMemory, StepFiles
from holdfast_service.daemon.shared_reads.sharing import WANTED_BY_MIN, WANTED_BY_MIN_CACHED, SharedPieces, decide
from holdfast_service.storage import Tier

log = logging.getLogger(__name__)

GATHER_S = 0.5  # how long the first rank waits for the others of its machine
LENT_S = 600.0  # how long memory is lent at most; who reads it then still has it, and the arena counts it no more
_BOUNDLESS = 2**60
MIB = 2**20

Send = Callable[[wire.Loaded, tuple[int, ...]], None]


class Wish(NamedTuple):
    """What one rank asks for. `rank` is any value that stands for it; `send` is called once, on a thread of the loader's."""

    rank: object
    request: wire.Load
    listing: PieceList
    send: Send


class Key(NamedTuple):
    """Ranks with the same key restore together."""

    run: str
    attempt: int
    step: int


class ReadCounts:
    """Bytes that were read for restores: by this daemon, and by the ranks that asked it, for themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = {"node": 0, "rank": 0}

    def add(self, by: str, size: int) -> None:
        with self._lock:
            self._bytes[by] += size

    def all(self) -> dict[str, int]:
        with self._lock:
            return dict(self._bytes)


class Loader:
    """The loads in progress. Safe for threads; each load has its own thread."""

    def __init__(self, tier: Tier, arena: Arena, gather_s: float | None = None, lent_s: float = LENT_S) -> None:
        self.tier, self.arena, self.lent_s = tier, arena, lent_s
        self.gather_s = GATHER_S if gather_s is None else gather_s
        self._lock = threading.Lock()
        self._loads: dict[Key, _Load] = {}
        self._all: set[_Load] = set()
        self._closed = False
        self.counts = ReadCounts()

    def ask(self, key: Key, wish: Wish) -> None:
        """Answer this wish together with those of the other ranks, or out of what was read for them already."""
        with self._lock:
            if self._closed:
                raise DaemonGone("the daemon is shutting down")
            load = self._loads.get(key)
            if load is None or not load.add(wish):  # the first, or one that restores this step once more
                load = self._loads[key] = _Load(self, key, wish)
                self._all.add(load)
                load.start()

    def leave(self, rank: object) -> None:
        """This rank has copied its part, or is gone."""
        with self._lock:
            loads = list(self._all)
        for load in loads:
            load.leave(rank)

    def close(self) -> None:
        """End all loads; waiting ranks are told that nothing is shared."""
        with self._lock:
            self._closed = True
            loads = list(self._all)
        for load in loads:
            load.end()

    def forget(self, load: _Load) -> None:
        """A load is over."""
        with self._lock:
            self._all.discard(load)
            if self._loads.get(load.key) is load:
                del self._loads[load.key]


class _Load:
    """One step for the ranks of one launch: wishes are gathered, decided on, read, and answered; then memory is lent.

    `_changed` guards what follows it. A rank is a user from its wish until it leaves; with the last one the load is over.
    """

    def __init__(self, loader: Loader, key: Key, first: Wish) -> None:
        self.key = key
        self._loader = loader
        self._loan: Loan | None = None
        self._memory: SealedMemory | None = None
        self._changed = threading.Condition()
        self._waiting = [first]
        self._users = {first.rank}
        self._known = {first.rank}  # that have asked, whether or not they are still there
        self._peers = first.request.peers
        self._ending = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name="holdfast-load", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, wish: Wish) -> bool:
        """Take a wish up; False when it is not of this load."""
        with self._changed:
            if self._over or wish.rank in self._known:
                return False
            self._waiting.append(wish)
            self._users.add(wish.rank)
            self._known.add(wish.rank)
            self._peers = max(self._peers, wish.request.peers)
            self._changed.notify_all()
            return True

    def leave(self, rank: object) -> None:
        with self._changed:
            self._users.discard(rank)
            self._waiting = [wish for wish in self._waiting if wish.rank != rank]
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        answer = wire.Loaded(reply_to=0, notice="the daemon could not read for several ranks: see its log")
        try:
            answer = self._read(self._gather())
            self._lend(answer)
        except Exception:
            log.exception("a load of %s@%s failed", self.key.run, self.key.step)
        finally:
            with self._changed:
                self._over = True
            self._give(answer)
            self._part()
            self._loader.forget(self)

    def _gather(self) -> list[Wish]:
        """The wishes of all ranks of this machine, or those that came in time."""
        limit = time.monotonic() + self._loader.gather_s
        with self._changed:
            while len(self._known) < self._peers and not self._ending and time.monotonic() < limit:
                self._changed.wait(max(limit - time.monotonic(), 0))
            return list(self._waiting)

    def _read(self, wishes: list[Wish]) -> wire.Loaded:
        """Read what is to be shared; the answer to all, but for `reply_to`."""
        try:
            waits = any(wish.request.waits for wish in wishes)
            least = WANTED_BY_MIN if waits else WANTED_BY_MIN_CACHED
            answer = self._fill(self._decide([wish.listing for wish in wishes], least), waits)
        except CheckpointError as error:
            answer = wire.Loaded(reply_to=0, notice=f"the daemon could not read for several ranks: {error.detail}")
        if answer.notice:
            log.warning("%s@%s: %s", self.key.run, self.key.step, answer.notice)
        if answer.pieces == 0:
            self._part()
        return answer

    def _decide(self, asked: list[PieceList], least: int) -> SharedPieces:
        whole = decide(asked, _BOUNDLESS, least)
        if not len(whole.listing.rows):
            return whole
        self._loan = self._loader.arena.lend(whole.memory_bytes, self.key.run)
        return whole if self._loan.bytes == whole.memory_bytes else decide(asked, self._loan.bytes, least)

    def _fill(self, shared: SharedPieces, waits: bool) -> wire.Loaded:
        notices = []
        if shared.left_out:
            had, wanted = shared.listing.nbytes / MIB, (shared.listing.nbytes + shared.left_out) / MIB
            what = f"memory has room for {had:.1f} of the {wanted:.1f} MiB that several ranks of this machine want"
            notices.append(f"{what}: each of them reads the rest separately")
        good = shared.listing
        if len(shared.listing.rows):
            assert self._loan is not None
            memory = self._memory = SealedMemory(f"{self.key.run}-{self.key.step}", shared.memory_bytes)
            self._loan.touched = lambda: memory.touched_bytes
            stored = StepFiles(self._loader.tier, naming.checkpoint_path(self.key.run, self.key.step), waits)
            good, read = memory.fill(stored, shared.listing, self._deserted)
            self._loader.counts.add("node", read)
        if len(good.rows) < len(shared.listing.rows):
            bad = len(shared.listing.rows) - len(good.rows)
            notices.append(f"{bad} pieces that several ranks want could not be read and verified for them")
        return wire.Loaded(reply_to=0, pieces=len(good.rows), bytes=good.nbytes, notice="; ".join(notices))

    def _deserted(self) -> bool:
        """Whether nobody waits for what is read."""
        with self._changed:
            return self._ending or not self._users

    def _lend(self, answer: wire.Loaded) -> None:
        """Answer all, also who comes late, until the last rank leaves, or for as long as memory is lent."""
        limit = time.monotonic() + self._loader.lent_s
        while True:
            self._give(answer)
            with self._changed:
                left = limit - time.monotonic()
                if self._ending or not self._users or left <= 0:
                    self._over = True
                    return
                if not self._waiting:
                    self._changed.wait(left)

    def _give(self, answer: wire.Loaded) -> None:
        with self._changed:
            waiting, self._waiting = self._waiting, []
        for wish in waiting:
            fds = (self._memory.fd,) if answer.pieces and self._memory is not None else ()
            try:
                wish.send(answer.model_copy(update={"reply_to": wish.request.id}), fds)
            except OSError as error:
                log.info("a rank is gone and does not receive what was read for it: %s", error)

    def _part(self) -> None:
        """Give the memory back. Who was lent it may look at it still."""
        loan, memory, self._loan, self._memory = self._loan, self._memory, None, None
        if loan is not None:
            self._loader.arena.take_back(loan)
        if memory is not None:
            memory.close()

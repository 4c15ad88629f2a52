"""Other nodes' in-memory checkpoints for ranks of this node: fetched once for all of them, while they restore.

The wait for a peer is limited: ranks read the rest from the root. Fetched bytes are verified twice, in transit and by the
ranks against the manifest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from holdfast_formats.errors import CatalogUnavailable, CheckpointError
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_service.daemon.arena.memory_checkpoints import MemoryStep
from holdfast_service.wings.cluster.exchange.holders import HolderLost, HoldingNode
from holdfast_service.wings.cluster.exchange.memory_requests import SlotReport
from holdfast_service.wings.cluster.exchange.mirrors import Mirror

log = logging.getLogger(__name__)

WORLD_MAX = 256  # of a save whose slots are requested from other nodes: every node reads all their tables
ASK_S, LOOK_S = 2.0, 6.0  # how long a node may take to say what it holds, and all of them
GRACE_S, RATE_MIN = 2.0, 2**25  # after so many seconds, a peer that has sent fewer bytes a second is too slow
PIECE_BYTES = 2**25  # requested from a peer at once
VAIN_S_MAX = 6.0  # that a restore waits for peers in vain: then all are given up
AT_ONCE = 8  # nodes queried at the same time

Find = Callable[[MemoryStep], Sequence[HoldingNode]]


class _Lent:
    """Other nodes' slots of one save, and the ranks of this node that read them."""

    def __init__(self, of: MemoryStep) -> None:
        self.of = of
        self.users: set[object] = set()
        self.opening = threading.Lock()
        self.opened = threading.Event()
        self.mirrors: dict[int, Mirror] = {}
        self.changed = threading.Condition()  # guards the mirrors' content
        self.lost: set[str] = set()  # nodes that failed and are not queried again
        self.sent: dict[str, tuple[int, float]] = {}  # by node: bytes, and the seconds that they took
        self.vain_s = 0.0

    def lose(self, node: str, after_s: float) -> None:
        """A node failed, after so long. Called with `changed`."""
        self.lost.add(node)
        self.vain_s += after_s

    def close(self) -> None:
        with self.changed:
            for mirror in self.mirrors.values():
                mirror.close()


class PeerMemory:
    """Thread-safe. `find` returns nodes that may hold slots of a save; `spare` the bytes that this node has room for."""

    def __init__(self, find: Find, spare: Callable[[], int]) -> None:
        self._find, self._spare = find, spare
        self._lock = threading.Lock()
        self._lent: dict[MemoryStep, _Lent] = {}

    def open(self, of: MemoryStep, user: object) -> list[Mirror]:
        """The slots of this save on other nodes, by rank, for `user` until it `release`s them. The first caller waits until
        all nodes have answered or timed out.
        """
        if of.world > WORLD_MAX:
            return []
        with self._lock:
            lent = self._lent.setdefault(of, _Lent(of))
            lent.users.add(user)
        with lent.opening:
            if not lent.opened.is_set():
                self._look(lent)
                lent.opened.set()
        return [mirror for _, mirror in sorted(lent.mirrors.items())]

    def fetch(self, of: MemoryStep, ranges: Iterable[SlotRange]) -> set[int]:
        """Fetch the missing parts of these ranges. Returns the ranks that are incomplete."""
        wanted = list(ranges)
        with self._lock:
            lent = self._lent.get(of)
        if lent is None or not lent.opened.is_set():
            return {one.rank for one in wanted}
        known = [one for one in wanted if one.rank in lent.mirrors and lent.mirrors[one.rank].has(one.begin, one.end)]
        by_node: dict[HoldingNode, list[SlotRange]] = {}
        with lent.changed:
            for one in known:
                mirror = lent.mirrors[one.rank]
                by_node.setdefault(mirror.holder, []).extend(mirror.claim(one.begin, one.end))
        _each([partial(self._bring, lent, holder, claimed) for holder, claimed in by_node.items() if claimed])
        with lent.changed:
            mirrors = lent.mirrors
            lent.changed.wait_for(lambda: all(mirrors[one.rank].is_settled(one.begin, one.end) for one in known), VAIN_S_MAX)
            present = {one for one in known if mirrors[one.rank].is_there(one.begin, one.end)}
        return {one.rank for one in wanted if one not in present}

    def release(self, user: object) -> None:
        """`user` has restored. Drops slots that no rank reads any more."""
        with self._lock:
            for lent in self._lent.values():
                lent.users.discard(user)
            over = [of for of, lent in self._lent.items() if not lent.users]
            dropped = [self._lent.pop(of) for of in over]
        for lent in dropped:
            lent.close()

    def _look(self, lent: _Lent) -> None:
        try:
            holders = self._find(lent.of)
        except CatalogUnavailable as away:
            log.info("cannot find which nodes hold %s@%s in memory: %s", lent.of.run, lent.of.step, away.detail)
            return
        began = time.monotonic()
        _each([partial(self._open, lent, holder, began + LOOK_S) for holder in holders])
        if lent.mirrors:
            text = "%s@%s: slots of %d ranks are in the memory of %d nodes, found in %.3f s"
            nodes = {mirror.holder.node for mirror in lent.mirrors.values()}
            log.info(text, lent.of.run, lent.of.step, len(lent.mirrors), len(nodes), time.monotonic() - began)

    def _open(self, lent: _Lent, holder: HoldingNode, limit: float) -> None:
        """Query a node's slots, and fetch their tables; stops at the `limit`."""
        mirrors: list[Mirror] = []
        if time.monotonic() > limit:
            return
        try:
            reports = [one for one in holder.slots(lent.of, ASK_S) if one.rank not in lent.mirrors]
            if sum(one.table_bytes for one in reports) > self._spare():
                raise HolderLost(f"there is no room for the tables of {len(reports)} ranks")
            for one in reports:
                mirrors.append(Mirror(lent.of, one, holder))
            if mirrors:
                into, tables = {mirror.report.rank: mirror.slot for mirror in mirrors}, [mirror.table for mirror in mirrors]
                holder.fetch(lent.of, reports, tables, into, _limit_s(tables))
            for mirror in mirrors:
                mirror.open()
        except (HolderLost, CheckpointError) as error:
            log.info("cannot read the memory of node %s: %s", holder.node, error)
            for mirror in mirrors:
                mirror.close()
            return
        with lent.changed:
            for mirror in mirrors:
                if lent.mirrors.setdefault(mirror.report.rank, mirror) is not mirror:
                    mirror.close()

    def _bring(self, lent: _Lent, holder: HoldingNode, claimed: Sequence[SlotRange]) -> None:
        """Fetch claimed ranges from one node, piece by piece. If it fails, its remaining ranges are lost."""
        pieces = list(_pieces(claimed))
        for number, piece in enumerate(pieces):
            if not self._piece(lent, holder, piece):
                with lent.changed:
                    for left in pieces[number:]:
                        _settle(lent, left, there=False)
                    lent.changed.notify_all()
                return

    def _piece(self, lent: _Lent, holder: HoldingNode, piece: Sequence[SlotRange]) -> bool:
        ranks = {one.rank for one in piece}
        with lent.changed:
            if holder.node in lent.lost or lent.vain_s > VAIN_S_MAX:
                return False
            slots: list[SlotReport] = [lent.mirrors[rank].report for rank in sorted(ranks)]
            into = {rank: lent.mirrors[rank].slot for rank in ranks}
        began, size = time.monotonic(), sum(one.length for one in piece)
        try:
            if size > self._spare():
                raise HolderLost("this node has no memory to spare")
            holder.fetch(lent.of, slots, piece, into, _limit_s(piece))
        except HolderLost as error:
            log.warning("%s@%s: %s; ranks read the root instead", lent.of.run, lent.of.step, error)
            with lent.changed:
                lent.lose(holder.node, time.monotonic() - began)
            return False
        with lent.changed:
            _settle(lent, piece, there=True)
            lent.changed.notify_all()
            before = lent.sent.get(holder.node, (0, 0.0))
            sent, took_s = lent.sent[holder.node] = before[0] + size, before[1] + time.monotonic() - began
            if took_s > GRACE_S and sent < took_s * RATE_MIN and holder.node not in lent.lost:
                lent.lost.add(holder.node)
                log.warning("node %s sends too slowly: %d bytes in %.1f s; ranks read the root", holder.node, sent, took_s)
        return True


def _settle(lent: _Lent, ranges: Iterable[SlotRange], there: bool) -> None:
    for one in ranges:
        lent.mirrors[one.rank].settle(one, there)


def _limit_s(ranges: Iterable[SlotRange]) -> float:
    return GRACE_S + sum(one.length for one in ranges) / RATE_MIN


def _pieces(ranges: Iterable[SlotRange]) -> Iterable[Sequence[SlotRange]]:
    """The same ranges, `PIECE_BYTES` at a time, cut at unit boundaries."""
    piece: list[SlotRange] = []
    room = PIECE_BYTES
    for one in ranges:
        for begin in range(one.begin, one.end, PIECE_BYTES):
            end = min(one.end, begin + PIECE_BYTES)
            if piece and end - begin > room:
                yield piece
                piece, room = [], PIECE_BYTES
            piece.append(one._replace(begin=begin, end=end))
            room -= end - begin
    if piece:
        yield piece


def _each(acts: Sequence[Callable[[], None]]) -> None:
    if len(acts) == 1:
        acts[0]()
    elif acts:
        with ThreadPoolExecutor(min(len(acts), AT_ONCE), "holdfast-peer") as pool:
            for done in [pool.submit(act) for act in acts]:
                done.result()

"""Many nodes save one checkpoint: from the last receipt until all of them know that it is committed, and what it asks of
PostgreSQL.

python -m benchmarks.many_nodes [--nodes 8,100,1000] [--tensors 5000] [--saves 3]

All nodes are in this process: the part of a daemon that meets others (`JointSaves`), with the real rendezvous, planner,
writer, exchange and commit, on a real PostgreSQL and a directory in memory. There are no trainers and no sockets to them:
slots are memory of this process. What nodes of a cluster have each for themselves, these share, and so it is slower or
faster than there: two cores, one interpreter, one pool of connections (PostgreSQL's own limit is 100), one memory of plans
(so the plan of a save is worked out once, not by each node), and one listener that rings for all.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

from sqlalchemy import Engine, event, func, select

from holdfast_formats.errors import CheckpointError
from holdfast_formats.naming import Place
from holdfast_formats.region import whole
from holdfast_formats.staging import part
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.control.database import engines
from holdfast_service.control.database.cluster_schema import DeclarationRow, JointRoundRow, PartRow
from holdfast_service.control.database.database import Database
from holdfast_service.daemon.arena.segment import ArenaSegment, SealedSlot
from holdfast_service.daemon.checking.node_checks import WrittenSpan
from holdfast_service.daemon.saving.other_nodes import Host, Result
from holdfast_service.daemon.saving.rounds import RoundKey, SaveRound
from holdfast_service.daemon.saving.save_metrics import SaveHistory
from holdfast_service.storage import stored_in
from holdfast_service.storage.posix import PosixTier
from holdfast_service.wings.cluster.cluster import Cluster
from holdfast_service.wings.cluster.exchange.server import ExchangeServer
from holdfast_service.wings.cluster.notify_listener import NotifyListener
from holdfast_service.wings.cluster.saving.joint_saves import JointParty, JointSaves
from holdfast_service.wings.cluster.saving.joint_writing import ShareWriter
from tests.databases import running_postgres
from tests.in_memory import in_memory

RUN, ATTEMPT = "many", 1
RANK_BYTES = 2**18  # of tensors that a rank holds alone: a block
ALIKE = 16  # tensors that all ranks hold
SAVE_S = 600.0
BARS = {8: 0.5, 100: 1.0, 1000: 4.0}  # seconds from the last receipt
STATEMENTS_MAX, BYTES_MAX = 12.0, 6000.0  # a node a save
LEASE_S = 600.0  # nobody beats here
CONNECTIONS, PLAIN_CONNECTIONS = 24, 64  # of all nodes together, and kept open
SPEAKERS = 32  # nodes that speak at a time where they have no threads of their own
RECEIPT = os.urandom(2048)  # as that of a node with some hundred extents
WAIT_S = 300  # for one of them


class Measured(NamedTuple):
    """What a save took: seconds, and of PostgreSQL statements and bytes a node."""

    sealed_s: float  # until all parts are there, and all nodes have begun to write
    written_s: float  # from there until the last receipt
    known_s: float  # from there until all nodes know that it is committed
    statements: float
    bytes: float  # that a node tells: its part and its receipt
    read: float  # that a node reads of the others' parts
    cpu_s: float  # of this process, a node: without PostgreSQL's


class Counted:
    """Statements, and when the last receipt came."""

    def __init__(self) -> None:
        self.statements = 0
        self.sealed_at = self.receipt_at = 0.0
        self._lock = threading.Lock()

    def statement(self, *_: Any) -> None:
        with self._lock:
            self.statements += 1

    def receipt(self) -> None:
        with self._lock:
            self.receipt_at = time.monotonic()

    def sealed(self) -> None:
        with self._lock:
            self.sealed_at = time.monotonic()


class ManyNode:
    """A node with one rank, as its daemon's joint saves see it."""

    def __init__(self, number: int, database: Database, shared: Shared) -> None:
        self.rank, self._shared = number, shared
        self.cluster = Cluster(database, f"node{number:05d}", lease_s=LEASE_S)
        self.exchange = ExchangeServer("127.0.0.1", secrets=lambda: ("benchmark",))
        self.cluster.membership.about = lambda: {"exchange": self.exchange.url}
        self._open: SaveRound | None = None
        self._queued: SaveRound | None = None  # sealed, and not written yet
        self.ended = threading.Event()
        self.result: Result = None

    def start(self) -> None:
        """Join, and meet others from now on."""
        shared, rendezvous = self._shared, self.cluster.rendezvous
        self.cluster.membership.join(0.0)
        deliver = rendezvous.deliver

        def timed(round_id: int, receipt: bytes, instead_of: str | None = None) -> None:
            deliver(round_id, receipt, instead_of)
            shared.counted.receipt()

        rendezvous.deliver = timed  # type: ignore[method-assign]
        party = JointParty(rendezvous, self.exchange, self.cluster.node_ranks.of)
        history = SaveHistory(shared.control)
        writer = ShareWriter(shared.control, self.cluster.node, rendezvous, self.exchange, history)
        host = Host(
            *(self._ready, self._may_give_way, self._sealed, self._writes),
            *(lambda: None, self._given_up, self._ended),
        )
        self.joint = JointSaves(party, shared.control, self.cluster.node, writer, host=host, history=history)

    def save(self, table: SlotTable, slot: memoryview) -> None:
        """This node's rank has sealed."""
        self.ended.clear()
        key = RoundKey(table.run, table.step, table.attempt)
        number = self._shared.control.saves.begin(*key, table.world, quiet=self.rank > 0)
        current = SaveRound(key, number, table.world, time.monotonic() + SAVE_S)
        current.sealed[self.rank] = SealedSlot(cast(ArenaSegment, None), 0, table, slot)
        self._open = current
        self.joint.look()

    def _ready(self) -> list[SaveRound]:
        return [] if self._open is None else [self._open]

    def _may_give_way(self, current: SaveRound) -> bool:
        return self._open is current or self._queued is current

    def _sealed(self, current: SaveRound) -> bool:
        self._queued, self._open = self._open, None
        self._shared.counted.sealed()
        return True

    def _writes(self, current: SaveRound) -> bool:
        queued, self._queued = self._queued is current, None
        return queued

    def _given_up(self, current: SaveRound, error: CheckpointError) -> None:
        self._ended(current, error, None, ())

    def _ended(self, current: SaveRound, result: Result, staging: Place | None, written: Sequence[WrittenSpan]) -> None:
        self._open = self._queued = None
        self.result = result
        self.ended.set()

    def close(self) -> None:
        self.joint.close()
        self.exchange.close()


class Shared(NamedTuple):
    """What all nodes of this process have in common."""

    tier: PosixTier
    control: Control
    counted: Counted


class ManyNodes:
    """So many nodes of one root and catalog, with one rank each, that save a model of so many tensors."""

    def __init__(self, url: str, root: Path, nodes: int, tensors: int) -> None:
        engines.CONNECTIONS, engines.PLAIN_CONNECTIONS = CONNECTIONS, PLAIN_CONNECTIONS
        engines.CONNECTIONS_MORE, engines.BUSY_TIMEOUT_S = 0, WAIT_S
        self.database = Database.open(url)
        tier = PosixTier(root)
        self.catalog = Catalog(self.database)
        self._shared = Shared(tier, Control(stored_in(tier), self.catalog, 1), Counted())
        self._shared.control.recovery.recover()
        self._shared.control.launches.declare(RUN, "launch", nodes, 1)
        self.nodes = [ManyNode(number, self.database, self._shared) for number in range(nodes)]
        for node in self.nodes:
            node.start()
        self._bell = NotifyListener(self.database, self._ring)
        self._held = [holdings(rank, nodes, tensors) for rank in range(nodes)]
        self._slot = memoryview(bytearray(max(end for _, end in self._held)))

    def _ring(self) -> None:
        for node in self.nodes:
            node.joint.look_at_all()

    def save(self, step: int) -> Measured:
        """Until all nodes know that it is committed."""
        counted, many = self._shared.counted, len(self.nodes)
        counted.statements = 0
        began, cpu = time.monotonic(), time.process_time()
        with counting(counted):
            for node, (held, _) in zip(self.nodes, self._held, strict=True):
                node.save(table(node.rank, many, step, held), self._slot)
            for node in self.nodes:
                assert node.ended.wait(SAVE_S), f"{node.cluster.node} did not end"
                if isinstance(node.result, CheckpointError):
                    raise node.result
        ended = time.monotonic()
        told, read = self._bytes()
        return Measured(
            counted.sealed_at - began,
            counted.receipt_at - counted.sealed_at,
            ended - counted.receipt_at,
            counted.statements / many,
            told / many,
            read,
            (time.process_time() - cpu) / many,
        )

    def _bytes(self) -> tuple[int, int]:
        """What all parts of the newest round and their receipts take, and what of it every node reads."""
        newest = select(func.max(PartRow.round_id)).scalar_subquery()
        sizes = select(func.sum(func.length(PartRow.said) + func.length(PartRow.receipt)))
        read = select(func.length(JointRoundRow.joined)).where(JointRoundRow.id == newest)
        with self.database.apart() as session:
            told = session.scalar(sizes.where(PartRow.round_id == newest))
            return int(told or 0), int(session.scalar(read) or 0)

    @property
    def declared_bytes(self) -> int:
        """What all declarations take."""
        with self.database.apart() as session:
            return int(session.scalar(select(func.sum(func.length(DeclarationRow.body)))) or 0)

    def close(self) -> None:
        self._bell.close()
        for node in self.nodes:
            node.close()
        self._shared.control.close()
        self.database.close()


@contextmanager
def counting(counted: Counted) -> Iterator[None]:
    """Count what all nodes ask of the database meanwhile."""
    event.listen(Engine, "before_cursor_execute", counted.statement)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", counted.statement)


def holdings(rank: int, world: int, tensors: int) -> tuple[tuple[StagedFragment, ...], int]:
    """What a rank holds, and the length of its slot: neighbouring tensors alone, and some that all ranks hold."""
    mine = [number for number in range(tensors) if number * world // tensors == rank]
    each = max(RANK_BYTES // max(len(mine), 1) // 4, 1)
    specs = [TensorSpec("model", f"layers.{number}.experts.weight", "F32", (each,)) for number in mine]
    specs += [TensorSpec("model", f"norms.{number}.weight", "F32", (64,)) for number in range(ALIKE)]
    fragments, end = [], 0
    for spec in specs:
        fragments.append(StagedFragment(spec, (whole(spec.shape),), end, "whole"))
        end += spec.nbytes
    return tuple(fragments), end


def table(rank: int, world: int, step: int, held: tuple[StagedFragment, ...]) -> SlotTable:
    """The rank's table, with values as of a trainer."""
    values = {"model": {"optimizer/step": str(step), "schedule/last_epoch": str(step), "loader/position": str(rank)}}
    return SlotTable(RUN, step, ATTEMPT, rank, world, ("model",), held, values, {}, mesh={"dp": world})


def measure(nodes: int, tensors: int, saves: int) -> list[Measured]:
    """So many saves; the first one declares and plans."""
    with running_postgres() as postgres, in_memory() as directory:
        root = directory / "root"
        root.mkdir()
        many = ManyNodes(postgres.take(), root, nodes, tensors)
        try:
            found = [many.save(step) for step in range(1, saves + 1)]
            print(f"  {nodes} nodes: declarations {many.declared_bytes / nodes:.0f} B a node", flush=True)
            return found
        finally:
            many.close()


class Met(NamedTuple):
    """Seconds of a save that is nothing but what nodes say to PostgreSQL, of all of them together."""

    arrived_s: float
    read_s: float  # from the seal until all have read all parts
    delivered_s: float  # all receipts, and who tried to claim
    known_s: float  # from the claim until all know that it is committed
    statements: float = 0.0  # of a node


def meet(nodes: int, saves: int) -> list[Met]:
    """As `measure`, without plans, writing and threads of nodes: some of them speak at a time."""
    engines.CONNECTIONS, engines.PLAIN_CONNECTIONS = CONNECTIONS, PLAIN_CONNECTIONS
    engines.CONNECTIONS_MORE, engines.BUSY_TIMEOUT_S = 0, WAIT_S
    with running_postgres() as postgres, ThreadPoolExecutor(SPEAKERS) as pool:
        database = Database.open(postgres.take())
        clusters = [Cluster(database, f"node{number:05d}", lease_s=LEASE_S) for number in range(nodes)]
        list(pool.map(lambda one: one.membership.join(0.0), clusters))
        encoded = [part.encode([table(rank, nodes, 1, holdings(rank, nodes, nodes)[0])]) for rank in range(nodes)]
        found = []
        counted = Counted()
        for step in range(1, saves + 1):
            counted.statements = 0
            with counting(counted):
                found.append(_meet(pool, clusters, encoded, step)._replace(statements=counted.statements / nodes))
        database.close()
        return found


def _meet(pool: ThreadPoolExecutor, clusters: Sequence[Cluster], encoded: Sequence[part.EncodedPart], step: int) -> Met:
    many = len(clusters)

    def arrive(rank: int) -> int:
        mine = encoded[rank]
        return clusters[rank].rendezvous.arrive(RUN, step, ATTEMPT, many, [rank], mine.declaration, mine.said)

    def read(one: Cluster) -> None:
        assert len(one.rendezvous.sealed(number).parts) == len(one.rendezvous.parts(number)) == many

    def deliver(one: Cluster) -> bool:
        one.rendezvous.deliver(number, RECEIPT)
        return one.rendezvous.claim(number)

    times = [time.monotonic()]
    (number,) = set(pool.map(arrive, range(many)))
    times.append(time.monotonic())
    clusters[0].rendezvous.seal(number)
    list(pool.map(read, clusters))
    times.append(time.monotonic())
    claimed = list(pool.map(deliver, clusters))
    times.append(time.monotonic())
    assert claimed.count(True) == 1 and len(clusters[0].rendezvous.receipts(number)) == many
    clusters[claimed.index(True)].rendezvous.committed(number)
    assert {seen.state for seen in pool.map(lambda one: one.rendezvous.state(number), clusters)} == {"committed"}
    times.append(time.monotonic())
    return Met(*(after - before for before, after in pairwise(times)))


def line(name: str, nodes: int, one: Measured, limit: float | None) -> str:
    missed = (limit is not None and one.known_s > limit) or one.statements > STATEMENTS_MAX or one.bytes > BYTES_MAX
    return (
        f"{nodes:6} {name:6} {one.sealed_s:8.2f} {one.written_s:8.2f} {one.known_s:8.2f} {one.statements:11.1f} "
        f"{one.bytes:9.0f} {one.read / 1024:9.0f} {one.cpu_s:8.3f}{'  MISSED' * missed}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_nodes", description=__doc__.split("\n\n")[0])
    parser.add_argument("--nodes", default="8,100,1000", help="how many, with commas")
    parser.add_argument("--tensors", type=int, default=5000)
    parser.add_argument("--saves", type=int, default=3, help="after the first, which declares and plans")
    parser.add_argument("--meet", action="store_true", help="nothing but what nodes say to PostgreSQL")
    given = parser.parse_args()
    if given.meet:
        print(" nodes arrived s   read s delivered s  known s  statements")
        for nodes in map(int, given.nodes.split(",")):
            for one in meet(nodes, given.saves + 1):
                print(
                    f"{nodes:6} {one.arrived_s:9.2f} {one.read_s:8.2f} {one.delivered_s:11.2f} {one.known_s:8.2f} "
                    f"{one.statements:11.1f}",
                    flush=True,
                )
        return 0
    print(" nodes save    sealed s written s  known s  statements bytes/node  read KiB   CPU s", flush=True)
    for nodes in map(int, given.nodes.split(",")):
        found = measure(nodes, given.tensors, given.saves + 1)
        print(line("first", nodes, found[0], None))
        print(line("next", nodes, _median(found[1:]), BARS.get(nodes)), flush=True)
    print(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of memory in all")
    return 0


def _median(found: Sequence[Measured]) -> Measured:
    return Measured(*(statistics.median(column) for column in zip(*found, strict=True)))


if __name__ == "__main__":
    sys.exit(main())

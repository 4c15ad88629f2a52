"""Nodes that save together, for a stateful model: real meeting (`JointSaves`), real writing, real control, on a real
PostgreSQL and a tier in memory. No thread of theirs runs by itself: each step is one that the model takes.

At any of their calls to the catalog or to storage the daemon may die, before or after it was done; or the catalog does what
it is asked, and its answer is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import msgspec

from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable, CheckpointError, StorageFailed
from holdfast_formats.naming import Place
from holdfast_formats.region import Box
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import TensorSpec
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.daemon.arena.segment import SealedSlot
from holdfast_service.daemon.checking.node_checks import WrittenSpan
from holdfast_service.daemon.saving.other_nodes import Host, Result
from holdfast_service.daemon.saving.rounds import RoundKey, SaveRound
from holdfast_service.daemon.saving.save_metrics import SaveHistory
from holdfast_service.storage import MemoryTier, Tier, stored_in
from holdfast_service.wings.cluster.cluster import Cluster
from holdfast_service.wings.cluster.exchange.server import ExchangeServer
from holdfast_service.wings.cluster.saving import joined_round, joint_saves
from holdfast_service.wings.cluster.saving.joint_saves import JointParty, JointSaves
from holdfast_service.wings.cluster.saving.joint_writing import ShareWriter, ShareWritten
from tests.daemon.writing.test_path import Shards
from tests.wings.cluster.nodes import Nodes

RUN = "r"  # that of `Shards`
SIZES = (90_000, 50_000)  # of the columns of three rows
Fate = Literal["dies before", "dies after", "no answer", "answer lost"]


class Death(BaseException):
    """The daemon is killed here."""


class Doom:
    """What happens to a node at its `left`-th call from now."""

    def __init__(self) -> None:
        self.fate: Fate | None = None
        self.left = 0

    def set(self, fate: Fate, left: int) -> None:
        self.fate, self.left = fate, left

    @contextmanager
    def around(self, catalog: bool) -> Iterator[None]:
        fate = None
        if self.fate is not None and (catalog or self.fate.startswith("dies")):
            self.left -= 1
            if self.left < 0:
                fate, self.fate = self.fate, None
        if fate == "dies before":
            raise Death
        if fate == "no answer":
            raise CatalogUnavailable("the model cuts the connection")
        yield
        if fate == "dies after":
            raise Death
        if fate == "answer lost":
            raise CatalogUnavailable("the model loses the answer")


class Failing:
    """Storage of a node that can stage nothing, as long as that is so."""

    def __init__(self, tier: Tier) -> None:
        self._tier, self.broken = tier, False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._tier, name)
        if name not in ("join", "put", "replace"):
            return found

        def write(path: str, *values: Any) -> Any:
            if self.broken and f"/{naming.STAGING}/" in path:
                raise StorageFailed(f"write {path}: the model's disk is full", errno=28)
            return found(path, *values)

        return write


class Doomed:
    """Something that a node calls, with what may happen there."""

    def __init__(self, target: Any, doom: Doom, calls: Collection[str]) -> None:
        self._target, self._doom, self._calls = target, doom, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name not in self._calls:
            return found

        def call(*values: Any, **named: Any) -> Any:
            with self._doom.around(isinstance(self._calls, tuple)):
                return found(*values, **named)

        return call


TO_CATALOG = (
    "arrive",
    "seal",
    "state",
    "look",
    "parts",
    "hand_over",
    "help",
    "deliver",
    "claim",
    "receipts",
    "committed",
    "abort",
    "hear",
    "refuse",
)
TO_STORAGE = frozenset({"join", "put", "replace", "publish", "sync_directory", "remove_tree"})


class Sealed(NamedTuple):
    """A rank's sealed slot, without a segment."""

    table: SlotTable
    data: memoryview

    def release(self) -> None: ...


class Told(NamedTuple):
    """What the ranks of a node were told of a save, which was their `number`-th."""

    node: str
    key: RoundKey
    number: int
    error: str | None


class Later:
    """Writes shares when it is told to, instead of in a thread."""

    def __init__(self) -> None:
        self._due: list[tuple[Future[ShareWritten], Callable[..., ShareWritten], tuple[Any, ...]]] = []

    def submit(self, write: Callable[..., ShareWritten], *values: Any) -> Future[ShareWritten]:
        made: Future[ShareWritten] = Future()
        self._due.append((made, write, values))
        return made

    def run(self) -> bool:
        """Write the oldest one; False if there is none."""
        self._due = [one for one in self._due if not one[0].cancelled()]
        if not self._due:
            return False
        made, write, values = self._due.pop(0)
        made.set_running_or_notify_cancel()
        try:
            found = write(*values)
        except Death:
            raise
        except BaseException as error:
            made.set_exception(error)
        else:
            made.set_result(found)
        return True

    def shutdown(self) -> None: ...


class Clock:
    """What each node takes for the time, in its own way."""

    def __init__(self) -> None:
        self.seconds, self.ahead = 0.0, 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.seconds + self.ahead


CLOCK = Clock()


def still(patch: Any) -> None:
    """No thread meets by itself, and time is the model's."""
    patch.setattr(JointSaves, "_run", lambda self: None)
    for module in (joint_saves, joined_round):
        patch.setattr(module, "time", SimpleNamespace(monotonic=CLOCK.monotonic))


class MeetingNode:
    """One node, with one rank: its daemon, and the rank's slots, which outlive it."""

    def __init__(self, nodes: Nodes, tier: MemoryTier, name: str, rank: int, world: int) -> None:
        self._nodes, self._stored, self.name, self.rank, self.world = nodes, tier, name, rank, world
        self.held: dict[RoundKey, tuple[int, Sealed]] = {}  # by save: the number of the try, and the sealed slot
        self.tries: dict[RoundKey, int] = {}
        self.told: list[Told] = []
        self._lost: set[RoundKey] = set()
        self.published: list[int] = []
        self.doom, self.ahead = Doom(), 3600.0 * (rank - 1)
        self.disk = Failing(cast(Tier, tier))
        self.up = False
        self.start()

    def start(self) -> None:
        """A daemon that takes up what the rank had sealed."""
        self.cluster: Cluster = self._nodes.add(self.name, joined=False)
        self.exchange = ExchangeServer("127.0.0.1", secrets=lambda: self.cluster.secrets())
        self.cluster.membership.about = lambda: {"exchange": self.exchange.url}
        self.cluster.membership.join(0.0)
        tier = cast(Tier, Doomed(self.disk, self.doom, TO_STORAGE))
        self.control = Control(stored_in(tier), Catalog(self.cluster.database, self.name), None, self.cluster)
        self.rendezvous = Doomed(self.cluster.rendezvous, self.doom, TO_CATALOG)
        party = JointParty(cast(Any, self.rendezvous), self.exchange, self._node_ranks)
        history = SaveHistory(cast(Any, self.control))
        writer = ShareWriter(cast(Any, self.control), self.name, cast(Any, self.rendezvous), self.exchange, history)
        self._open: dict[RoundKey, SaveRound] = {}
        self._pending: dict[RoundKey, SaveRound] = {}
        self._queued: list[SaveRound] = []
        host = Host(
            *(self._ready, self._may_give_way, self._sealed, self._writes),
            *(lambda: None, self._given_up, self._ended),
        )
        self.joint = JointSaves(party, cast(Any, self.control), self.name, writer, host=host, history=history)
        self.later = Later()
        self.joint._pool.shutdown()
        self.joint._pool = cast(Any, self.later)
        self.doom.fate = None
        for key in list(self.held):
            try:
                self._take_up(key, self.control.saves.resume(*key, self.world))
            except CheckpointError as error:
                self._tell(SaveRound(key, 0, self.world, 0.0), error.code)
        self.up = True

    def _take_up(self, key: RoundKey, number: int) -> None:
        current = SaveRound(key, number, self.world, float("inf"))
        current.sealed[self.rank] = cast(SealedSlot, self.held[key][1])
        self._open[key] = current

    def save(self, key: RoundKey) -> bool:
        """The rank seals its part of a step; False where it may not save that, or does already."""
        if key in self.held or key in self._lost:
            return False
        try:
            current = self.control.saves.begin(*key, self.world)
        except CheckpointError:
            return False
        self.tries[key] = number = self.tries.get(key, 0) + 1
        self.held[key] = number, part(key, number, self.rank, self.world)
        self._take_up(key, current)
        return True

    def die(self) -> None:
        """The daemon is killed: all that it knows is gone."""
        self.up = False
        for key, _, _ in self.joint._refusals:  # nobody was told: a rank that trains goes on to other steps
            self._lost.add(key)
        self.exchange.close()
        self.control.close()

    def give_up(self, key: RoundKey) -> None:
        """The rank's part is dropped by policy, on this node alone."""
        current = self._open.get(key) or self._pending.get(key)
        if self.up and current is not None and self._may_give_way(current):
            self._leave(current, "round-aborted")
            self.joint.refuse(key, self.world, joint_saves.RoundAborted("the model gives it up"))

    def step(self) -> None:
        """As the thread that meets the others does once."""
        self.joint.look_at_all()
        self._alive(lambda: (self.joint._tell(), self.joint._meet()))

    def write(self) -> bool:
        """As the thread that writes does."""
        return bool(self._alive(self.later.run))

    def _alive(self, act: Callable[[], Any]) -> Any:
        CLOCK.ahead = self.ahead
        try:
            return act()
        except Death:
            self.die()
        except CatalogUnavailable:
            return True
        return None

    def _node_ranks(self, run: str, attempt: int) -> tuple[Mapping[str, int], set[int]]:
        return self.cluster.node_ranks.of(run, attempt)

    def _ready(self) -> list[SaveRound]:
        return list(self._open.values())

    def _may_give_way(self, current: SaveRound) -> bool:
        return self._open.get(current.key) is current or current in self._queued

    def _sealed(self, current: SaveRound) -> bool:
        if self._open.get(current.key) is not current:
            return False
        self._pending[current.key] = self._open.pop(current.key)
        self._queued.append(current)
        return True

    def _writes(self, current: SaveRound) -> bool:
        if current not in self._queued:
            return False
        self._queued.remove(current)
        return True

    def _given_up(self, current: SaveRound, error: CheckpointError) -> None:
        if self._may_give_way(current):
            self._leave(current, error.code)

    def _leave(self, current: SaveRound, code: str) -> None:
        if current in self._queued:
            self._queued.remove(current)
            del self._pending[current.key]
        else:
            del self._open[current.key]
        self._tell(current, code)

    def _ended(self, current: SaveRound, result: Result, staging: Place | None, written: Sequence[WrittenSpan]) -> None:
        self._pending.pop(current.key, None)
        if current in self._queued:
            self._queued.remove(current)
        self._tell(current, result.code if isinstance(result, CheckpointError) else None)
        if isinstance(result, CheckpointError) and staging:
            self.control.saves.clear(staging)

    def _tell(self, current: SaveRound, error: str | None) -> None:
        number, _ = self.held.pop(current.key)
        self.told.append(Told(self.name, current.key, number, error))


def content(key: RoundKey, number: int) -> int:
    """The byte of which all tensors consist in this try of this save."""
    return (key.step * 7 + key.attempt * 31 + number * 3) % 251 + 1


def part(key: RoundKey, number: int, rank: int, world: int) -> Sealed:
    """What a rank has sealed."""
    made = Shards(world, key.step, key.attempt)
    made.file_bytes_max = 600_000
    for name, size in enumerate(SIZES):
        spec = TensorSpec("model", f"t.{name}", "U8", (3, size))
        edges = [size * one // world for one in range(world + 1)]
        boxes = [(one, [Box((0, a), (3, b - a))]) for one, (a, b) in enumerate(pairwise(edges))]
        made.add(spec, bytes([content(key, number)]) * spec.nbytes, boxes)
    table = msgspec.structs.replace(made.tables()[rank], blobs=())
    return Sealed(table, memoryview(bytes(made.data[rank])))

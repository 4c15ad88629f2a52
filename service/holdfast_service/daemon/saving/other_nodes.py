"""What a node's data plane has of other nodes: joint saves, votes, reports of ranks, and slots that other nodes hold.

On one machine there is nothing of it: `NoOtherNodes`. The other implementation is in `wings/cluster`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError
from holdfast_formats.naming import Place
from holdfast_formats.rest import bodies
from holdfast_formats.staging import wire
from holdfast_formats.staging.joint import Votes
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_service.daemon.arena.memory_checkpoints import MemoryCheckpoints, MemoryStep
from holdfast_service.daemon.averaging.agreement import OneNodeAgreement, UpdateAgreement
from holdfast_service.daemon.averaging.rank_set import RankSetKey
from holdfast_service.daemon.checking.checker import Checker
from holdfast_service.daemon.checking.node_checks import CheckDistributor, OneNodeChecks, ScrubClaims, WrittenSpan
from holdfast_service.daemon.checking.verifier import Heed
from holdfast_service.daemon.saving.connected_ranks import ConnectedRanks
from holdfast_service.daemon.saving.rounds import LaunchKey, RoundKey, SaveRound
from holdfast_service.daemon.saving.save_metrics import SaveHistory
from holdfast_service.daemon.saving.stop_agreement import StopAgreement
from holdfast_service.daemon.saving.stuck_rounds import OpenSaves

Result = Manifest | CheckpointError | None  # of a joint save; None: another node has committed it


class Host(NamedTuple):
    """The saver's side of joint saves: the rounds with this node's complete part, and their results."""

    ready: Callable[[], list[SaveRound]]
    may_give_way: Callable[[SaveRound], bool]  # False once this node writes its share, or it has ended here
    sealed: Callable[[SaveRound], bool]  # by all nodes; False where it has been given up here
    writes: Callable[[SaveRound], bool]  # this node begins with its share; False where it has been given up here
    wait_on: Callable[[], None]  # what is sealed waits, because other nodes cannot be met
    given_up: Callable[[SaveRound, CheckpointError], None]  # of a round that may give way
    # With the staged files, if they may be removed, and the writer of each part.
    ended: Callable[[SaveRound, Result, Place | None, Sequence[WrittenSpan]], None]


class LocalRanks(NamedTuple):
    """The saver's side of reports: launches that may have ranks on other nodes, their awaited saves, and how stuck ones end,
    unless the state here has changed meanwhile.
    """

    launches: Callable[[], set[LaunchKey]]
    waited_for: Callable[[], Mapping[LaunchKey, OpenSaves]]
    end_stuck: Callable[[LaunchKey, OpenSaves, Sequence[OpenSaves]], None]


class RankNews(Protocol):
    """Exchanges what ranks say with other nodes."""

    def look(self) -> None:
        """A rank here has said something that concerns other nodes."""

    def close(self) -> None: ...


class JointSaving(Protocol):
    """Saves whose ranks are on several nodes."""

    def look(self) -> None:
        """A rank has sealed, or a round was given up."""

    def refuse(self, key: RoundKey, world: int, error: CheckpointError) -> None:
        """Give up this node's part of a round, which ends it on all nodes."""

    def close(self) -> None: ...


class PeerSlot(Protocol):
    """A slot of another node, mirrored here."""

    @property
    def part(self) -> wire.HeldPart: ...

    @property
    def fd(self) -> int: ...


class RemoteSlots(Protocol):
    """Other nodes' slots for ranks of this node, each for a `user` until it releases them."""

    def open(self, of: MemoryStep, user: object) -> Sequence[PeerSlot]: ...

    def fetch(self, of: MemoryStep, ranges: Iterable[SlotRange]) -> set[int]:
        """Fetch the missing parts of these ranges. Returns the ranks that are incomplete."""

    def release(self, user: object) -> None: ...


class LocalSaver(Protocol):
    """The saver, from the view of other nodes: its connected ranks, and newer attempts that shut them out."""

    holds: MemoryCheckpoints
    connected: ConnectedRanks

    def shut_out(self, run: str, newest: int) -> None: ...


class OtherNodes(Protocol):
    """One object a daemon, whole before the first rank connects."""

    @property
    def alone(self) -> bool: ...

    @property
    def url(self) -> str | None:
        """Where other nodes read what ranks of this one have saved."""

    @property
    def claims(self) -> ScrubClaims | None:
        """Claims of scrubs, where other nodes scrub the root too."""

    def vote(
        self, run: str, attempt: int, turn: int, ranks: Collection[int], problem: Mapping[str, Any] | None = None
    ) -> Votes:
        """Tell other nodes which ranks' restores have ended here, and return the votes of all."""

    def agreement(self, changed: Callable[[RankSetKey], None]) -> UpdateAgreement: ...

    def checks(self, checker: Checker, heed: Heed) -> CheckDistributor: ...

    def joint_saves(self, host: Host, history: SaveHistory) -> JointSaving: ...

    def rank_news(self, ranks: LocalRanks, stops: StopAgreement) -> RankNews: ...

    def slots(self, spare: Callable[[], int]) -> RemoteSlots:
        """`spare` returns the bytes that this node has room for."""

    def start(self, saver: LocalSaver, about: Callable[[], bodies.Node], held: Callable[[], Mapping[str, int]]) -> None:
        """Begin to tell other nodes `about` this one, with the bytes of its arena by run, and to do its duties."""


class NoOtherNodes:
    """All of it for a daemon that serves its root alone."""

    alone = True
    url: str | None = None
    claims: ScrubClaims | None = None

    def vote(
        self, run: str, attempt: int, turn: int, ranks: Collection[int], problem: Mapping[str, Any] | None = None
    ) -> Votes:
        return Votes(frozenset(ranks), None)

    def agreement(self, changed: Callable[[RankSetKey], None]) -> UpdateAgreement:
        return OneNodeAgreement(changed)

    def checks(self, checker: Checker, heed: Heed) -> CheckDistributor:
        return OneNodeChecks()

    def joint_saves(self, host: Host, history: SaveHistory) -> JointSaving:
        return self

    def rank_news(self, ranks: LocalRanks, stops: StopAgreement) -> RankNews:
        return self

    def slots(self, spare: Callable[[], int]) -> RemoteSlots:
        return self

    def start(self, saver: LocalSaver, about: Callable[[], bodies.Node], held: Callable[[], Mapping[str, int]]) -> None: ...

    def look(self) -> None: ...

    def refuse(self, key: RoundKey, world: int, error: CheckpointError) -> None: ...

    def close(self) -> None: ...

    def open(self, of: MemoryStep, user: object) -> Sequence[PeerSlot]:
        return ()

    def fetch(self, of: MemoryStep, ranges: Iterable[SlotRange]) -> set[int]:
        return {one.rank for one in ranges}

    def release(self, user: object) -> None: ...


NO_OTHER_NODES = NoOtherNodes()


class Borrower:
    """A rank that reads other nodes' slots of its own run."""

    def __init__(self, slots: RemoteSlots) -> None:
        self._slots = slots

    def slots(self, run: str, asked: wire.HeldElsewhere) -> list[PeerSlot]:
        """The next of other nodes' slots of the requested save."""
        slots = self._slots.open(_of(run, asked), self)
        return [slot for slot in slots if slot.part.rank > asked.after][: wire.HELD_RANKS_MAX]

    def fetch(self, run: str, asked: wire.Fetch) -> wire.Fetched:
        lost = self._slots.fetch(_of(run, asked), [SlotRange(*one) for one in asked.ranges])
        return wire.Fetched(reply_to=asked.id, lost=tuple(sorted(lost)))

    def release(self) -> None:
        self._slots.release(self)


def _of(run: str, asked: wire.OfSave) -> MemoryStep:
    return MemoryStep(run, asked.step, asked.attempt, asked.turn, asked.world)

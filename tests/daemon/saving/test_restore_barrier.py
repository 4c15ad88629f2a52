"""All ranks of a restore end alike: on the step that all of them could read, or on none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast_formats.errors import CheckpointError, CorruptExtent, Damaged, DeadlineExceeded, StateMismatch, StorageFailed
from holdfast_formats.staging.joint import Votes
from holdfast_formats.staging.messages import Answer, CopyPlace, RestoreResult, RestoreVerdict, StepQuestion
from holdfast_service.daemon.saving import restore_barrier
from holdfast_service.daemon.saving.restore_barrier import RestoreBarrier
from holdfast_service.daemon.saving.rounds import Participant
from holdfast_service.wings.cluster.cluster import Cluster
from holdfast_service.wings.cluster.rendezvous import Rendezvous
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]

BAD = CorruptExtent("bytes [0, 9) differ from what was written", file="model.safetensors")
GO_ON = RestoreVerdict()


def ended(error: CheckpointError | None = None, alone: bool = False) -> RestoreResult:
    """How a restore of step 500 ended."""
    return RestoreResult(step=500, problem=None if error is None else error.problem(), alone=alone)


WELL, ILL = ended(), ended(BAD)


class Copies:
    """The copies of a step, and what ranks met in nearer ones."""

    def __init__(self) -> None:
        self.of_step: dict[int, tuple[CopyPlace, ...]] = {}
        self.met: list[tuple[int, Mapping[str, CheckpointError]]] = []

    def of(self, run: str, step: int, *, damaged: bool) -> tuple[CopyPlace, ...]:
        assert damaged, "a rank tries what is known to be damaged, too, range by range"
        return self.of_step.get(step, ())

    def created(self, run: str, step: int) -> str:
        return "then"

    def skipped(self, run: str, step: int | None) -> list[str]:
        return []

    def passed_over(self, run: str, step: int, problems: Mapping[str, CheckpointError]) -> None:
        if problems:
            self.met.append((step, problems))


class Known:
    """What the catalog would know, and choose."""

    def __init__(self) -> None:
        self.marked: dict[int, Damaged] = {}
        self.copies = Copies()

    @property
    def findings(self) -> Known:
        return self

    @property
    def restores(self) -> Known:
        return self

    def choose(
        self, run: str, attempt: int, turn: int, step: int | None, groups: tuple[str, ...], healthy: bool, in_root: bool
    ) -> int | None:
        return 500 - 100 * turn if step is None else step

    def damage(self, run: str, step: int) -> Damaged | None:
        return self.marked.get(step)

    def damaged(self, run: str, step: int, error: Damaged, checked: bool = False) -> None:
        self.marked[step] = error

    def newest(self, run: str) -> int | None:
        return 400

    def passed_over(self, run: str, step: int | None) -> list[str]:
        return [f"step {bad} is damaged" for bad in self.marked]


def rank(number: int, world: int = 2) -> Participant:
    return Participant("r", number, world, 1, lambda outcome: None)


def made(look: Callable[..., Damaged | None] = lambda run, step, error: error) -> tuple[RestoreBarrier, Known]:
    known = Known()
    return RestoreBarrier(look, known), known  # type: ignore[arg-type]


def test_all_go_on_when_all_are_well() -> None:
    """The first one waits for the second; the answer is asked for again in between."""
    restores, _ = made()
    with pytest.raises(DeadlineExceeded):
        restores.judge(rank(0), 0, WELL, 0.0)
    assert restores.judge(rank(1), 0, WELL, 0.0) == GO_ON
    assert restores.judge(rank(0), 0, WELL, 0.0) == GO_ON


def test_damage_that_one_meets_ends_it_for_all() -> None:
    """Whether a rank was done before or comes later, it gets the same damage."""
    restores, _ = made()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(restores.judge, rank(0, 3), 0, WELL, 60.0)
        assert restores.judge(rank(1, 3), 0, ILL, 0.0) == RestoreVerdict(problem=BAD.problem())
        assert waiting.result(180) == RestoreVerdict(problem=BAD.problem())
    assert restores.judge(rank(2, 3), 0, WELL, 60.0) == RestoreVerdict(problem=BAD.problem())
    for number in range(3):  # the next turn is a new one
        restores.answered(rank(number, 3), 1, 400, named=False)


def barrier(node: Cluster) -> RestoreBarrier:
    """Of a node of a launch that spans several."""
    known = Known()
    return RestoreBarrier(lambda run, step, error: error, known, vote=node.rendezvous.vote, spans=lambda who: True)  # type: ignore[arg-type]


def test_a_restore_that_is_given_up_is_waited_for_on_no_node(nodes: Nodes) -> None:
    """It was the only rank of its node, and nobody else there tells the other ones."""
    here, there = barrier(nodes.add("a")), barrier(nodes.add("b"))
    assert here.judge(rank(0), 0, ended(StorageFailed("no")), 0.0) == GO_ON
    assert there.judge(rank(1), 0, WELL, 30.0) == GO_ON


def test_damage_is_told_to_other_nodes_once_the_catalog_is_back(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was away when one node met it: the rank on the other one waits, and does not go on from that step."""
    monkeypatch.setattr(restore_barrier, "REPEAT_S", 0.05)
    a, b = nodes.add("a"), nodes.add("b")
    here, there = barrier(a), barrier(b)
    a.database.away("the catalog is away", reads=True)
    assert here.judge(rank(0), 0, ILL, 0.0) == RestoreVerdict(problem=BAD.problem())
    with pytest.raises(DeadlineExceeded):
        there.judge(rank(1), 0, WELL, 0.5)
    a.database.back()
    assert there.judge(rank(1), 0, WELL, 30.0) == RestoreVerdict(problem=BAD.problem())
    here.close()


class OneIsLate:
    """The meeting place of nodes, in which the first vote is counted after the second one, if there is a second one."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous, self._counted, self._begun = rendezvous, threading.Event(), threading.Event()

    def vote(self, *said: Any) -> Votes:
        if not self._begun.is_set():
            self._begun.set()
            self._counted.wait(2)
            return self._rendezvous.vote(*said)
        found = self._rendezvous.vote(*said)
        self._counted.set()
        return found

    def begun(self) -> None:
        assert self._begun.wait(180)


def test_votes_of_one_node_are_counted_in_their_order(nodes: Nodes) -> None:
    """Two ranks of a node end at the same moment. What the first one says is told late, and takes back nothing of what the
    second one said: the rank on the other node hears of both.
    """
    here, b = barrier(nodes.add("a")), nodes.add("b")
    late, known = OneIsLate(b.rendezvous), Known()
    there = RestoreBarrier(lambda run, step, error: error, known, vote=late.vote, spans=lambda who: True)  # type: ignore[arg-type]
    with ThreadPoolExecutor(3) as threads:
        waiting = threads.submit(here.judge, rank(0, 3), 0, WELL, 15.0)
        first = threads.submit(there.judge, rank(1, 3), 0, WELL, 15.0)
        late.begun()
        second = threads.submit(there.judge, rank(2, 3), 0, WELL, 15.0)
        assert [one.result(180) for one in (first, second, waiting)] == [GO_ON] * 3


@pytest.mark.parametrize("fails", [False, True], ids=["well again", "cannot be read"])
def test_what_the_daemon_does_not_find_is_read_again_and_then_believed(fails: bool) -> None:
    """Repaired, or sound when the daemon looks, or it cannot read: once more. What the rank then says ends it for all."""

    def look(run: str, step: int, error: Damaged) -> Damaged | None:
        if fails:
            raise StorageFailed("the disk is gone")
        return None

    restores, known = made(look)
    assert restores.judge(rank(1), 0, ILL, 0.0) == RestoreVerdict(again=True)
    assert known.marked == {}
    assert restores.judge(rank(1), 0, ILL, 0.0).problem == BAD.problem()
    assert known.marked[500].problem() == BAD.problem()


def test_who_comes_too_late_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that never asked is not waited for without end; if it meets damage then, it cannot take the others back."""
    restores, _ = made()
    restores.unheard_s = 0.0
    assert restores.judge(rank(0), 0, WELL, 30.0) == GO_ON
    assert restores.judge(rank(1), 0, ILL, 0.0) == RestoreVerdict(problem=BAD.problem(), late=True)


def test_who_asked_is_waited_for_until_it_is_gone() -> None:
    """A rank that reads is waited for; a rank that dies, fails for a reason of its own, asks anew or saves is not."""
    ends: list[Callable[[RestoreBarrier, Participant], object]] = [
        lambda restores, who: restores.gone(who),
        lambda restores, who: restores.judge(who, 0, ended(StateMismatch("x")), 0.0),
        lambda restores, who: restores.answered(who, 1, 500, named=False),
        lambda restores, who: restores.moved_on(who),
    ]
    for end in ends:
        restores, _ = made()
        restores.unheard_s = 0.0
        other = rank(1)
        restores.answered(other, 0, 500, named=False)
        with pytest.raises(DeadlineExceeded):
            restores.judge(rank(0), 0, WELL, 0.0)
        end(restores, other)
        assert restores.judge(rank(0), 0, WELL, 0.0) == GO_ON
    restores.join(other)


def test_who_names_a_step_asks_for_itself() -> None:
    """Nobody is waited for, nobody else is stopped, and the answer says which step is sound."""
    restores, _ = made()
    assert restores.judge(rank(0), 0, ended(alone=True), 0.0) == GO_ON
    assert restores.judge(rank(1), 0, ended(BAD, alone=True), 0.0) == RestoreVerdict(
        problem=BAD.problem(), late=True, newest=400
    )
    assert restores.choose(rank(1), 1, StepQuestion(step=500)) == Answer(step=500)


def test_what_an_earlier_daemon_was_told_counts() -> None:
    """The catalog knows of the damage: a rank that asks the next daemon does not go on from that step."""
    restores, known = made()
    known.marked[500] = BAD
    assert restores.judge(rank(0), 0, WELL, 0.0) == RestoreVerdict(problem=BAD.problem())
    assert restores.choose(rank(0), 1, StepQuestion()) == Answer(step=400, notes=("step 500 is damaged",))


def test_damage_in_the_root_ends_no_restore_that_has_copies() -> None:
    """Ranks are told where they are, unless they ask for the root; what they met in nearer ones is passed on."""
    restores, known = made()
    known.marked[500] = BAD
    place = CopyPlace(name="tier cloud", at="s3://bucket")
    known.copies.of_step[500] = (place,)
    assert restores.choose(rank(0, 1), 0, StepQuestion(step=500)) == Answer(step=500, copies=(place,), created="then")
    assert restores.choose(rank(0, 1), 0, StepQuestion(step=500, in_root=True)) == Answer(step=500)
    met = RestoreResult(step=500, passed_over={"": BAD.problem()})
    for _ in range(3):
        assert restores.judge(rank(0, 1), 0, met, 0.0) == GO_ON
    [(step, problems)] = known.copies.met
    assert step == 500 and problems[""].problem() == BAD.problem()


def test_it_forgets_old_turns_and_lets_go_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns are bounded, and a daemon that ends keeps nobody waiting."""
    monkeypatch.setattr(restore_barrier, "TURNS_MAX", 3)
    restores, _ = made()
    for turn in range(10):
        restores.answered(rank(0), turn, 500, named=False)
    assert len(restores._turns) == 3
    restores.close()
    assert restores.judge(rank(0), 9, WELL, 60.0) == GO_ON


def test_no_run_makes_another_ones_restore_be_forgotten() -> None:
    """A rank that has reported goes on when the others have, however often another run asks meanwhile."""
    restores, _ = made()
    with pytest.raises(DeadlineExceeded):
        restores.judge(rank(0), 0, WELL, 0.0)
    other = Participant("another", 0, 1, 1, lambda outcome: None)
    for turn in range(1000):
        restores.answered(other, turn, 500, named=False)
    assert restores.judge(rank(1), 0, WELL, 0.0) == GO_ON
    assert restores.judge(rank(0), 0, WELL, 0.0) == GO_ON


def test_a_run_that_is_swept_is_forgotten() -> None:
    """Its restores take no memory any more; those of others stay."""
    restores, _ = made()
    for run in ("swept", "r"):
        restores.answered(Participant(run, 0, 2, 1, lambda outcome: None), 0, 500, named=False)
        restores.gone(Participant(run, 1, 2, 1, lambda outcome: None))
    restores.forget("swept")
    assert {key[0] for key in (*restores._turns, *restores._gone)} == {"r"}


def test_it_is_known_while_a_rank_restores() -> None:
    """From the answer until it has ended, fails for a reason of its own, saves, asks for another turn, or is gone."""
    restores, _ = made()
    restores.answered(rank(0), 0, None, named=False)  # there is nothing to be restored
    assert not restores.under_way
    ends: list[Callable[[], object]] = [
        lambda: restores.judge(rank(0, 1), 1, WELL, 0.0),
        lambda: restores.judge(rank(0, 1), 2, ended(alone=True), 0.0),
        lambda: restores.judge(rank(0, 1), 3, ended(StorageFailed("slow")), 0.0),
        lambda: restores.judge(rank(0, 1), 4, ILL, 0.0),
        lambda: restores.moved_on(rank(0, 1)),
        lambda: restores.answered(rank(0, 1), 7, None, named=False),
        lambda: restores.gone(rank(0, 1)),
    ]
    for turn, end in enumerate(ends, 1):
        restores.answered(rank(0, 1), turn, 500, named=False)
        assert restores.under_way
        end()
        assert not restores.under_way

"""The name that the ranks of a launch share."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from holdfast.config import LAUNCHERS, Launcher
from holdfast.launch import StartedRanks, alone, announce, answer_of_rank_0, current
from holdfast_formats.errors import DeadlineExceeded, InvalidRequest
from holdfast_formats.layout.mesh import Mesh


@pytest.fixture(autouse=True)
def stated(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One of two ranks, of a launch that the environment names."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("HOLDFAST_LAUNCH", "job-7")
    return monkeypatch


def test_the_environment_names_the_launch(stated: pytest.MonkeyPatch) -> None:
    """All ranks have the same name, also in one process, and every further checkpointer of a run has the next."""
    first = [current("named")]
    second = [current("named")]
    stated.setenv("RANK", "1")
    first.append(current("named"))
    second.append(current("named"))
    assert [rank.rank for rank in first] == [0, 1]
    assert first[0].name == first[1].name != second[0].name == second[1].name
    assert first[0].name.startswith("job-7/")


def test_a_restart_under_the_same_name_is_another_launch(stated: pytest.MonkeyPatch) -> None:
    """torchrun starts the ranks again in the environment that the job had; what they construct is counted anew."""
    names = []
    for count in ("0", "0", "1"):
        stated.setattr("holdfast.launch._constructed", defaultdict(itertools.count))
        stated.setenv("TORCHELASTIC_RESTART_COUNT", count)
        names.append(current("restarted").name)
    assert names[0] == names[1] != names[2]


def test_ranks_without_a_name_are_told_of_the_variable(stated: pytest.MonkeyPatch) -> None:
    """Several ranks, no process group, no run id: the error says what to do."""
    stated.delenv("HOLDFAST_LAUNCH")
    stated.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(InvalidRequest, match="no launch ID in common") as caught:
        current("unnamed")
    assert "HOLDFAST_LAUNCH" in caught.value.hint


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_processes_of_another_launcher_are_not_taken_for_single_ones(launcher: Launcher, stated: pytest.MonkeyPatch) -> None:
    """Each would be rank 0 of 1, also under the name of a launch: the error names what to set, and once it is set the
    process has its place.
    """
    stated.delenv("RANK")
    stated.delenv("WORLD_SIZE")
    for name, value in ((launcher.rank, "1"), (launcher.world, "4"), (launcher.local_world, "2")):
        if name is not None:
            stated.setenv(name, value)
    with pytest.raises(InvalidRequest, match="has started 4 processes") as refused:
        current("placed")
    assert f"RANK=${launcher.rank}, WORLD_SIZE=${launcher.world} and HOLDFAST_LAUNCH" in refused.value.hint
    stated.setenv("RANK", "1")
    stated.setenv("WORLD_SIZE", "4")
    placed = current("placed")
    assert (placed.rank, placed.world, placed.peers) == (1, 4, 4 if launcher.local_world is None else 2)
    stated.setenv("RANK", "0")
    stated.setenv("WORLD_SIZE", "1")  # each trains a run of its own
    assert current("placed")[:2] == (0, 1)


def test_one_process_of_another_launcher_is_a_single_one(stated: pytest.MonkeyPatch) -> None:
    """`srun python train.py` with one task, and the batch script of a job that has more."""
    stated.delenv("RANK")
    stated.delenv("WORLD_SIZE")
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        stated.setenv(name, "1")
    stated.setenv("SLURM_NTASKS", "8")
    stated.setenv("SLURM_PROCID", "0")
    assert current("single")[:2] == (0, 1)


def test_one_rank_alone_is_a_launch_of_its_own(stated: pytest.MonkeyPatch) -> None:
    """Whatever the environment says, even nonsense; only within the block, also if it ends with an exception."""
    stated.setenv("RANK", "1")
    stated.setenv("LOCAL_WORLD_SIZE", "2")
    with alone():
        first, second = current("lone"), current("lone")
        stated.setenv("WORLD_SIZE", "many")
        third = current("lone")
    assert {(one.rank, one.world, one.peers) for one in (first, second, third)} == {(0, 1, 1)}
    assert len({first.name, second.name, third.name}) == 3 and not any("job-7" in one.name for one in (first, second))
    stated.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="mine"), alone():
        raise ValueError("mine")
    assert current("lone")[:2] == (1, 2)


def test_announced_ranks_agree_on_a_name_and_on_answers_through_their_store(stated: pytest.MonkeyPatch) -> None:
    """A framework other than torch.distributed has started them: they count, whatever the environment says."""
    stated.delenv("HOLDFAST_LAUNCH")
    texts: dict[str, str] = {}

    def take(key: str, wait_s: float) -> str:
        if key not in texts:
            raise DeadlineExceeded(f"no {key} within {wait_s:.0f} s")
        return texts[key]

    launches, answers = [], []
    for rank in range(2):  # what two processes do
        stated.setattr("holdfast.launch._announced", [])
        stated.setattr("holdfast.launch._constructed", defaultdict(itertools.count))
        announce(StartedRanks(rank, 2, texts.__setitem__, take, Mesh(tp=2)))
        launches.append(current("announced"))
        answers.append(answer_of_rank_0("newest", lambda: [7], 1.0))
    assert [launch[:2] for launch in launches] == [(0, 2), (1, 2)]
    assert launches[0].name == launches[1].name
    assert {launch.mesh for launch in launches} == {Mesh(tp=2)}
    assert answers == [[7], [7]]
    with pytest.raises(DeadlineExceeded, match="has not constructed this checkpointer"):
        current("that rank 0 never constructs")
    with pytest.raises(DeadlineExceeded, match="has not answered 'oldest' within 1 s"):
        answer_of_rank_0("oldest", lambda: [1], 1.0)

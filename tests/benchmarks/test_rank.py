"""A case as one rank runs it: the check finds what was not staged, and what does not come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness import joined
from benchmarks.peers import PEERS, Spec
from benchmarks.rank import FIRST, Result, Task, run

BROKEN = {
    "broken": Spec("broken", "tests.benchmarks.broken_peer", "broken", background=True, syncs=True),
    "fenced": Spec("fenced", "tests.benchmarks.broken_peer", "fenced", "fenced", background=True, syncs=True),
}
TENSORS = 40


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "data").mkdir()
    return Task("torch-save", "save", str(tmp_path / "data"), 1, 7, tensors=TENSORS, kinds=(FIRST,), checks=(FIRST,))


def save(task: Task, tmp_path: Path, peer: str, specs: dict[str, Spec]) -> Result:
    return run(task._replace(peer=peer), tmp_path, 0, 1, specs)


def test_a_peer_that_does_not_copy_is_found_out(task: Task, tmp_path: Path) -> None:
    """Every tensor is changed the moment the trainer may go on, so what is written later is wrong, every one of it."""
    result = save(task, tmp_path, "broken", BROKEN)
    assert len(result.wrong["first save"]) == TENSORS
    assert result.checked == TENSORS


@pytest.mark.parametrize(("peer", "specs"), [("torch-save", dict(PEERS)), ("fenced", BROKEN)])
def test_a_peer_that_copies_in_time_passes(task: Task, tmp_path: Path, peer: str, specs: dict[str, Spec]) -> None:
    """Before save() returns or before the fence opens: both are in time."""
    result = save(task, tmp_path, peer, specs)
    assert result.wrong == {}
    assert set(result.samples) == {"bytes", "first.save", "first.staged", "first.durable"}


def test_a_damaged_file_is_found_by_loading(task: Task, tmp_path: Path) -> None:
    """One byte of one tensor is enough, and the tensor is named."""
    save(task, tmp_path, "safetensors", dict(PEERS))
    path = tmp_path / "data" / "step-1" / "rank-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = run(task._replace(peer="safetensors", phase="load"), tmp_path, 0, 1)
    assert result.wrong and all(len(names) == 1 for names in result.wrong.values())


def test_two_ranks_load_what_one_saved(task: Task, tmp_path: Path) -> None:
    """Sliced by hand: each of the two finds its own half right, without asking the other."""
    save(task, tmp_path, "safetensors", dict(PEERS))
    for rank in range(2):
        result = run(task._replace(peer="safetensors", phase="reshard"), tmp_path, rank, 2)
        assert result.wrong == {}
        assert result.checked == 3 * TENSORS


def test_the_slowest_rank_counts() -> None:
    """Times are the slowest rank's, memory and bytes everybody's, and nobody's errors get lost."""
    ranks = [
        {"samples": {"warm.save": [0.1, 0.4], "memory": [10]}, "wrong": {}, "checked": 3},
        {"samples": {"warm.save": [0.2, 0.3], "memory": [20]}, "wrong": {"first save": ["a"]}, "checked": 3},
    ]
    assert joined(ranks) == {
        "samples": {"warm.save": [0.2, 0.4], "memory": [30]},
        "wrong": {"first save, rank 1": ["a"]},
        "checked": 6,
    }

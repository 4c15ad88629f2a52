"""Mutated pickles and torch files: each is read or refused by name, nothing runs, and a process of 256 MiB is enough."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from . import pickle_seeds
from .pickle_bombs import BOMBS
from .pickle_worker import InMemory, read_one

MEMORY_BYTES_MAX = 256 * 2**20
WORKERS = 2
SOME, MANY = 600, 100_000


def _search(directory: Path, count: int) -> dict[str, int]:
    """Read so many mutations in processes of their own; how often what came out."""
    pickle_seeds.write(directory)
    command = [sys.executable, "-m", "tests.fuzz.pickle_worker"]
    workers = [
        subprocess.Popen(
            [*command, str(seed), str(count // WORKERS), str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for seed in range(WORKERS)
    ]
    total: dict[str, int] = {}
    for worker in workers:
        out, err = worker.communicate()
        assert worker.returncode == 0, err[-3000:]
        found = json.loads(out)
        assert found.pop("peak") < MEMORY_BYTES_MAX
        for kind, times in found.items():
            total[kind] = total.get(kind, 0) + times
    return total


def test_some_mutations(tmp_path: Path) -> None:
    """A few, as a sample of what follows: they come far enough to be read, and to be refused for every reason."""
    found = _search(tmp_path, SOME)
    assert sum(found.values()) == SOME
    assert found["read"] and found["StateMismatch"] and found["CorruptManifest"]


@pytest.mark.crash_slow
def test_many_mutations(tmp_path: Path) -> None:
    """100 000 of them."""
    assert sum(_search(tmp_path, MANY).values()) == MANY


@pytest.mark.parametrize(
    "name", ["doubling", "doubling-key", "itself", "itself-in-dict", "itself-by-tuple", "marks", "memo-far"]
)
def test_small_bombs(name: str) -> None:
    """Values that contain themselves, or stand for more than there is memory, are refused at once."""
    assert read_one(InMemory(BOMBS[name]()), False) == "StateMismatch"


@pytest.mark.crash_slow
@pytest.mark.parametrize("name", sorted(BOMBS))
def test_bombs(tmp_path: Path, name: str) -> None:
    """Megabytes made to need all memory or time: a process of 256 MiB ends with a refusal, or reads them."""
    (tmp_path / "f").write_bytes(BOMBS[name]())
    command = [sys.executable, "-m", "tests.fuzz.pickle_bombs", str(tmp_path / "f")]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert found.returncode == 0, found.stderr[-3000:]
    assert int(found.stdout.split()[1]) < MEMORY_BYTES_MAX

"""Ranks and daemons die while one rank stages what several hold: no step is lost, torn or mixed, and memory restores all."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.read.directory_root import committed_steps
from holdfast.read.root_directory import open_checkpoint
from tests.crash.launches import holders, kill_all, started
from tests.crash.sparing_rank import SIDE, WEIGHTS
from tests.daemons import RunningDaemon, wait_until
from tests.forked import Forked

RUN, WORLD = "r", 2
_launches = itertools.count()


class Launch:
    """Both ranks, and what each has said."""

    def __init__(self, daemon: RunningDaemon) -> None:
        launch = f"launch-{next(_launches)}"
        self.said: list[list[str]] = [[] for _ in range(WORLD)]
        self.processes, self._readers = [], []
        for rank in range(WORLD):
            words = ["-m", "tests.crash.sparing_rank", daemon.socket, RUN, rank, WORLD, launch]
            self.processes.append(Forked(words, talks=True))
            started.append(self.processes[-1])
            self._readers.append(threading.Thread(target=self._read, args=(rank,), daemon=True))
            self._readers[-1].start()

    def _read(self, rank: int) -> None:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        for line in stdout:
            self.said[rank].append(line.strip())

    def tell(self, line: str, *ranks: int) -> None:
        for rank in ranks or range(WORLD):
            stdin = self.processes[rank].stdin
            assert stdin is not None
            stdin.write(f"{line}\n")
            stdin.flush()

    def hear(self, line: str, *ranks: int) -> list[str]:
        """Wait for a line that begins so; what each of these ranks has said after it."""
        heard = []
        for rank in ranks or range(WORLD):

            def found(rank: int = rank) -> list[str]:
                return [said for said in self.said[rank] if f"{said} ".startswith(f"{line} ")]

            wait_until(lambda found=found, rank=rank: found() or self.processes[rank].poll() is not None)
            assert found(), (line, self.said)
            heard.append(found()[-1].removeprefix(line).strip())
        return heard

    def save(self, step: int) -> None:
        self.tell(f"save {step}")
        self.hear(f"committed {step}")

    def kill(self, *ranks: int) -> None:
        for rank in ranks or range(WORLD):
            process = self.processes[rank]
            process.kill()
            process.wait()
            self._readers[rank].join()
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()


def serve(root: Path) -> RunningDaemon:
    daemon = RunningDaemon(root)
    started.append(daemon.process)
    return daemon


@pytest.fixture
def root(tmp_path: Path):
    yield tmp_path / "root"
    kill_all()
    wait_until(lambda: holders(tmp_path) == [])


def begun(daemon: RunningDaemon) -> Launch:
    """A launch whose ranks stage weights for each other."""
    launch = Launch(daemon)
    launch.save(1)
    launch.save(2)
    launch.tell("spared")
    spared = [int(size) for size in launch.hear("spared")]
    assert min(spared) > 0 and sum(spared) > (WEIGHTS - 1) * SIDE * SIDE * 4
    return launch


def check(root: Path, *steps: int) -> None:
    """These steps are checkpoints, whole, each of one step."""
    assert set(committed_steps(root, RUN)) == set(steps)
    for step in steps:
        with open_checkpoint(root, None, RUN, step) as reader:
            assert reader.verify() == []
            assert all((reader.read("model", f"w{number}") == step).all() for number in range(WEIGHTS))
            moments = reader.read("extra", "moments/m")
            assert all((moments[rank * SIDE : (rank + 1) * SIDE] == step + rank).all() for rank in range(WORLD))


def restored(daemon: RunningDaemon, step: int) -> Launch:
    """The next launch, which restores this step from memory, on every rank."""
    launch = Launch(daemon)
    launch.tell("restore")
    assert launch.hear(f"restored {step}") == ["slot"] * WORLD, launch.said
    return launch


@pytest.mark.parametrize("victim", range(WORLD))
def test_a_rank_dies_in_the_middle_of_a_save(root: Path, victim: int) -> None:
    """Whichever rank it is, the save has all of its tensors or does not exist; its predecessor is restored from memory."""
    daemon = serve(root)
    launch = begun(daemon)
    launch.tell("save 3", 1 - victim)
    launch.hear("staged 3", 1 - victim)
    launch.tell("save 3!", victim)
    launch.hear("sealing 3", victim)
    launch.kill(victim)
    launch.hear("failed 3", 1 - victim)
    launch.kill(1 - victim)
    check(root, 1, 2)
    after = Launch(daemon)
    after.tell("restore")
    after.hear("restored 2")
    after.save(4)
    after.save(5)
    after.kill()
    check(root, 1, 2, 4, 5)
    assert daemon.stop() == 0


@pytest.mark.parametrize("told", [False, True], ids=["nobody-told", "all-told"])
def test_everybody_dies_after_the_seals(root: Path, told: bool) -> None:
    """The next daemon commits it out of both slots, and the next launch restores it from them."""
    daemon = serve(root)
    launch = begun(daemon)
    launch.tell("save 3!")
    launch.hear("sealing 3")
    if not told:
        daemon.freeze()
    launch.tell("go")
    launch.hear("staged 3" if told else "asking 3")
    os.kill(daemon.process.pid, signal.SIGKILL)
    launch.kill()
    daemon.process.wait()
    daemon = serve(root)
    wait_until(lambda: 3 in committed_steps(root, RUN))
    check(root, 1, 2, 3)
    after = restored(daemon, 3)
    after.save(4)
    after.save(5)
    after.kill()
    check(root, 1, 2, 3, 4, 5)
    assert daemon.stop() == 0


def test_the_daemon_dies_and_the_ranks_go_on(root: Path) -> None:
    """What was staged is committed by the next daemon, which is told nothing of who stages what; saves go on as before."""
    daemon = serve(root)
    launch = begun(daemon)
    launch.tell("save 3")
    launch.hear("staged 3")
    daemon.kill()
    daemon = serve(root)
    launch.hear("committed 3")
    launch.save(4)
    launch.save(5)
    launch.tell("spared")
    wait_until(lambda: all(sum("spared" in line for line in said) == 2 for said in launch.said))
    assert all(int(spared) > 0 for spared in launch.hear("spared"))
    check(root, 1, 2, 3, 4, 5)
    launch.kill()
    restored(daemon, 5).kill()
    assert daemon.stop() == 0

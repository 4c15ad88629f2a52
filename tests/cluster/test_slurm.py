"""The Slurm script, with stand-ins for Slurm's own commands: the job ends in order, however it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_service.control.database.database import Database
from holdfast_service.wings.cluster.membership import members
from tests.daemons import free_port, wait_until
from tests.databases import Postgres
from tests.regressions.test_many_daemons import steps

pytestmark = pytest.mark.engine
SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "train.sbatch"
HERE = Path(__file__).parent
NODES = 2


class Job:
    """A job of two nodes, as Slurm would start its batch script."""

    def __init__(self, directory: Path, catalog: str, restarts: int, *arguments: str) -> None:
        self.root, self.calls, self.output = directory / "root", directory / "calls", directory / f"output-{restarts}"
        commands = directory / "commands"
        commands.mkdir(exist_ok=True)
        stands_for = {name: f"{HERE / 'slurm_commands.py'} {name}" for name in ("srun", "scontrol")}
        stands_for |= {
            "holdfast": f"{Path(sys.executable).with_name('holdfast')}",
            "torchrun": "-m torch.distributed.run",
        }  # of this very environment
        for name, words in stands_for.items():
            (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            (commands / name).chmod(0o755)
        environment = os.environ | {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "HOLDFAST_ROOT": str(self.root),
            "HOLDFAST_CATALOG": catalog,
            "RANKS_PER_NODE": "1",
            "RENDEZVOUS_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": "77",
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURM_JOB_NUM_NODES": str(NODES),
            "SLURM_JOB_NODELIST": "n[0-1]",
            "STAND_IN_NODES": str(directory / "nodes"),
            "STAND_IN_ADDRESSES": ",".join(f"127.0.0.1:{free_port()}" for _ in range(NODES)),
            "STAND_IN_CALLS": str(self.calls),
        }
        with open(self.output, "wb") as output:
            command = ["bash", str(SCRIPT), *arguments]
            self.shell = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    @property
    def has_ended(self) -> bool:
        return self.shell.poll() is not None

    def end(self) -> str:
        """Wait until the script has ended; what it said."""
        status = self.shell.wait(300)
        said = self.output.read_text()
        assert status == 0, said
        return said


@pytest.fixture
def catalog(postgres: Postgres) -> Iterator[str]:
    url = postgres.take()
    yield url
    postgres.give_back(url)


def sealed(journal: Path) -> int:
    """The newest step that all ranks have sealed."""
    return min(max(rank, default=0) for rank in noted(journal, "sealed"))


def test_a_job_that_is_ended_leaves_its_last_save_committed(tmp_path: Path, catalog: str) -> None:
    """At the time limit it is queued again, and goes on from the last save that all ranks had sealed; stopped for good, it
    is not queued again. Each time all daemons have said goodbye.
    """
    (tmp_path / "nodes").mkdir()
    journal = tmp_path / "journal"
    training = (str(HERE / "slurm_training.py"), str(journal))
    for restarts, number, requeued in ((0, signal.SIGUSR1, 1), (1, signal.SIGTERM, 1)):
        before = sealed(journal)
        job = Job(tmp_path, catalog, restarts, *training)
        try:
            wait_until(lambda before=before, job=job: sealed(journal) > before + 3 or job.has_ended, 300)
        finally:
            job.shell.send_signal(number)  # as `--signal=B:USR1@600` and `scancel --batch --signal=TERM` do
            said = job.end()
        assert sealed(journal) > before + 3, said
        assert steps(job.root, "slurm")[-1] >= sealed(journal), said
        assert job.calls.read_text().splitlines() == ["requeue 77"] * requeued, said
        assert gone(catalog) == {"n0": "stopped", "n1": "stopped"}, said
    restored = [line for line in journal.with_suffix(".0").read_text().splitlines() if line.startswith("restored")]
    assert restored[0] == "restored 0" and int(restored[1].split()[1]) >= 3


def noted(journal: Path, word: str) -> list[list[int]]:
    """The steps that each rank has noted with this word."""
    paths = [journal.with_suffix(f".{rank}") for rank in range(NODES)]
    lines = [path.read_text().splitlines() if path.exists() else [] for path in paths]
    return [[int(line.split()[1]) for line in said if line.startswith(word)] for said in lines]


def test_ranks_that_handle_preemption_save_the_step_at_which_they_stop(tmp_path: Path, catalog: str) -> None:
    """Ten minutes before the limit SIGTERM reaches every rank through srun and torchrun: they agree on a step and save it.
    The job is queued again, and its next start goes on from there.
    """
    (tmp_path / "nodes").mkdir()
    journal = tmp_path / "journal"
    training = (str(HERE / "slurm_training.py"), str(journal), "on-preemption")
    for restarts in (0, 1):
        job = Job(tmp_path, catalog, restarts, *training)
        try:
            wait_until(
                lambda job=job, n=restarts: min(map(len, noted(journal, "trained"))) > 8 * (n + 1) or job.has_ended, 300
            )
        finally:
            job.shell.send_signal(signal.SIGUSR1)
            said = job.end()
        first, second = noted(journal, "stopped")
        assert len(first) == restarts + 1 and first == second, said
        assert steps(job.root, "slurm")[-1] == first[-1], said
        assert job.calls.read_text().splitlines() == ["requeue 77"] * (restarts + 1), said
    assert [rank[1] for rank in noted(journal, "restored")] == [first[0]] * NODES


def test_a_training_that_fails_is_queued_again_only_so_often(tmp_path: Path, catalog: str) -> None:
    """One that fails at once does not pass for one that is done."""
    (tmp_path / "nodes").mkdir()
    assert "status 1" in Job(tmp_path, catalog, 0, str(tmp_path / "nothing.py")).end()
    last = Job(tmp_path, catalog, 20, str(tmp_path / "nothing.py"))
    assert last.shell.wait(300) == 1 and "not queued again" in last.output.read_text()
    assert last.calls.read_text().splitlines() == ["requeue 77"]


def gone(catalog: str) -> dict[str, str]:
    database = Database.open(catalog)
    try:
        with database.read() as session:
            return {member.name: member.state for member in members(session)}
    finally:
        database.close()

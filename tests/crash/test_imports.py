"""The service is killed in the middle of imports: each goes on at the next start, and repeats one file at most."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast.read.root_directory import open_checkpoint
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import DaemonGone
from holdfast_formats.rest.jobs import ImportJob
from holdfast_formats.rest.operations import Job
from tests.crash import ledger
from tests.daemons import free_port, wait_until
from tests.forked import Forked

LANE = "service killed in an import"
RNG = np.random.default_rng(11)
ARRAYS = {f"layers.{number}.weight": RNG.standard_normal((100, 200)).astype(np.float32) for number in range(6)}


class ImportingService:
    """A service that dies at a chosen act of its jobs, and those that take its place."""

    program = "tests.crash.importing_daemon"

    def __init__(self, directory: Path) -> None:
        self.root, self.log, self._place = directory / "root", directory / "acts", directory / "place"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.process: Forked | None = None

    def __enter__(self) -> ImportingService:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def start(self) -> Api:
        self.launch()
        wait_until(self.answers)
        return Api(self.url)

    def launch(self) -> None:
        """Start a process, which may die at once."""
        where = ["--root", str(self.root), "--socket", f"{self.root}.sock", "--listen", f"127.0.0.1:{self._port}"]
        flags = [*where, "--export-root", str(self._place), "--loopback-open"]
        with open(f"{self.root}.log", "ab") as log:
            self.process = Forked(["-m", self.program, self.log, *flags], output=log.fileno(), kind="daemon")

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, Path(f"{self.root}.log").read_text()
        try:
            with Api(self.url) as api:
                api.nodes()
        except DaemonGone:
            return False
        return True

    def restarted(self) -> Api:
        """Wait for the death, and start it again."""
        assert self.process is not None and self.process.wait(60) == -9
        return self.start()

    @property
    def stopped(self) -> bool:
        """Whether it has got to the act before which it stops itself."""
        assert self.process is not None
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def acts(self) -> list[str]:
        return self.log.read_text().splitlines()


def done(api: Api, job: Job) -> Job:
    while (found := api.job(job.id, 5)).state in ("queued", "running"):
        pass
    assert found.state == "done", found
    return found


def check_sound(root: Path, step: int) -> None:
    with open_checkpoint(root, None, "mine", step) as reader:
        assert reader.verify() == []
        for name, array in ARRAYS.items():
            assert np.array_equal(reader.read("model", name), array)


def wanted(step: int) -> ImportJob:
    return ImportJob(run="mine", step=step, arguments={"from": "model"})


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.crash_slow)])
def test_killed_in_an_import(tmp_path: Path, kills: int) -> None:
    """At acts all over it, the last one after the commit: after the restart the job is done, and the checkpoint sound."""
    source = tmp_path / "place" / "model"
    source.mkdir(parents=True)
    save_file(ARRAYS, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    with ImportingService(tmp_path) as service:
        api = service.start()
        done(api, api.submit_job(wanted(0)))
        acts = len(service.acts())
        for number in range(1, kills + 1):
            ledger.tried(LANE)
            point = 1 + number * (acts - 1) // kills  # the last one is the end of the job
            service.log.write_bytes(b"")
            Path(f"{service.log}.kill").write_text(str(point))
            job = api.submit_job(wanted(number))
            api.close()
            api = service.restarted()
            done(api, job)
            created = Counter(line for line in service.acts() if line.startswith("create ") and ".safetensors" in line)
            assert len(created) == len(ARRAYS) and sum(created.values()) - len(created) <= 1, (point, created)
            assert len(service.acts()) > point or number == kills
            check_sound(service.root, number)
            assert not os.listdir(service.root / "mine" / naming.STAGING)
            ledger.survived(LANE)
        api.close()

"""A service that dies at a chosen act of its jobs, and those that take its place."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

from holdfast.rest.api import Api
from holdfast_formats.errors import DaemonGone
from holdfast_formats.rest.operations import Job
from tests.daemons import free_port, wait_until
from tests.forked import Forked

JOB_S = 120.0  # a job that nothing goes on with fails its test


class JobService:
    """A service that dies at a chosen act of its jobs, and those that take its place."""

    program = "tests.crash.importing_daemon"

    def __init__(self, directory: Path) -> None:
        self.root, self.log, self.place = directory / "root", directory / "acts", directory / "place"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.process: Forked | None = None

    def __enter__(self) -> JobService:
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
        flags = [*where, "--export-root", str(self.place), "--loopback-open"]
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
        assert self.process is not None and self.process.wait(180) == -9
        return self.start()

    @property
    def stopped(self) -> bool:
        """Whether it has got to the act before which it stops itself."""
        assert self.process is not None
        return stopped(self.process.pid)

    def acts(self) -> list[str]:
        return self.log.read_text().splitlines()

    def created(self) -> Counter[str]:
        """How often each file with tensors or of a plan was begun."""
        return Counter(line for line in self.acts() if line.startswith("create "))

    def arm(self, act: int, how: str = "KILL") -> None:
        """Have something happen before an act of what is begun next."""
        self.log.write_bytes(b"")
        Path(f"{self.log}.kill").write_text(f"{act} {how}")

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


def done(api: Api, job: Job) -> Job:
    limit = time.monotonic() + JOB_S
    while (found := api.job(job.id, 5)).state in ("queued", "running") and time.monotonic() < limit:
        pass
    assert found.state == "done", found
    return found


def stopped(pid: int) -> bool:
    """Whether a process has stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

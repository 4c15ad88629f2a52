"""The demo's machines: each is a daemon of its own on the shared directory, and the ranks that it trains with."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from holdfast.demo.config import DAEMON_START_S_MAX
from holdfast.demo.processes import POLL_S, DemoFailed, LaunchedJob, answers, free_port, socket_path
from holdfast.rest.api import Api
from holdfast_formats.errors import CheckpointError
from holdfast_formats.rest.bodies import Node

from .database import free_port as any_port

STOP_S_MAX = 30.0


class Machine(NamedTuple):
    """A machine of the demo, as processes on this one: its daemon and its addresses."""

    name: str
    daemon: LaunchedJob
    url: str
    socket: Path

    def nodes(self) -> dict[str, Node]:
        """All nodes, as this one lists them; none while it does not answer."""
        try:
            with Api(self.url) as api:
                return {node.name: node for node in api.nodes()}
        except CheckpointError:
            return {}


class RanksOn(NamedTuple):
    machine: Machine
    ranks: int


@contextmanager
def machines(count: int, directory: Path, catalog: str) -> Iterator[list[Machine]]:
    """Machines whose daemons share the directory `data` and the catalog; their daemons end with the block."""
    made: list[Machine] = []
    try:
        for number in range(1, count + 1):
            made.append(_start(f"node-{number}", directory, catalog))
        yield made
    finally:
        for machine in made:
            stop(machine)


def _start(name: str, directory: Path, catalog: str) -> Machine:
    socket, address = socket_path(directory, name), f"127.0.0.1:{free_port()}"
    places = ["--root", str(directory / "data"), "--catalog", catalog, "--socket", str(socket), "--listen", address]
    command = [sys.executable, "-m", "holdfast_service", "--node", name, *places]
    log = directory / f"{name}.log"
    machine = Machine(name, LaunchedJob(command, log), f"http://{address}", socket)
    limit = time.monotonic() + DAEMON_START_S_MAX
    while not answers(machine.url):
        if machine.daemon.poll() is not None or time.monotonic() > limit:
            machine.daemon.kill()
            raise DemoFailed(f"the daemon of {name} did not start", log)
        time.sleep(POLL_S)
    return machine


def stop(machine: Machine) -> None:
    """Ask the daemon to end, so that it leaves the cluster regularly; kill it after a while."""
    if machine.daemon.poll() is None:
        os.kill(machine.daemon.pid, signal.SIGTERM)
        limit = time.monotonic() + STOP_S_MAX
        while machine.daemon.poll() is None and time.monotonic() < limit:
            time.sleep(POLL_S)
    machine.daemon.kill()


@contextmanager
def launched(shares: Sequence[RanksOn], log: Path, arguments: Sequence[str]) -> Iterator[list[LaunchedJob]]:
    """A launch of the trainer: torchrun on every machine, with its share of the ranks, killed after the block."""
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(any_port())]
    jobs: list[LaunchedJob] = []
    try:
        for number, (machine, ranks) in enumerate(shares):
            which = ["--nnodes", str(len(shares)), "--node-rank", str(number), "--nproc-per-node", str(ranks)]
            command = [sys.executable, "-m", "torch.distributed.run", *which, *meeting, "-m", "holdfast.demo.train"]
            jobs.append(LaunchedJob([*command, *arguments, "--socket", str(machine.socket)], log))
        yield jobs
    finally:
        for job in jobs:
            job.kill()

"""A real daemon with two real training runs that save all the time, one of them with a fault."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.daemons import running, wait_until

RUN, FAULTY = "tiny-llama", "tiny-llama-nan"
FAULT_AT = 100


class Live(NamedTuple):
    url: str
    root: Path

    def steps(self, run: str = RUN) -> list[int]:
        """Steps of the run's checkpoints, the newest first."""
        listed = httpx.get(f"{self.url}/v1/runs/{run}/checkpoints", trust_env=False).json()
        return [made["step"] for made in listed.get("items", [])]

    def has(self, path: str) -> bool:
        """Whether this service has such a part."""
        return httpx.get(f"{self.url}{path}", trust_env=False).status_code == 200


@contextmanager
def live(directory: Path, checkpoints: int = 4) -> Iterator[Live]:
    """Both runs, from the moment on at which each has some checkpoints."""
    with ExitStack() as stack:
        daemon = stack.enter_context(running(directory / "root", listen="127.0.0.1:0"))
        for pattern, most in (("tiny-*", 3 * 10**9), ("vision-*", 10**12)):
            httpx.put(f"{daemon.url}/v1/quotas/{pattern}", json={"quota_bytes": most}, trust_env=False).raise_for_status()
        for run, more in ((RUN, ()), (FAULTY, (str(FAULT_AT),))):
            command = [sys.executable, "-m", "tests.wings.console.training", str(daemon.socket), run, *more]
            stack.callback(_end, subprocess.Popen(command, cwd=Path(__file__).parents[3]))
        found = Live(daemon.url, daemon.root)
        wait_until(lambda: all(len(found.steps(run)) >= checkpoints for run in (RUN, FAULTY)), 300)
        wait_until(lambda: max(found.steps(FAULTY)) > FAULT_AT, 300)
        yield found


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(180)

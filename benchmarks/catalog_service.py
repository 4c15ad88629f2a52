"""What a large catalog's lists and pages take of a service as users start it, over HTTP, while two training runs save.

The daemon is a process of its own, and so are the trainers. How long garbage collections hold it up is noted beside.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.catalog_rows import Size, at, fill, name
from holdfast_formats import naming
from holdfast_service.control.database.database import Database
from tests.daemons import RunningDaemon, wait_until

SAVING = ("saving-1", "saving-2")
LATE = 0.95  # of the time that the catalog's checkpoints span
_PAUSES = Path(__file__).parent / "pauses"
_PROJECT = Path(__file__).parents[1]


class Answered(NamedTuple):
    """Milliseconds of one request with its body, and its length. `cpu` is the daemon's mean, saves meanwhile included."""

    name: str
    p50: float
    p99: float
    worst: float
    cpu: float
    bytes: int


class Asker:
    """One connection that is kept, and nothing but bytes: what is measured is the service and not its client."""

    def __init__(self, url: str) -> None:
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=60)

    def get(self, path: str) -> bytes:
        try:
            self._connection.request("GET", path)
            answer = self._connection.getresponse()
        except RemoteDisconnected:  # it was idle for too long
            self._connection.close()
            self._connection.request("GET", path)
            answer = self._connection.getresponse()
        body = answer.read()
        assert answer.status == 200, (path, answer.status, body[:200])
        return body

    def close(self) -> None:
        self._connection.close()


def requests(size: Size) -> dict[str, Callable[[], tuple[str, ...]]]:
    """The paths of each question; of a page those that it asks of the API."""

    def checkpoints(query: str = "") -> Callable[[], tuple[str, ...]]:
        return lambda: (f"/v1/runs/{run()}/checkpoints?limit=100{query}",)

    def run() -> str:
        return name(random.randrange(size.runs))

    def of_a_page() -> tuple[str, ...]:
        it = f"/v1/runs/{run()}"
        asked = (f"{it}/checkpoints?limit=25", f"{it}/checkpoints?limit=1000", f"/v1/rounds?run={it[9:]}&limit=1000")
        return (it, *asked, f"{it}/summary", f"{it}/retention")

    late = at(size.checkpoints * size.runs / 10 * LATE)
    return {
        "runs": lambda: ("/v1/runs?limit=100",),
        "runs, 1000 a page": lambda: ("/v1/runs?limit=1000",),
        "runs ?prefix": lambda: (f"/v1/runs?limit=100&prefix={run()[:-1]}",),
        "run": lambda: (f"/v1/runs/{run()}",),
        "checkpoints": checkpoints(),
        "checkpoints ?state=verified": checkpoints("&state=verified"),
        "checkpoints ?state=damaged": checkpoints("&state=damaged"),
        "checkpoints ?step_min&step_max": checkpoints("&step_min=10&step_max=60"),
        "checkpoints ?since": checkpoints(f"&since={late}"),
        "rounds": lambda: ("/v1/rounds?limit=100",),
        "rounds, 1000 a page": lambda: ("/v1/rounds?limit=1000",),
        "rounds ?run": lambda: (f"/v1/rounds?limit=100&run={run()}",),
        "rounds ?state=aborted": lambda: ("/v1/rounds?limit=100&state=aborted",),
        "rounds ?since": lambda: (f"/v1/rounds?limit=100&since={late}",),
        "events": lambda: ("/v1/events?limit=100",),
        "events ?run": lambda: (f"/v1/events?limit=100&run={run()}",),
        "all queries of a run's page": of_a_page,
        "a run's page, as HTML": lambda: (f"/runs/{run()}",),
        "the overview, as HTML": lambda: ("/",),
    }


def bench_service(catalog_url: str | None, size: Size) -> dict[str, Any]:
    """A daemon on the catalog, or on the SQLite file in its own root."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-service-")))
        root, pauses = directory / "root", directory / "pauses"
        with _environment(GC_PAUSES=str(pauses), PYTHONPATH=str(_PAUSES)):
            flags = () if catalog_url is None else ("--catalog", catalog_url)
            daemon = RunningDaemon(root, *flags, listen="127.0.0.1:0")
        stack.callback(daemon.stop)
        # Into a service that runs: its start makes the catalog agree with the directories, of which there are none.
        database = Database.open(catalog_url or f"sqlite:///{root / naming.CATALOG}")
        fill(database, size)
        database.close()
        asker = Asker(daemon.url)
        stack.callback(asker.close)
        for run in SAVING:
            stack.callback(_end, _trainer(daemon, run))
        wait_until(lambda: all(f'"{run}"'.encode() in asker.get("/v1/rounds?limit=10") for run in SAVING), 120)
        began = time.monotonic()
        found = [_ask(asker, daemon.process.pid, asked, size.repeats) for asked in requests(size).items()]
        seconds = time.monotonic() - began
        made = len([1 for run in SAVING for _ in root.glob(f"{run}/checkpoints/*")])
        return {
            "answers": [one._asdict() for one in found],
            "saved": made,
            "pauses": _read(pauses, began),
            "seconds": seconds,
        }


def _ask(asker: Asker, pid: int, question: tuple[str, Callable[[], tuple[str, ...]]], repeats: int) -> Answered:
    what, paths = question
    took, length, worked = [], 0, worked_ms(pid)
    for number in range(repeats + 1):
        asked = paths()
        began = time.perf_counter()
        length = sum(len(asker.get(path)) for path in asked)
        if number:  # the first one compiles what the others use again
            took.append((time.perf_counter() - began) * 1000)
    took.sort()
    cpu = (worked_ms(pid) - worked) / (repeats + 1)
    return Answered(what, took[len(took) // 2], took[min(int(repeats * 0.99), repeats - 1)], took[-1], cpu, length)


def worked_ms(pid: int) -> float:
    """Of the processor, by all threads of the process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * 1000 / os.sysconf("SC_CLK_TCK")


def _read(pauses: Path, since: float) -> dict[str, dict[str, float]]:
    """The collections since then, by generation: how many of a millisecond or more of the processor, in all, the longest."""
    found: dict[str, list[float]] = {}
    for line in pauses.read_text().splitlines() if pauses.exists() else ():
        generation, took_ms, moment = line.split()
        if float(moment) >= since:
            found.setdefault(generation, []).append(float(took_ms))
    return {name: {"times": len(all_ms), "sum_ms": sum(all_ms), "longest_ms": max(all_ms)} for name, all_ms in found.items()}


def _trainer(daemon: RunningDaemon, run: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.wings.console.training", str(daemon.socket), run]
    return subprocess.Popen(command, cwd=_PROJECT)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(30)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def show(found: dict[str, Any], bar_ms: float) -> None:
    print(f"  over HTTP, for {found['seconds']:.0f} s, in which {found['saved']} checkpoints were saved:")
    for one in found["answers"]:
        over = "" if one["p99"] < bar_ms else f"   over {bar_ms:.0f} ms"
        wall = f"{one['p50']:8.2f} ms{one['p99']:9.2f} ms p99{one['worst']:9.2f} ms worst"
        print(f"  {one['name']:34}{wall}{one['cpu']:8.2f} ms cpu{one['bytes'] / 1000:9.1f} kB{over}")
    for generation, pauses in sorted(found["pauses"].items()):
        told = "{times} of 1 ms or more, {sum_ms:.0f} ms in all, the longest {longest_ms:.1f} ms".format(**pauses)
        print(f"  collections of generation {generation}: {told}")

"""The service is killed at random while jobs run, events stream and saves commit (issue 6, bar 3).

Afterwards every job has ended, the stream has told every event once and in order over all starts, and no row of the catalog
contradicts the directories.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from holdfast.read.directory_root import committed_steps
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, DaemonGone
from holdfast_formats.rest import bodies
from holdfast_formats.rest.jobs import VerifyJob
from holdfast_formats.rest.operations import Gap, Job
from tests.checkpoints import build_root
from tests.crash import ledger
from tests.crash.launches import RUN, Ranks, check_sound
from tests.crash.points import Place, place
from tests.daemons import RunningDaemon, free_port, wait_until

__all__ = ["place"]

LANE = "service killed at random"
STEPS = (5, 10, 15)
SIZE = 300_007
RANDOM_KILLS = 20


class Service:
    """A daemon at one address, which others take the place of."""

    def __init__(self, place: Place) -> None:
        self.listen = f"127.0.0.1:{free_port()}"
        self.url = f"http://{self.listen}"
        self._root = place.root
        self.daemon = RunningDaemon(place.root, listen=self.listen)

    def serve_again(self) -> None:
        self.daemon = RunningDaemon(self._root, listen=self.listen)


class Watcher:
    """Follows the events of a service over all its lives, as `holdfast events --follow` does."""

    def __init__(self, url: str) -> None:
        self.ids: list[int] = []
        self.gaps: list[Gap] = []
        self._api = Api(url)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        wait_until(lambda: self.ids)  # from here on the stream is open, and mended when it breaks

    def _follow(self) -> None:
        with suppress(DaemonGone, RuntimeError):  # the end of the test: the service or the connection is closed
            for event in self._api.events(after=0, on_gap=self.gaps.append, patience_s=30):
                self.ids.append(event.id)

    def end(self, last: int) -> None:
        """Wait until the event of this id has been told."""
        wait_until(lambda: last in self.ids)
        self._api.close()


def tenaciously(act, *arguments):
    """What an operator's script would do: try again while the service is away."""
    until = time.monotonic() + 180
    while True:
        try:
            return act(*arguments)
        except DaemonGone:
            assert time.monotonic() < until
            time.sleep(0.05)


def ended(api: Api, job: Job) -> Job:
    until = time.monotonic() + 180
    while (found := tenaciously(api.job, job.id, 0.5)).state in ("queued", "running"):
        assert time.monotonic() < until, found
    return found


def check_rows(root: Path, api: Api) -> None:
    """No row contradicts the directories: checkpoints, rounds and jobs."""
    for run in api.runs():
        listed = {made.step: made for made in api.checkpoints(run.name)}
        assert set(listed) == set(committed_steps(root, run.name))
        rounds: list[bodies.Round] = list(api.rounds(run.name))
        last = {(made.step, made.attempt): made for made in reversed(rounds)}  # a step may have been tried before
        for (step, attempt), made in last.items():
            stands = step in listed and listed[step].attempt == attempt
            assert (made.state == "committed") == stands, made
        assert not [
            made for made in rounds if made.ended is None or (made.state == "committed" and made not in last.values())
        ]
    for job in api.jobs():
        assert job.state in ("done", "failed", "cancelled") and job.ended is not None, job
        assert (job.result is not None) == (job.state == "done")


def check_told(service: Service, watcher: Watcher) -> None:
    """Every event that is kept was told once and in order, over all the connections that it took."""
    with httpx.Client(base_url=service.url, trust_env=False) as http:
        kept: list[int] = []
        page: dict = {"next": None}
        while True:
            query = {"limit": 1000} | ({"cursor": page["next"]} if page["next"] else {})
            page = http.get("/v1/events", params=query).raise_for_status().json()
            kept += [event["id"] for event in page["items"]]
            if page["next"] is None:
                break
    kept.reverse()
    watcher.end(kept[-1])
    assert watcher.ids[: len(kept)] == kept
    assert watcher.gaps == []


@pytest.fixture
def service(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    build_root(place.root, {"tiny": STEPS})
    made = Service(place)
    yield made
    if made.daemon.process.poll() is None:
        made.daemon.stop()


def submitted(api: Api) -> list[Job]:
    return [tenaciously(api.submit_job, VerifyJob(run="tiny", step=step)) for step in STEPS]


@pytest.mark.crash_slow
def test_killed_at_random(service: Service, place: Place) -> None:
    """Again and again, while jobs are submitted and launches save without a pause."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    watcher = Watcher(service.url)
    jobs: list[Job] = []
    with Api(service.url) as api:
        first = 1
        for _ in range(RANDOM_KILLS):
            ledger.tried(LANE)
            ranks = Ranks(service.daemon.socket, ",".join(str(first + i) for i in range(200)), SIZE, place.root)
            wait_until(lambda ranks=ranks: all(ranks.said))
            jobs += submitted(api)
            time.sleep(chance.uniform(0.0, 1.0))
            service.daemon.kill()
            service.serve_again()
            jobs += submitted(api)
            ranks.end()
            first = max([0, *committed_steps(place.root, RUN)]) + 200
            ledger.survived(LANE)
        for job in jobs:
            found = ended(api, job)
            # Whoever ends three services has been given up; here nobody does it on purpose.
            assert found.state == "done" or (found.problem or {}).get("tries") == 3, found
        wait_until(lambda: all(made.ended for made in api.rounds(RUN)))
        check_rows(place.root, api)
        check_told(service, watcher)
    assert service.daemon.stop() == 0
    check_sound(place.root, committed_steps(place.root, RUN), SIZE)


def test_a_service_ends_though_streams_are_open(place: Place) -> None:
    """SIGTERM: a stream, a long poll and a job that is running end with it, in an orderly way and at once."""
    build_root(place.root, {"tiny": STEPS})
    service = Service(place)
    with Api(service.url) as api:
        job = api.submit_job(VerifyJob(run="tiny", step=STEPS[0]))
        assert ended(api, job).state == "done"
        lines: list[str] = []
        headers = {"Accept": "text/event-stream"}
        client = httpx.Client(base_url=service.url, trust_env=False, timeout=180)
        with client.stream("GET", "/v1/events", headers=headers, params={"after": 0}) as answer:
            stream = answer.iter_lines()
            while not any("daemon-started" in line for line in lines):
                lines.append(next(stream))
            assert service.daemon.stop() == 0
            lines += list(stream)
        client.close()
    log = service.daemon.log.read_text()
    assert "Traceback" not in log, log
    assert naming.DAEMON_FILE not in [path.name for path in place.root.iterdir()]
    with pytest.raises(CheckpointError), Api(service.url) as gone:
        gone.health()

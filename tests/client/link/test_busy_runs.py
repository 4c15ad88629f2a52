"""A run whose last job was killed is waited for, over either transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
import torch

from holdfast import Checkpointer
from holdfast.link import busy_runs, own_daemon
from holdfast_formats.errors import RunBusy
from holdfast_formats.rest.bodies import RankHello
from holdfast_formats.staging.wire import PROTOCOL
from tests.daemons import RunningDaemon, running


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """It takes a rank over HTTP for gone after two seconds without a word."""
    with running(tmp_path_factory.mktemp("root"), "--silence-max", "2", listen="127.0.0.1:0") as made:
        yield made


@pytest.mark.parametrize("transport", ["socket", "http"])
def test_who_follows_a_killed_distant_job_waits_for_its_silence(
    daemon: RunningDaemon, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the socket: a rank that spoke over HTTP a moment ago may be dead."""
    monkeypatch.setattr(busy_runs, "PAUSE_MAX_S", 0.2)
    monkeypatch.setattr(own_daemon, "socket_of", lambda api: None)
    run = f"killed-{transport}"
    hello = RankHello(protocol=PROTOCOL, run=run, rank=0, world=1, launch="one", process="dead")
    httpx.put(f"{daemon.url}/v1/ranks/{len(run):032x}", json=hello.model_dump(), trust_env=False).raise_for_status()
    with Checkpointer(run, {"w": torch.zeros(8)}, at=daemon.socket if transport == "socket" else daemon.url) as second:
        assert second.restore() == 0
        second.save(1, wait="durable")


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the client has slept, by a clock that goes on only then."""
    slept: list[float] = []
    monkeypatch.setattr(busy_runs.time, "sleep", slept.append)
    monkeypatch.setattr(busy_runs.time, "monotonic", lambda: 1000.0 + sum(slept))
    return slept


def refusing(refusals: int, retry_after_s: float) -> Callable[[], int]:
    """A hello that is refused so often; how often it was said."""
    said: list[float] = []

    def ask() -> int:
        said.append(retry_after_s)
        if len(said) <= refusals:
            raise RunBusy("busy", retry_after_s=retry_after_s)
        return len(said)

    return ask


def test_a_killed_distant_job_is_followed_after_its_silence(waited: list[float]) -> None:
    """What the dead job had sent may be heard late: the client asks again until the run is free."""
    assert busy_runs.until_free(refusing(6, 7.0)) == 7 and sum(waited) >= 25


def test_a_distant_job_that_lives_is_waited_for_so_long_and_no_longer(waited: list[float]) -> None:
    """The refusal says how long its ranks were waited for."""
    with pytest.raises(RunBusy, match=r"waited 6\d s for its ranks to disconnect"):
        busy_runs.until_free(refusing(10_000, 7.0))


def test_a_job_whose_process_lives_is_not_waited_for(waited: list[float]) -> None:
    with pytest.raises(RunBusy):
        busy_runs.until_free(refusing(10_000, 0.0))
    assert waited == []

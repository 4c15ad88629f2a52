"""A bucket that is away for `--away-s` seconds, as the tier of a root and as a root: what training feels, and what is said.

Ten minutes, with what was measured: pytest -m objects -s --away-s 600 tests/daemon/bucket/test_away.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
import torch

from holdfast import Checkpointer
from holdfast.rest.api import Api
from holdfast.tickets import SaveTicket
from holdfast_formats.errors import GenerationDropped, StorageFailed
from holdfast_formats.rest.measurements import Alert
from holdfast_formats.rest.replica_lags import ReplicaLag, told
from holdfast_service.wings.notify.alerts import REFUSES_S
from tests.daemon.bucket.test_bucket_root import metrics, served
from tests.daemon.bucket.test_tier import state_in, tiered
from tests.daemons import wait_until
from tests.kit.objects import TestBucket, seaweedfs, seaweedfs_bucket
from tests.kit.objects_proxy import SLOW_DOWN, FaultProxy, Stall, faulty

__all__ = ["seaweedfs", "seaweedfs_bucket"]

RUN = "llama"
BYTES = 8 * 2**20
SAVES_BEFORE = 8
SILENT_S = 60.0  # a request that hangs is known to fail by then
How = Literal["refuses connections", "hangs", "answers 503"]
objects = pytest.mark.objects


@pytest.fixture(autouse=True)
def settings(seaweedfs_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The settings by which this process and its daemons reach the test's bucket."""
    for key, value in seaweedfs_bucket.server.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))


@contextmanager
def away(proxy: FaultProxy, how: How) -> Iterator[None]:
    """The bucket is away for the length of the block."""
    if how == "refuses connections":
        proxy.refuse()
    else:
        proxy.choose = lambda request: Stall() if how == "hangs" else SLOW_DOWN
        proxy.reset()  # as of what was under way
    try:
        yield
    finally:
        if how == "refuses connections":
            proxy.accept()
        else:
            proxy.clear()


class Trainer:
    """Trains and saves a small state again and again. `stalls` are the seconds that each call of `save()` took."""

    def __init__(self, checkpointer: Checkpointer, model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        self._checkpointer, self._model, self._optimizer = checkpointer, model, optimizer
        self.step, self.stalls = 0, list[float]()

    def save(self) -> SaveTicket:
        self.step += 1
        self._optimizer.zero_grad()
        self._model(torch.randn(4, self._model.in_features)).square().mean().backward()
        self._optimizer.step()
        began = time.perf_counter()
        ticket = self._checkpointer.save(self.step)
        self.stalls.append(time.perf_counter() - began)
        return ticket

    def told(self, what: str, of: slice) -> str:
        taken = [1000 * one for one in self.stalls[of]]
        return f"{what}: {len(taken)} saves, stall median {statistics.median(taken):.2f} ms, longest {max(taken):.2f} ms"


@contextmanager
def training(socket: Path) -> Iterator[Trainer]:
    model = torch.nn.Linear(1024, BYTES // (3 * 4096), bias=False)  # of whose bytes the optimizer has two copies
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(RUN, {"model": model, "optimizer": optimizer}, at=str(socket)) as checkpointer:
        yield Trainer(checkpointer, model, optimizer)


def lag_of(api: Api) -> ReplicaLag:
    (node,) = api.nodes()
    (lag,) = node.lags
    return lag


def metric(api: Api, name: str) -> float:
    (line,) = (line for line in metrics(api).splitlines() if line.startswith(f'{name}{{tier="cloud"}}'))
    return float(line.rpartition(" ")[2])


def alerts(api: Api, code: str) -> list[str]:
    return [one.text for one in api.pages("/v1/alerts", Alert, {}) if one.code == code]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("refuses connections", marks=objects),
        pytest.param("hangs", marks=objects),
        "answers 503",
    ],
)
def test_as_a_tier(
    how: How, seaweedfs_bucket: TestBucket, tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training saves on, and its saves are committed in the root. Nodes, metrics and, once it lasts, an alert say how many
    checkpoints and bytes are missing and for how long; then the tier catches up.
    """
    away_s = float(pytestconfig.getoption("--away-s"))
    pause_s, before = min(max(away_s / 200, 0.2), 3.0), max(SAVES_BEFORE, int(away_s / 10))
    with faulty(seaweedfs_bucket.server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        with (
            tiered(tmp_path / "root", f"{seaweedfs_bucket.url}/{how.split()[0]}") as (daemon, api),
            training(daemon.socket) as trainer,
        ):
            for _ in range(before):
                trainer.save().result(180)
                time.sleep(pause_s)
            wait_until(lambda: state_in(api, before) == "present")
            assert (bucket := lag_of(api).bucket) is not None and bucket.failing == []
            with away(proxy, how):
                end, most, seen = time.monotonic() + away_s, lag_of(api), list[str]()
                while time.monotonic() < end:
                    trainer.save().result(180)
                    time.sleep(pause_s)
                    lag = lag_of(api)
                    most = max(most, lag, key=lambda one: one.missing_bytes or 0)
                    seen += [text for text in alerts(api, "replica-lost") if not seen]
                wait_until(lambda: (lag_of(api).missing or 0) > 0)
                most = max(most, lag_of(api), key=lambda one: one.missing_bytes or 0)
                wait_until(lambda: metric(api, "holdfast_replica_missing_bytes") > 0)
                assert metric(api, "holdfast_replica_lag_seconds") > 0
                assert most.missing and most.missing_bytes and most.missing_bytes >= BYTES / 2 and most.lag_s
                last = alerts(api, "replica-lost")
                if away_s > REFUSES_S + SILENT_S:
                    assert "have yet to be copied there" in last[0] and "the oldest for" in last[0]
                if how == "answers 503" or away_s > SILENT_S:
                    assert "the bucket fails" in told(lag_of(api)) or "cannot be reached since" in told(lag_of(api))
            back, missing = time.monotonic(), (most.missing or 0)
            wait_until(lambda: all(state_in(api, step) == "present" for step in range(1, trainer.step + 1)), 360)
            caught_up = time.monotonic() - back
            wait_until(lambda: lag_of(api).missing == 0)
            print(f"\n{how} for {away_s:.0f} s, as a tier")
            print(" ", trainer.told("before", slice(1, before)))
            print(" ", trainer.told("while it was away", slice(before, None)))
            print(f"  said at the end: {told(most)}")
            print(f"  alerts: first {seen[:1]}, last {last}")
            print(f"  {missing} checkpoints caught up in {caught_up:.1f} s")
    assert seaweedfs_bucket.uploads() == []


@pytest.mark.filterwarnings("ignore::holdfast.save_warning.SaveWarning")
@pytest.mark.parametrize("how", [pytest.param("hangs", marks=objects), "answers 503"])
def test_as_the_root(
    how: How, seaweedfs_bucket: TestBucket, tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves wait in their slots, and the policy drops others for them: both are said to wait for the bucket, since when, and
    with its last answer. A save that fails says the same; what was committed before stays, and later saves are committed.
    """
    away_s = float(pytestconfig.getoption("--away-s"))
    tickets, before = list[SaveTicket](), max(SAVES_BEFORE, int(away_s / 10))
    with faulty(seaweedfs_bucket.server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        with (
            served(tmp_path / "state", seaweedfs_bucket.url, listen="127.0.0.1:0") as daemon,
            Api(daemon.url) as api,
            training(daemon.socket) as trainer,
        ):
            for _ in range(before):
                trainer.save().result(180)
            assert _failing(api) == []
            with away(proxy, how):
                end = time.monotonic() + away_s
                while time.monotonic() < end:
                    tickets.append(trainer.save())
                    time.sleep(min(max(away_s / 200, 0.2), 3.0))
                if how == "answers 503" or away_s > SILENT_S:
                    wait_until(lambda: bool(_failing(api)))
                failing, last = _failing(api), alerts(api, "bucket-refuses")
                if away_s > REFUSES_S + SILENT_S:
                    assert last and "the bucket has not carried out a" in last[0]
            trainer.save().result(180)
            ended = [ticket for ticket in tickets if ticket.done]
            assert sorted(one.step for one in api.checkpoints(RUN))[:before] == [*range(1, before + 1)]
    dropped = [ticket.error for ticket in ended if isinstance(ticket.error, GenerationDropped)]
    failed = [ticket.error for ticket in ended if isinstance(ticket.error, StorageFailed)]
    said = [one.detail for one in dropped if "the bucket fails" in one.detail]
    print(f"\n{how} for {away_s:.0f} s, as the root")
    print(" ", trainer.told("while it was away", slice(before, -1)))
    print(f"  {len(dropped)} dropped, {len(failed)} failed; the status: {failing}; the alert: {last}")
    print(f"  the last drop: {said[-1:]}; the last failure: {[str(one) for one in failed[-1:]]}")
    assert dropped
    if how == "answers 503" or away_s > SILENT_S:
        assert failing and said and "since" in said[-1], [one.detail for one in dropped]
    for error in failed:
        assert "the bucket fails" in error.detail and "since" in error.detail


def _failing(api: Api) -> list[tuple[str, str, str]]:
    (node,) = api.nodes()
    assert node.bucket is not None
    return [(one.kind, one.answer, one.since) for one in node.bucket.failing]

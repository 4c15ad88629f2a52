"""Two nodes train two runs on one root, while daemons are killed and frozen, PostgreSQL is killed and frozen, and the runs
change places.

No save is lost or refused, what is restored is what was saved, no step of training is stalled, and in the end retention has
left what it was to leave.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter

import pytest
import torch

from holdfast import Checkpointer
from holdfast.rest.api import Api
from holdfast_formats.errors import CheckpointError
from tests.daemons import wait_until
from tests.regressions.test_many_daemons import Daemon, Site, site, steps

__all__ = ["site"]
pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow]

KEPT = 3
ELEMENTS = 200_000
STALL_MAX_S = 2.0  # of a save() whose daemon is gone: the ranks look for it again


class Training:
    """A trainer that is started again and again, at whichever node its run is by then."""

    def __init__(self, run: str, daemons: dict[str, Daemon], places: dict[str, str], seed: int) -> None:
        self.run, self._daemons, self._places, self._random = run, daemons, places, random.Random(seed)
        self.stop = threading.Event()
        self.committed: set[int] = set()
        self.refused: Counter[str] = Counter()
        self.starts = self.saves = 0
        self.longest_s = 0.0
        self.wrong: str | None = None
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def end(self) -> None:
        self.stop.set()
        self._thread.join(120)

    def _train(self) -> None:
        while not self.stop.is_set() and self.wrong is None:
            self.starts += 1
            try:
                self._launch()
            except CheckpointError as error:  # its daemon is being started
                self.refused[f"launch: {error.code}"] += 1
                time.sleep(0.2)

    def _launch(self) -> None:
        state = {"model": {"weight": torch.zeros(ELEMENTS)}}
        with Checkpointer(self.run, state, at=self._daemons[self._places[self.run]].socket, keep_last=KEPT) as checkpointer:
            step = checkpointer.restore() or 0
            newest = max(self.committed, default=0)
            if step < newest or not torch.all(state["model"]["weight"] == float(step)):
                self.wrong = f"{self.run} restored {step}, although {newest} was committed, or other values"
            while not self.stop.is_set() and self.wrong is None and self._random.random() > 0.02:
                step += 1
                state["model"]["weight"].fill_(float(step))
                began = time.monotonic()
                ticket = checkpointer.save(step)
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.saves += 1
                try:
                    ticket.result(timeout=60)
                    self.committed.add(step)
                except CheckpointError as error:
                    self.refused[f"save: {error.code}"] += 1


def test_nothing_is_lost_and_nobody_waits(site: Site, pytestconfig: pytest.Config) -> None:
    """For as long as the lane is told to go on."""
    seed = pytestconfig.getoption("--cluster-seed")
    chance = random.Random(seed)
    daemons = {name: site.start(name) for name in "ab"}
    places = {"one": "a", "two": "b"}
    trainings = [Training(run, daemons, places, seed + number) for number, run in enumerate(places)]
    limit = time.monotonic() + pytestconfig.getoption("--cluster-s")
    done: Counter[str] = Counter()
    try:
        while time.monotonic() < limit and not any(training.wrong for training in trainings):
            time.sleep(chance.uniform(0.5, 2))
            act = chance.choice(["kill", "kill", "freeze", "database killed", "database frozen", "change places"])
            done[act] += 1
            _act(act, chance, site, daemons, places)
    finally:
        for training in trainings:
            training.end()
    for training in trainings:
        print(f"\n{training.run}: {training.starts} launches, {training.saves} saves, {len(training.committed)} committed,")
        print(f"longest save() {training.longest_s:.3f} s, refused {dict(training.refused)}; {dict(done)}")
    assert [training.wrong for training in trainings] == [None, None]
    for training in trainings:
        assert len(training.committed) == training.saves and training.longest_s < STALL_MAX_S
        expected = sorted(training.committed)[-KEPT:]
        wait_until(lambda run=training.run, expected=expected: steps(site.root, run) == expected)
        for daemon in daemons.values():
            with Api(daemon.url) as api:
                assert [found.step for found in api.checkpoints(training.run)] == expected[::-1]


def _act(act: str, chance: random.Random, site: Site, daemons: dict[str, Daemon], places: dict[str, str]) -> None:
    name = chance.choice("ab")
    if act == "kill":
        daemons[name].kill()
        time.sleep(chance.uniform(0, 0.5))
        daemons[name] = site.start(name)
    elif act == "freeze":
        daemons[name].freeze()
        time.sleep(chance.uniform(0.5, 3))
        daemons[name].thaw()
    elif act == "database killed":
        site.postgres.stop()
        time.sleep(chance.uniform(0.2, 3))
        site.postgres.start()
    elif act == "database frozen":
        site.postgres.signal_all(signal.SIGSTOP)
        time.sleep(chance.uniform(0.5, 5))
        site.postgres.signal_all(signal.SIGCONT)
    else:
        places["one"], places["two"] = places["two"], places["one"]

"""The service is killed, or its disk is full, in the middle of thinning and compacting: at any moment the old checkpoint or
the new one is there, and the next start, or the next try, does the rest.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from holdfast.read.directory_root import committed_steps
from holdfast.read.root_directory import open_checkpoint
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import DaemonGone
from holdfast_formats.rest.operations import Event
from holdfast_formats.rest.retention import RetentionPolicy
from tests.checkpoints import Arrays, build_root, trained_arrays
from tests.crash import ledger
from tests.crash.disks import memory_disk
from tests.crash.job_service import JobService
from tests.crash.test_hostile import fill, needs_root
from tests.daemons import wait_until
from tests.in_memory import in_memory

KILLED, FULL = "service killed in a thinning", "disk full in a thinning"
STEPS = (5, 10, 15)
POLICY = RetentionPolicy(optim="int8", optim_full=1, keep_full=2)  # of three: a thin one, a compact one, the whole one
FORMS = ["thin", "compact", "whole"]
ERROR_MAX = 0.05
ARRAYS: Arrays = {
    group: {name: np.nan_to_num(array) if array.dtype == np.float32 else array for name, array in held.items()}
    for group, held in trained_arrays().items()  # what has NaN is not healthy, and makes none before it superfluous
}


class ThinningService(JobService):
    """A service to which something happens at a chosen act of thinning and compacting."""

    program = "tests.crash.thinning_daemon"

    def disarm(self) -> None:
        Path(f"{self.log}.kill").unlink(missing_ok=True)


def run_of(number: int) -> str:
    return f"run-{number}"


def acts_of_all(service: ThinningService) -> list[str]:
    """Start it and thin a run; the acts that this took."""
    run = add(service.root, 0)
    with service.start() as api:
        wait_until(lambda: verified(api, run))
        service.log.write_bytes(b"")
        begin(api, run)
        check_done(service, api, run)
    return service.acts()


def add(root: Path, number: int) -> str:
    """A run that nobody has thinned yet; its name."""
    build_root(root, {run_of(number): STEPS}, ARRAYS)
    return run_of(number)


def verified(api: Api, run: str) -> bool:
    """Whether all of a run is: nothing else is thinned."""
    return [one.verified for one in api.checkpoints(run)] == [True] * len(STEPS)


def begin(api: Api, run: str) -> None:
    """Set the policy once the run's checkpoints are verified; the service may die meanwhile."""
    wait_until(lambda: verified(api, run))
    with suppress(DaemonGone):
        retention.set_policy(api, run, POLICY, "*")


def told(service: ThinningService, run: str) -> bool:
    """Whether the log says that something of a run stays as it is, and what to do."""
    log = Path(f"{service.root}.log").read_text()
    return any(f"{run}@" in line and "stays as it is for now" in line and "free space" in line for line in log.splitlines())


def events(api: Api, run: str) -> list[Event]:
    """What was told of a run's thinning that had to wait."""
    asked = {"run": run, "kind": "thinning-failed", "limit": 10}
    return [Event(**one) for one in api.request("GET", "/v1/events", params=asked).json()["items"]]


def form(root: Path, run: str, step: int) -> str:
    """What stands there, whose bytes are proven, and whose values are those that were saved."""
    with open_checkpoint(root, None, run, step) as reader:
        assert reader.verify() == []
        made = reader.manifest
        for group in made.tensors:
            for name, saved in ARRAYS[group].items():
                found, small = reader.read(group, name), made.compacted
                one = None if small is None else small.tensors.get(group, {}).get(name)
                if one is None or one.coding == "low16":
                    assert found.tobytes() == saved.tobytes(), (group, name)
                else:
                    apart = np.linalg.norm(found.astype(np.float64) - saved) / np.linalg.norm(saved.astype(np.float64))
                    assert apart <= one.error * (1 + 1e-6) <= ERROR_MAX, (group, name)
        return "thin" if made.thinned else "compact" if made.compacted else "whole"


def check_between(root: Path, run: str) -> None:
    """Nobody serves the root: each checkpoint is the old one or the new one, and the newest is as it was."""
    assert sorted(committed_steps(root, run)) == list(STEPS)
    found = [form(root, run, step) for step in STEPS]
    assert all(one in ("whole", new) for one, new in zip(found, FORMS, strict=True)), found


def is_done(root: Path, run: str) -> bool:
    """Whether all is done, and nothing of it is left beside the checkpoints."""
    rooms = [root / run / room for room in (naming.STAGING, naming.TRASH)]
    return not any(os.listdir(room) for room in rooms if room.exists()) and forms(root, run) == FORMS


def forms(root: Path, run: str) -> list[str]:
    found = []
    for step in STEPS:
        with open_checkpoint(root, None, run, step) as reader:
            made = reader.manifest
        found.append("thin" if made.thinned else "compact" if made.compacted else "whole")
    return found


def check_done(service: ThinningService, api: Api, run: str) -> None:
    """All is done, proven, and listed as it is."""
    wait_until(lambda: is_done(service.root, run))
    assert [form(service.root, run, step) for step in STEPS] == FORMS

    def listed() -> list[str]:
        found = sorted(api.checkpoints(run), key=lambda one: one.step)
        return ["thin" if one.thinned else "compact" if one.compacted else "whole" for one in found]

    wait_until(lambda: listed() == FORMS)
    wait_until(lambda: verified(api, run))  # whoever died before it was listed has left it to be read once more


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: what a kill leaves asks nothing of a disk."""
    with in_memory() as directory:
        yield directory


@pytest.mark.crash_slow
@pytest.mark.parametrize("again", [False, True])
def test_killed_in_a_thinning(tmp_path: Path, again: bool) -> None:
    """At every act of it, and `again` at the same act of the next life. Whoever starts then finishes, and sweeps."""
    with ThinningService(tmp_path) as service:
        acts = len(acts_of_all(service))
        assert acts > 30 and service.process is not None
        service.process.kill()
        for number in range(1, acts + 1, 2 if again else 1):
            ledger.tried(KILLED)
            service.process.wait()
            run = add(service.root, number)
            api = service.start()
            service.arm(number)
            begin(api, run)
            api.close()
            assert service.process.wait(180) == -signal.SIGKILL
            check_between(service.root, run)
            if again:
                service.arm(number)
                service.launch()
                wait_until(lambda run=run: service.process.poll() is not None or is_done(service.root, run))
                service.process.kill()
                service.process.wait()
                check_between(service.root, run)
            service.disarm()
            with service.start() as api:
                check_done(service, api, run)
            ledger.survived(KILLED)
            service.process.kill()


@needs_root
@pytest.mark.crash_slow  # test_compactor.py has a disk without room
@pytest.mark.parametrize("tries", [2, 0])
def test_a_disk_that_is_full_in_a_thinning(tmp_path: Path, tries: int) -> None:
    """From an act of it on there is not one byte more, on a real file system: it is said, and done once there is room."""
    with memory_disk(tmp_path / "root", "160m"), ThinningService(tmp_path) as service:
        acts, filler = acts_of_all(service), service.root / "filler"
        numbers = [len(acts) * (2 * at + 1) // (2 * tries) for at in range(tries)] or range(1, len(acts) + 1, 2)
        assert service.process is not None
        service.process.kill()
        service.process.wait()
        for number in numbers:
            add(service.root, number)
        api, said = service.start(), 0
        for number in numbers:
            ledger.tried(FULL)
            run = run_of(number)
            wait_until(lambda run=run: verified(api, run))
            service.arm(number, "STOP")
            setting = threading.Thread(target=begin, args=(api, run))
            setting.start()
            wait_until(lambda: service.stopped)
            fill(filler)
            service.go_on()
            wait_until(lambda run=run: is_done(service.root, run) or told(service, run))
            assert all(one in ("whole", new) for one, new in zip(forms(service.root, run), FORMS, strict=True))
            filler.unlink()
            setting.join()
            check_done(service, api, run)
            if told(service, run):
                said += 1
                wait_until(lambda run=run: any("free space" in one.text for one in events(api, run)))
            ledger.survived(FULL)
        assert said
        api.close()

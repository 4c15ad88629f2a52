"""Two daemons meet thousands of faults: one whose root drains to a bucket, and one whose root is in a bucket.

Saves, drains, removals, repairs out of the tier, restores and kills, while requests fail at random. Nothing that was
committed is lost or handed over wrong, no file of a checkpoint is written twice with other bytes, and one sweep leaves
nothing else of checkpoints. The two are asked in turn: two threads of one process that each train are not what is tried.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast.rest import replicas
from holdfast.rest.api import Api
from holdfast_files.objects import client, commit_objects
from holdfast_files.objects.probe import HONOURED
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, Conflict, NoSuchCheckpoint
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage.objects.conditional_puts import ConditionalPuts
from holdfast_service.storage.objects.object_store import ObjectStore
from holdfast_service.storage.objects.uploads import Uploads
from tests.daemons import RunningDaemon, wait_until
from tests.kit import commands
from tests.kit.objects import TestBucket
from tests.kit.objects_proxy import PRECONDITION_FAILED, SLOW_DOWN, Fault, FaultProxy, Request, faulty
from tests.storage.objects.test_store_faults import Chance

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed.*:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::holdfast.SaveWarning"),
]

RUN, LONG_RUN = "run", "long"
QUICK = Path(__file__).parents[2] / "kit" / "quick"
FILE, COPY_S, PAUSE_S = "model.safetensors", 10.0, 0.1
SKEW_S, SLOW_BYTES_PER_S, STORM = 90.0, 4e6, 25


class Watch:
    """Chooses faults, and notes what is written to each data key: a second write has the same bytes."""

    def __init__(self, seed: int, every: float) -> None:
        self.chance: Chance | None = None
        self._seed, self._every, self._lies = seed, every, random.Random(seed)
        self._written: dict[tuple[str, str], str] = {}
        self.rewritten: list[str] = []

        self.faults = 0

    def begin(self) -> None:
        self.chance = Chance(self._seed, self._every, late=False)

    def __call__(self, request: Request) -> Fault | None:
        if request.kind in ("put", "part") and f"/{naming.DATA}/" in request.key:
            sums = [request.headers.get(name, "") for name in ("content-md5", "x-amz-checksum-crc32")]
            key, found = (request.key, request.query.get("partNumber", "")), " ".join(sums)
            if self._written.setdefault(key, found) != found:
                self.rewritten.append(request.key)
        if self.chance is None or naming.OWNER in request.key:
            return None
        fault = PRECONDITION_FAILED if request.conditional and self._lies.random() < 0.02 else self.chance(request)
        self.faults += fault is not None
        return fault


def state_of(run: str, step: int) -> dict[str, torch.nn.Module]:
    """A state that only this step has; of `LONG_RUN` with a file of two parts."""
    torch.manual_seed(step)
    return {"model": torch.nn.Linear(2200, 2200) if run == LONG_RUN else torch.nn.Linear(40, 30)}


def is_right(found: dict[str, torch.nn.Module], run: str, step: int) -> bool:
    return torch.equal(found["model"].weight, state_of(run, step)["model"].weight)


class Machine:
    """A daemon behind a proxy, and what may stand of each step that was saved: it, or nothing, or one of the two."""

    def __init__(self, name: str, bucket: TestBucket, proxy: FaultProxy, directory: Path, seed: int, every: float) -> None:
        self.name, self.bucket, self.proxy, self._directory = name, bucket, proxy, directory
        self.chance, self.watch = random.Random(seed), Watch(seed, every)
        proxy.choose = self.watch
        self.prefix = f"{bucket.url}/{name}"
        self.known: dict[tuple[str, int], set[bool]] = {}
        self.damaged = set[tuple[str, int]]()  # in the root
        self.counts, self._next = Counter[str](), 1
        self.daemon = self.start()

    def start(self) -> RunningDaemon:
        """Without faults, since a start that a bucket refuses ends, as it should."""
        pausing, self.watch.chance = self.watch.chance, None
        root, flags = self._directory / self.name, ["--tier", f"cloud={self.prefix}"]
        if self.name == "root":
            flags = ["--root", self.prefix, "--state", str(root)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(QUICK))
            patch.setenv("AWS_ENDPOINT_URL_S3", self.proxy.endpoint)
            made = RunningDaemon(root, *flags, listen="127.0.0.1:0")
        self.watch.chance = pausing
        return made

    def act(self) -> None:
        acts = {self.save: 8, self.restore: 4, self.remove: 3, self.repair: 3, self.kill: 1, self.weather: 1}
        (act,) = self.chance.choices([*acts], [*acts.values()])
        self.counts[act.__name__] += 1
        act()

    def save(self) -> None:
        run, step = (LONG_RUN if self.chance.random() < 0.15 else RUN), self._next
        self._next += 1
        try:
            with Checkpointer(run, state_of(run, step), at=str(self.daemon.socket)) as checkpointer:
                checkpointer.save(step, existing="replace").result(180)
            self.known[run, step] = {True}
            self._await_copy(run, step)
        except CheckpointError as error:
            self.counts[f"save: {error.code}"] += 1
            assert self.name == "root", "a save knows nothing of the tier"
            self.known[run, step] = {True, False}

    def restore(self) -> None:
        which = self._any()
        if which is None:
            return
        (run, step), found = which, state_of(which[0], 0)
        try:
            with Checkpointer(run, found, at=str(self.daemon.socket)) as checkpointer:
                assert checkpointer.restore(step) == step
        except CheckpointError as error:
            self.counts[f"restore: {error.code}"] += 1
            return
        assert is_right(found, run, step), which

    def remove(self) -> None:
        which = self._any()
        if which is None or which in self.damaged or len(self.known) < 4:
            return
        with Api(self.daemon.url) as api:
            try:
                api.remove(*which)
                self.known[which] = {False}
            except NoSuchCheckpoint:
                assert False in self.known[which], which
            except Conflict as error:  # such as of the newest one
                self.counts[f"remove: {error.code}"] += 1
            except CheckpointError as error:
                self.counts[f"remove: {error.code}"] += 1
                self.known[which].add(False)

    def repair(self) -> None:
        """A file of the root that drains has other bytes: it is made again from the copy."""
        which = self._any()
        if which is None or self.name == "root" or which in self.damaged or not self._is_present(*which):
            return
        path = self._directory / self.name / naming.checkpoint_path(*which)
        data = bytearray((path / FILE).read_bytes())
        data[-9] ^= 1
        (path / FILE).write_bytes(data)
        self.damaged.add(which)
        self._mend(which)

    def _mend(self, which: tuple[str, int]) -> None:
        done = commands.call("repair", f"{which[0]}@{which[1]}", "--url", self.daemon.url)
        self.counts[f"repair: {done.exit_code}"] += 1
        if done.exit_code == 0:
            self.damaged.discard(which)

    def kill(self) -> None:
        self.daemon.kill()
        self.daemon = self.start()

    def weather(self) -> None:
        self.proxy.skew_s = self.chance.choice([0.0, SKEW_S, -SKEW_S])
        self.proxy.bytes_per_s = self.chance.choice([None, None, SLOW_BYTES_PER_S])
        if self.chance.random() < 0.5:
            self.proxy.on(SLOW_DOWN, key=f"/{naming.DATA}/", times=STORM)

    def _any(self) -> tuple[str, int] | None:
        return self.chance.choice([*self.known]) if self.known else None

    def _await_copy(self, run: str, step: int) -> None:
        """Not for long: faults are met by drains, which are slower than saves."""
        until = time.monotonic() + self.chance.choice([0.0, COPY_S])
        while self.name != "root" and time.monotonic() < until and not self._is_present(run, step):
            time.sleep(PAUSE_S)

    def _is_present(self, run: str, step: int) -> bool:
        with Api(self.daemon.url) as api:
            try:
                return [one.state for one in replicas.of(api, run, step)] == ["present"]
            except CheckpointError:
                return False

    def check(self) -> None:
        """Past all faults: what may stand does, bit for bit, in the root and in the bucket; a repair mends the rest."""
        self.watch.chance = None
        self.proxy.clear()
        self.proxy.choose = self.watch
        self.kill()
        for which in [*self.damaged]:
            self._mend(which)
        assert not self.damaged
        standing = [which for which, known in self.known.items() if self._stands(which, known)]
        for run, step in standing:
            done = commands.call("repair", f"{run}@{step}", "--url", self.daemon.url)
            assert done.exit_code == 0, (run, step, done.output)
            if self.name != "root":
                wait_until(lambda: self._is_present(run, step))  # noqa: B023 - used at once
        wait_until(self._has_removed)
        assert self.daemon.stop() == 0
        self._check_bucket(standing)
        assert self.watch.rewritten == []

    def _has_removed(self) -> bool:
        """Whether no copy is left of what was removed."""
        gone = [which for which, known in self.known.items() if known == {False}]
        return not any(self.bucket.sizes(f"{self.name}/{naming.commit_object_path(*which)}") for which in gone)

    def _stands(self, which: tuple[str, int], known: set[bool]) -> bool:
        found = state_of(which[0], 0)
        with Api(self.daemon.url) as api:
            try:
                api.checkpoint(*which)
            except CheckpointError:
                assert False in known, f"{which} is lost"
                return False
        assert True in known, f"{which} is there again"
        with Checkpointer(which[0], found, at=str(self.daemon.socket)) as checkpointer:
            assert checkpointer.restore(which[1]) == which[1]
        assert is_right(found, *which), which
        return True

    def _check_bucket(self, standing: list[tuple[str, int]]) -> None:
        opened = client.opened(self.prefix)
        uploads = Uploads(opened)
        try:
            store = ObjectStore(uploads, ConditionalPuts(opened, HONOURED))
            store.sweep()
            named = set()
            for run in (RUN, LONG_RUN):
                steps = {step for one, step in standing if one == run}
                assert set(store.steps(run)) == steps, (run, store.steps(run), steps)
                for step in steps:
                    verify(store.files, naming.checkpoint_path(run, step))
                    path = naming.commit_object_path(run, step)
                    content = commit_objects.decode(self.bucket.read(f"{self.name}/{path}"), run, step)
                    named |= {f"{run}/{naming.DATA}/{one.data}" for one in content.kept}
            keys = {key.removeprefix(f"{self.name}/") for key in self.bucket.sizes(f"{self.name}/")}
            data = {key.rpartition("/")[0] for key in keys if f"/{naming.DATA}/" in key}
            uploading = [key for key, _ in self.bucket.uploads(f"{self.name}/") if f"/{naming.DATA}/" in key]
            assert data == named and uploading == []
        finally:
            uploads.close()
            opened.close()


@contextmanager
def machines(bucket: TestBucket, directory: Path, every: float) -> Iterator[list[Machine]]:
    """Both daemons, each behind a proxy of its own."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for key, value in bucket.server.environment().items():
            patch.setenv(key, value)
        made = list[Machine]()
        try:
            for seed, name in enumerate(("drained", "root")):
                proxy = stack.enter_context(faulty(bucket.server.endpoint))
                made.append(Machine(name, bucket, proxy, directory, seed, every))
            yield made
        finally:
            for one in made:
                if one.daemon.process.poll() is None:
                    one.daemon.kill()


def go_through(bucket: TestBucket, directory: Path, faults: int, every: float) -> None:
    """Until so many faults were injected; then what stands is looked at."""
    with machines(bucket, directory, every) as made:
        for one in made:
            one.watch.begin()
        while sum(one.watch.faults for one in made) < faults:
            for one in made:  # the daemons work at the same time, on what they were asked before
                one.act()
        kinds = Counter[str]()
        for one in made:
            one.check()
            seen = [str(each.fault).partition("(after")[0] for each in one.proxy.seen if each.fault is not None]
            kinds.update(seen)
            print(f"\n{one.name}: {len(seen)} faults of {len(one.proxy.seen)} requests, {dict(one.counts)}", flush=True)
        print(f"\n{sum(kinds.values())} faults: {dict(kinds)}", flush=True)


def test_faults_of_two_daemons(seaweedfs_bucket: TestBucket, tmp_path: Path) -> None:
    go_through(seaweedfs_bucket, tmp_path, 60, 6)


@pytest.mark.objects
def test_ten_thousand_faults_of_two_daemons(seaweedfs_bucket: TestBucket, tmp_path: Path) -> None:
    go_through(seaweedfs_bucket, tmp_path, 10_000, 4)

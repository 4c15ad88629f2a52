"""Two daemons use a store in a bucket, each by way of a proxy that injects faults into its requests at random."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest

from holdfast_files.objects import client, commit_objects, sending
from holdfast_files.objects.probe import probe
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError
from holdfast_formats.naming import Place
from holdfast_service.control.database.database import Database
from holdfast_service.storage import Publication
from holdfast_service.storage.objects import conditional_puts
from holdfast_service.storage.objects.conditional_puts import ConditionalPuts
from holdfast_service.storage.objects.object_store import ObjectStore
from holdfast_service.storage.objects.put_intents import PutIntents
from holdfast_service.storage.objects.uploads import Uploads
from holdfast_service.wings.cluster.catalog_put_intents import CatalogPutIntents
from tests.databases import Postgres
from tests.kit.objects import TestBucket
from tests.kit.objects_proxy import (
    ACCESS_DENIED,
    CONFLICT,
    FULL,
    INTERNAL_ERROR,
    QUOTA,
    SLOW_DOWN,
    Answer,
    Conditions,
    CutAnswer,
    CutRequest,
    Fault,
    Late,
    LoseAnswer,
    Request,
    Stall,
    faulty,
)
from tests.suites.store_stress import Stress
from tests.suites.store_suite import RUN, fill, path, sample

PREFIX = "team/checkpoints"
PART_BYTES = 5 * 2**20  # the least that servers take
SILENCE_S, RETRY_S, PAUSE_S = 4.0, 120.0, 0.01
STEP = 7

pytestmark = pytest.mark.filterwarnings("ignore:unclosed.*:ResourceWarning")


class Chance:
    """Chooses a fault for about one request in `every`. Of a bucket that does not honour conditions, nothing is done late:
    no arbiter outside of it can prevent that.
    """

    def __init__(self, seed: int, every: float, late: bool = True) -> None:
        self._chance, self._every, self._late = random.Random(seed), every, late

    def __call__(self, request: Request) -> Fault | None:
        chance = self._chance
        if chance.random() * self._every > 1:
            return None
        cut = int(10 ** chance.uniform(0, 6))
        faults: list[Fault] = [LoseAnswer(), LoseAnswer(), CutAnswer(cut), INTERNAL_ERROR, SLOW_DOWN]
        if request.method in ("PUT", "POST"):
            faults.append(CutRequest(cut))
        if request.conditional:
            faults.append(CONFLICT)
        if self._late:
            faults += [Late(chance.uniform(0, 0.3))] * 2
        if chance.random() < 0.02:  # each takes as long as silence is borne
            return Stall(chance.random() < 0.5)
        return chance.choice(faults)


class Locks:
    """Lets one writer at a time through, as the catalog does for buckets that do not honour conditions."""

    def __init__(self) -> None:
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def __call__(self, name: str) -> AbstractContextManager[object]:
        return self._locks[name]


class Site:
    """Stores in one bucket, each through a proxy of its own, and one past all proxies."""

    def __init__(self, bucket: TestBucket, conditions: Conditions, count: int, intents: PutIntents | None) -> None:
        self.bucket, self._conditions, self._locks, self._intents = bucket, conditions, Locks(), intents
        self._ends, self.numbers = ExitStack(), itertools.count()
        self.proxies = [self._ends.enter_context(faulty(bucket.server.endpoint)) for _ in range(count)]
        for proxy in self.proxies:
            proxy.conditions = conditions
        self.stores = [self._store(proxy.endpoint) for proxy in self.proxies]
        # Past the faults, but not past how the bucket treats conditions.
        quiet = self._ends.enter_context(faulty(bucket.server.endpoint))
        quiet.conditions = conditions
        self.sound = self._store(quiet.endpoint)

    def _store(self, endpoint: str) -> ObjectStore:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.bucket.server.environment(endpoint).items():
                patch.setenv(name, value)
            opened = client.opened(f"{self.bucket.url}/{PREFIX}").using(retry_s=RETRY_S)
        self._ends.callback(opened.close)
        uploads = Uploads(opened, PART_BYTES, 4 * PART_BYTES, 3, RETRY_S)
        self._ends.callback(uploads.close)
        return ObjectStore(uploads, ConditionalPuts(opened, probe(opened), self._locks, self._intents))

    def settle(self) -> None:
        for proxy in self.proxies:
            proxy.settle()

    @property
    def faults(self) -> Counter[str]:
        """How many were injected, by kind."""
        seen = [one.fault for proxy in self.proxies for one in proxy.seen if one.fault is not None]
        return Counter(str(fault).partition("(after")[0].partition("(delay")[0] for fault in seen)

    def check_nothing_is_left(self) -> None:
        """After one sweep there is nothing but committed checkpoints, looked at past our own code."""
        self.sound.sweep()
        keys = {key.removeprefix(f"{PREFIX}/") for key in self.bucket.sizes()}
        commits = {key for key in keys if key.startswith(f"{RUN}/{naming.COMMITS}/")}
        named = set()
        for key in commits:
            step = naming.parse_step_directory(key.rpartition("/")[2])
            assert step is not None
            content = commit_objects.decode(self.bucket.read(f"{PREFIX}/{key}"), RUN, step)
            named |= {f"{RUN}/{naming.DATA}/{one.data}" for one in content.kept}
        left = {key for key in keys - commits if key.rpartition("/")[0] not in named}
        assert not left and self.bucket.uploads() == []

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.clear()
        self._ends.close()


@contextmanager
def site(
    bucket: TestBucket, conditions: Conditions = "honoured", count: int = 2, intents: PutIntents | None = None
) -> Iterator[Site]:
    made = Site(bucket, conditions, count, intents)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries, and how long silence is borne, are those of a test."""
    for module in (sending, conditional_puts):
        monkeypatch.setattr(module, "PAUSE_FIRST_S", PAUSE_S)
        monkeypatch.setattr(module, "PAUSE_MAX_S", 10 * PAUSE_S)
    monkeypatch.setattr(client, "SILENCE_S", SILENCE_S)
    monkeypatch.setattr(client, "ASSEMBLY_SILENCE_S", SILENCE_S)


def stress(made: Site, operations: int, threads: int, every: float, late: bool = True) -> None:
    """Faults, and then none; what stands is right, and nothing else is left."""
    world = Stress(made.stores, made.sound, made.settle, seed=operations)
    for number, proxy in enumerate(made.proxies):
        proxy.choose = Chance(number, every, late)
    world.run(threads, operations)
    for proxy in made.proxies:
        proxy.clear()
        proxy.conditions = made._conditions
    made.settle()
    world.let_go_of_all()
    made.check_nothing_is_left()
    print(f"\n{made.bucket.server.kind}: {sum(made.faults.values())} faults, {dict(made.faults)}; {dict(world.counts)}")


def test_faults_lose_and_leave_nothing(seaweedfs_bucket: TestBucket) -> None:
    with site(seaweedfs_bucket) as made:
        stress(made, 12, 2, 6)
        assert sum(made.faults.values()) > 20


def test_faults_of_a_bucket_that_ignores_conditions(seaweedfs_bucket: TestBucket) -> None:
    """An arbiter outside of it keeps writers apart."""
    with site(seaweedfs_bucket, "ignored") as made:
        stress(made, 12, 2, 6, late=False)


@pytest.mark.objects
def test_thousands_of_faults(bucket: TestBucket) -> None:
    with site(bucket) as made:
        stress(made, 150, 6, 5)
        assert sum(made.faults.values()) > 1000


@pytest.mark.objects
@pytest.mark.parametrize("conditions", ["ignored", "refused"])
def test_thousands_of_faults_without_conditions(seaweedfs_bucket: TestBucket, conditions: Conditions) -> None:
    with site(seaweedfs_bucket, conditions) as made:
        stress(made, 150, 6, 5, late=False)
        assert sum(made.faults.values()) > 1000


def test_a_storm_of_refusals_is_waited_out(seaweedfs_bucket: TestBucket) -> None:
    """Of writes with a condition, too: a save that has sent all of its parts is not lost for a bucket that is busy."""
    with site(seaweedfs_bucket, count=1) as made:
        (proxy,), (store,) = made.proxies, made.stores
        rules = [proxy.on(SLOW_DOWN, kind, times=6) for kind in ("begin", "part")]
        rules += [proxy.on(INTERNAL_ERROR, "put", key, times=6) for key in (naming.MANIFEST, f"{naming.COMMITS}/")]
        assert write_and_commit(store, Place(RUN, STEP, 1, 5)) == Publication("published")
        assert [rule.hits for rule in rules] == [6] * 4


@pytest.mark.parametrize("fault", [ACCESS_DENIED, QUOTA, FULL], ids=str)
def test_a_bucket_that_takes_nothing_in_mid_save(seaweedfs_bucket: TestBucket, fault: Answer) -> None:
    """A permission that ends, or room: the save waits. One that waits in vain is refused by that name, and what was
    committed before it stands.
    """
    first, second = Place(RUN, STEP, 1, 5), Place(RUN, STEP + 1, 1, 6)
    with site(seaweedfs_bucket, count=1) as made:
        (proxy,), (store,) = made.proxies, made.stores
        kinds = {"begin": "", "part": "", "complete": "", "head": "", "put": f"{naming.COMMITS}/"}
        rules = [proxy.on(fault, kind, key, times=3) for kind, key in kinds.items()]
        assert write_and_commit(store, first) == Publication("published")
        assert [rule.hits for rule in rules] == [3] * len(rules)
        proxy.on(fault, "part", times=None)
        store._uploads.patient = store._uploads.bucket.using(retry_s=1.0)
        with pytest.raises(CheckpointError, match=f"full|{fault.code}") as failed:
            write_and_commit(store, second)
        assert failed.value.members["answer"] == f"{fault.status} {fault.code}"
        proxy.clear()
        assert made.sound.steps(RUN) == [STEP]
        made.sound.sweep()
        made.check_nothing_is_left()


def write_and_commit(store: ObjectStore, place: Place) -> Publication:
    made_of, staged = sample(1, (PART_BYTES + 10,)), store.begin(place)
    for name, data in made_of.files.items():
        fill(staged.create(name, len(data)), data)
    return store.commit(place, made_of.contents())


def race(made: Site, number: int, faults: bool) -> None:
    """Two writers of one step, who have all written but the commit: one publishes, the other finds the step taken."""
    step = number
    samples = [sample(2 * number + one, ()) for one in range(2)]
    places = [Place(RUN, step, 1, 2 * number + one + 1) for one in range(2)]
    for store, place, one in zip(made.stores, places, samples, strict=True):
        staged = store.begin(place)
        for name, data in one.files.items():
            fill(staged.create(name, len(data)), data)
    for at, proxy in enumerate(made.proxies):
        proxy.choose = Chance(1000 * at + number, 4, late=made._conditions == "honoured") if faults else lambda request: None
    start = threading.Barrier(2)

    def commit(at: int) -> str:
        start.wait()
        try:
            return made.stores[at].commit(places[at], samples[at].contents()).outcome
        except CheckpointError:
            return "raised"  # and has made nothing visible

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(commit, range(2)))
    made.settle()
    found = made.sound.files.read(path(naming.COMMIT, step)) if made.sound.files.size(path(naming.COMMIT, step)) else None
    stands = [one.commit == found for one in samples]
    for outcome, mine in zip(outcomes, stands, strict=True):
        assert outcome == "unknown" or (outcome == "published") == mine, (outcomes, stands)
    assert found is not None or "taken" not in outcomes, outcomes
    if not faults:
        assert sorted(outcomes) == ["published", "taken"]
    if found is not None:
        made.sound.free(made.sound.remove(RUN, step))


def races(made: Site, count: int, faults: bool = False) -> None:
    for _ in range(count):
        race(made, next(made.numbers), faults)
    for proxy in made.proxies:
        proxy.choose = lambda request: None
    made.check_nothing_is_left()


def test_of_two_writers_of_a_step_one_commits(seaweedfs_bucket: TestBucket) -> None:
    with site(seaweedfs_bucket) as made:
        races(made, 10)
        races(made, 10, faults=True)


@pytest.mark.objects
def test_a_thousand_races(bucket: TestBucket) -> None:
    with site(bucket) as made:
        races(made, 1000)
        races(made, 200, faults=True)


@pytest.mark.objects
@pytest.mark.parametrize("conditions", ["ignored", "refused"])
def test_a_thousand_races_that_the_catalog_decides(
    seaweedfs_bucket: TestBucket, postgres: Postgres, conditions: Conditions
) -> None:
    """Where daemons share a catalog, its row lets one writer through."""
    url = postgres.take()
    database = Database.open(url)
    with site(seaweedfs_bucket, conditions, intents=CatalogPutIntents(database)) as made:
        races(made, 1000)
        races(made, 200, faults=True)
    database.close()
    postgres.give_back(url)


@pytest.mark.objects
@pytest.mark.parametrize("conditions", ["ignored", "refused"])
def test_a_thousand_races_without_conditions(seaweedfs_bucket: TestBucket, conditions: Conditions) -> None:
    """The arbiter lets one writer through at a time."""
    with site(seaweedfs_bucket, conditions) as made:
        races(made, 1000)
        races(made, 200, faults=True)

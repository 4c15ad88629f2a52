"""Puts of several nodes to a bucket that honours no conditions: the catalog lets the first writer win, also if it dies."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest
from sqlalchemy import update

from holdfast_files.objects.object_files import ObjectFiles
from holdfast_formats.errors import CatalogUnavailable
from holdfast_service.control.database.cluster_schema import PutIntentRow
from holdfast_service.storage.objects import ConditionalPuts, Honours
from holdfast_service.storage.objects.object_records import ObjectRecords
from holdfast_service.storage.objects.put_intents import DATA_BYTES_MAX, LEFT_S, PutIntent
from holdfast_service.wings.cluster.catalog_put_intents import CatalogPutIntents
from holdfast_service.wings.cluster.membership import later
from tests.kit.memory_bucket import MemoryBucket
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]
LIAR = Honours("ignored", "ignored")
NAME = "s3://memory/root/key"


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket(conditions=False)


def intents_of(nodes: Nodes, name: str) -> CatalogPutIntents:
    return CatalogPutIntents(nodes.add(name).database)


def puts(bucket: MemoryBucket, intents: CatalogPutIntents) -> ConditionalPuts:
    return ConditionalPuts(bucket, LIAR, intents=intents)


def at_once(acts: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_of_several_nodes_puts_an_object(nodes: Nodes, bucket: MemoryBucket) -> None:
    """What stands is what the only one wrote that was told so."""
    made = [puts(bucket, intents_of(nodes, name)) for name in ("a", "b", "c")]
    for number in range(20):
        key, told = f"key-{number}", Counter[str]()
        done: list[bytes] = []

        def put(one: ConditionalPuts, data: bytes, key: str = key, told: Counter[str] = told) -> None:
            outcome = one.first(key, data).outcome
            told[outcome] += 1
            if outcome == "done":
                done.append(data)  # noqa: B023 - the threads of this round

        at_once([lambda one=one, place=place: put(one, b"of %d" % place) for place, one in enumerate(made)])
        assert told == {"done": 1, "exists": 2} and [bucket.read(key)] == done


def test_no_replacement_is_lost(nodes: Nodes, bucket: MemoryBucket) -> None:
    """Nodes that count together count as far as they were told."""
    made = [puts(bucket, intents_of(nodes, name)) for name in ("a", "b", "c")]
    assert made[0].first("key", b"0").outcome == "done"

    def count(one: ConditionalPuts) -> None:
        for _ in range(8):
            while True:
                data, etag = bucket.read_tagged("key", 10)
                if one.replace("key", b"%d" % (int(data) + 1), etag).outcome == "done":
                    break

    at_once([lambda one=one: count(one) for one in made])
    assert bucket.read("key") == b"24"


@pytest.mark.parametrize("stands", [False, True], ids=["before the put", "after the put"])
def test_what_a_dead_writer_began_is_carried_out(nodes: Nodes, bucket: MemoryBucket, stands: bool) -> None:
    """Once no request of it can be on its way: it may have been told already that its object stands."""
    intents = intents_of(nodes, "a")
    assert intents.begin(NAME, PutIntent(b"dead", None, "w1")) is None
    if stands:
        bucket.put("key", b"dead", writer="w1")
    with nodes.add("b").database.write() as session:
        session.execute(update(PutIntentRow).values(since=later(-LEFT_S)))
    other = puts(bucket, intents)
    assert other.first("key", b"mine").outcome == "exists" and bucket.read("key") == b"dead"
    etag = bucket.read_tagged("key", 4)[1]
    assert other.replace("key", b"mine", etag).outcome == "done" and bucket.read("key") == b"mine"


def test_what_was_deleted_does_not_come_back(nodes: Nodes, bucket: MemoryBucket) -> None:
    """A writer died after its put: what it had begun is over once its object is deleted."""
    intents = intents_of(nodes, "a")
    assert intents.begin(NAME, PutIntent(b"dead", None, "w1")) is None
    bucket.put("key", b"dead", writer="w1")
    with nodes.add("b").database.write() as session:
        session.execute(update(PutIntentRow).values(since=later(-LEFT_S)))
    made = puts(bucket, intents)
    ObjectRecords(bucket, made, ObjectFiles(bucket)).remove_file("key")
    assert bucket.names() == []
    assert made.first("key", b"mine").outcome == "done" and bucket.read("key") == b"mine"


def test_what_is_too_long_for_the_catalog_is_given_up(nodes: Nodes, bucket: MemoryBucket) -> None:
    """It is a file of a round, which the next committer writes with the same bytes."""
    intents = intents_of(nodes, "a")
    long = bytes(DATA_BYTES_MAX + 1)
    made = puts(bucket, intents)
    assert made.first("long", long).outcome == "done" and bucket.read("long") == long
    assert intents.begin(NAME, PutIntent(None, None, "w1")) is None
    with nodes.add("b").database.write() as session:
        session.execute(update(PutIntentRow).values(since=later(-LEFT_S)))
    assert made.first("key", long).outcome == "done" and bucket.read("key") == long


def test_without_the_catalog_the_outcome_is_unknown(nodes: Nodes, bucket: MemoryBucket) -> None:
    """And nothing is written."""

    class Away(CatalogPutIntents):
        def begin(self, key: str, intent: PutIntent) -> None:
            raise CatalogUnavailable("away")

    done = puts(bucket, Away(nodes.add("a").database)).first("key", b"mine")
    assert done.outcome == "unknown" and "the catalog decides who writes key: away" in done.detail and bucket.names() == []

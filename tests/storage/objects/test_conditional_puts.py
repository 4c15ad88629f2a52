"""A conditional put whose answer is lost is settled by what stands, and never taken for another's (I14)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from holdfast_files.objects.client import Found, WriteOutcome
from holdfast_formats.errors import NoSpace, StorageFailed
from holdfast_service.storage.objects import HONOURED, ConditionalPuts, Honours, conditional_puts
from holdfast_service.storage.objects.conditional_puts import TRIES_MAX
from tests.kit.memory_bucket import MemoryBucket

LIAR = Honours("ignored", "ignored")
Act = Callable[[MemoryBucket], None]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditional_puts, "PAUSE_MAX_S", 0.0)


class Losing(MemoryBucket):
    """The answers of puts are lost. `acts` says for each put whether it is `done`, `not` done, or that it is answered as
    usual; `before` is what another writer does meanwhile.
    """

    def __init__(self, acts: Sequence[str], before: Act | None = None, conditions: bool = True) -> None:
        super().__init__(conditions)
        self.acts, self.before = list(acts), before

    def put(self, key: str, data: Any, **how: Any) -> WriteOutcome:
        act = self.acts.pop(0) if self.acts else "answered"
        if act == "answered":
            return super().put(key, data, **how)
        if self.before is not None:
            self.before(self)
        if act == "done":
            super().put(key, data, **how)
        if how.get("if_absent") or how.get("if_match") is not None:
            return WriteOutcome("unknown", detail="the connection was cut")
        raise StorageFailed("the connection was cut")


def other(bucket: MemoryBucket) -> None:
    bucket._store("key", b"other")


def equal(bucket: MemoryBucket) -> None:
    """Another writer writes the same bytes."""
    bucket._store("key", b"mine")


def puts(bucket: MemoryBucket, honours: Honours = HONOURED) -> ConditionalPuts:
    return ConditionalPuts(bucket, honours, lambda name: nullcontext())


@pytest.mark.parametrize(
    ("acts", "before", "outcome", "stands"),
    [
        (["done"], None, "done", b"mine"),
        (["not"], None, "done", b"mine"),
        (["not", "not"], None, "done", b"mine"),
        (["not"] * TRIES_MAX, None, "unknown", None),
        (["done"], other, "exists", b"other"),
        (["not"], other, "exists", b"other"),
        (["not"], equal, "exists", b"mine"),
    ],
)
def test_a_first_put(acts: list[str], before: Act | None, outcome: str, stands: bytes | None) -> None:
    """One's own lost answer is told from another's object; what never arrived is sent again, and in the end unknown."""
    bucket = Losing(acts, before)
    assert puts(bucket).first("key", b"mine").outcome == outcome
    assert (bucket._objects["key"].data if "key" in bucket.names() else None) == stands


@pytest.mark.parametrize(
    ("acts", "before", "outcome", "stands"),
    [
        (["done"], None, "done", b"mine"),
        (["not"], None, "done", b"mine"),
        (["not"] * TRIES_MAX, None, "unknown", b"first"),
        (["done"], other, "exists", b"other"),
        (["not"], equal, "exists", b"mine"),
        (["not"], lambda bucket: bucket.delete(["key"]), "exists", None),
    ],
)
def test_a_replacement(acts: list[str], before: Act | None, outcome: str, stands: bytes | None) -> None:
    """The same for an object that has a tag."""
    bucket = Losing(["answered", *acts], before)
    bucket.put("key", b"first")
    etag = bucket.read_tagged("key", 5)[1]
    assert puts(bucket).replace("key", b"mine", etag).outcome == outcome
    assert (bucket._objects["key"].data if "key" in bucket.names() else None) == stands


def test_an_object_that_is_there() -> None:
    """With equal bytes too: it is another writer's, whose answer was not lost."""
    for bucket in (MemoryBucket(), MemoryBucket(conditions=False)):
        made = puts(bucket, HONOURED if bucket.conditions else LIAR)
        assert made.first("key", b"one").outcome == "done"
        assert made.first("key", b"one").outcome == made.first("key", b"two").outcome == "exists"
        etag = bucket.read_tagged("key", 3)[1]
        assert made.replace("key", b"two", '"0"').outcome == "exists"
        assert made.replace("key", b"three", etag).outcome == "done" and bucket.read("key") == b"three"


@pytest.mark.parametrize(("acts", "outcome"), [(["done"], "done"), (["not"], "unknown")])
def test_a_lost_answer_without_conditions(acts: list[str], outcome: str) -> None:
    """It is not sent again while the first request may still arrive and overwrite what stands by then."""
    bucket = Losing(acts, conditions=False)
    assert puts(bucket, LIAR).first("key", b"mine").outcome == outcome


def test_what_cannot_be_read_back_is_unknown() -> None:
    """Nothing is guessed."""

    class Blind(Losing):
        def head(self, key: str) -> Found | None:
            raise StorageFailed("the bucket is away")

    done = puts(Blind(["done"])).first("key", b"mine")
    assert done.outcome == "unknown" and "cut" in done.detail and "away" in done.detail


def test_what_is_refused_is_raised() -> None:
    """A full bucket has stored nothing."""
    bucket = MemoryBucket()
    bucket.room = 0
    with pytest.raises(NoSpace):
        puts(bucket).first("key", b"mine")


def test_an_empty_object() -> None:
    """No bytes are equal only to no bytes."""
    bucket = Losing(["not"], other)
    assert puts(bucket).first("key", b"").outcome == "exists"

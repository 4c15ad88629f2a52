"""Requests to a bucket by checkpoint and by kind, as the API, logs and the catalog have them."""

from __future__ import annotations

import time

import pytest

from holdfast_files.objects import address
from holdfast_files.objects.traffic import AWS_USD_PER_READ, AWS_USD_PER_WRITE, RequestCount, Traffic, aws_usd
from holdfast_formats.rest.measurements import SaveTimes
from holdfast_service.observe import bucket_traffic


@pytest.mark.parametrize("top", ["", "team/a"])
def test_an_object_belongs_to_a_checkpoint_by_its_key(top: str) -> None:
    of = bucket_traffic.checkpoint_of(address.parse(f"s3://models/{top}".rstrip("/")))
    before = f"{top}/" if top else ""
    assert of(f"{before}llama/data/step-00000003.a1.r7/model.safetensors") == ("llama", 3)
    assert of(f"{before}llama/commits/step-00000003") == ("llama", 3)
    assert of(f"{before}llama/lines/step-00000003.a1.r7~0.0") == ("llama", 3)
    for key in (
        "llama/run.json",
        "llama/lines/step-00000003",
        "llama/commits/other",
        "llama/data/step-00000003/x",
        ".holdfast.root",
        "",
    ):
        assert of(f"{before}{key}") is None
    if top:
        assert of("llama/commits/step-00000003") is None


def test_the_requests_of_a_save_are_those_since_the_last_question() -> None:
    """Whatever is asked for other objects counts in the totals alone."""
    traffic = Traffic(bucket_traffic.checkpoint_of(address.parse("s3://models")))
    for kind, key in (("part", "a/data/step-00000001.a1.r7/x"), ("put", "a/commits/step-00000001"), ("list", "")):
        traffic.add(kind, RequestCount(2, 1, 10, 3), key)
    found = bucket_traffic.of_save(traffic.take(("a", 1)))
    assert found == {
        "requests": 4,
        "retries": 2,
        "sent_bytes": 20,
        "received_bytes": 6,
        "requests_part": 2,
        "requests_put": 2,
    }
    assert set(found) <= set(SaveTimes.model_fields)
    assert traffic.take(("a", 1)) == {} and traffic.by_kind()["list"].sent == 2
    traffic.add("get", RequestCount(1, 0, 0, 7), "a/data/step-00000001.a1.r7/x")
    checked = bucket_traffic.of_check(traffic.take(("a", 1)))
    assert checked == {"check_requests": 1, "check_retries": 0, "check_received_bytes": 7}
    assert set(checked) <= set(SaveTimes.model_fields)
    assert bucket_traffic.of_save({}) == bucket_traffic.of_check({}) == {}


def test_every_kind_has_a_member() -> None:
    """A kind of request that a save can make and that `SaveTimes` does not name would be refused where it is read."""
    kinds = ("get", "head", "put", "delete", "list", "copy", "begin", "part", "complete", "abort", "uploads")
    found = bucket_traffic.of_save({kind: RequestCount(1) for kind in kinds})
    assert set(found) <= set(SaveTimes.model_fields)


def test_what_fails_is_told_until_it_is_answered() -> None:
    traffic = Traffic()
    traffic.settle("put", "503 SlowDown")
    since = traffic.failing()[0].since_s
    traffic.settle("put", "no answer: timed out")
    traffic.settle("get", "")
    assert [(one.kind, one.answer, one.since_s) for one in traffic.failing()] == [("put", "no answer: timed out", since)]
    described = bucket_traffic.described(traffic)
    assert described is not None and described.failing[0].since.endswith("Z")
    traffic.settle("put")
    assert traffic.failing() == [] and bucket_traffic.described(None) is None


def test_what_failed_in_passing_is_forgotten_once_anything_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not at once: another kind may be answered all the time. A refusal stays until its own kind is answered."""
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    traffic = Traffic()
    traffic.settle("list", "503 SlowDown", passes=True)
    traffic.settle("uploads", "403 AccessDenied")
    clock[0] += 10_000
    assert [one.kind for one in traffic.failing()] == ["list", "uploads"]
    traffic.settle("get")
    assert [one.kind for one in traffic.failing()] == ["uploads"]
    traffic.settle("put", "503 SlowDown", passes=True)
    traffic.settle("get")
    assert [one.kind for one in traffic.failing()] == ["uploads", "put"]


def test_the_price_is_by_class() -> None:
    assert aws_usd({"part": 2, "list": 1, "get": 5, "delete": 100}) == pytest.approx(
        3 * AWS_USD_PER_WRITE + 5 * AWS_USD_PER_READ
    )


def test_a_bucket_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since when, and its last answer: none, a refusal, or one that came before it was asked."""
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    traffic = Traffic()
    assert bucket_traffic.silence(None, 1000.0) == ""
    clock[0] = 1030.0
    silent = "the bucket is silent since 1970-01-01T00:16:50.000Z, "
    assert bucket_traffic.silence(traffic, 1010.0) == f"{silent}it has given no answer yet"
    traffic.settle("list")
    assert bucket_traffic.silence(traffic, 1010.0) == ""
    clock[0] = 1042.0
    assert bucket_traffic.silence(traffic, 1040.0).endswith("17:20.000Z, its last answer came at 1970-01-01T00:17:10.000Z")
    traffic.settle("list", "503 SlowDown", passes=True)
    assert bucket_traffic.silence(traffic, 1040.0) == (
        "the bucket fails list requests since 1970-01-01T00:17:22.000Z: 503 SlowDown"
    )

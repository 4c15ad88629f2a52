"""Requests of jobs: what each kind takes, how a wrong one is refused, and that equal ones are one document."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.jobs import (
    CompareArguments,
    CompareJob,
    ImportArguments,
    ImportJob,
    Int16,
    ScrubJob,
    VerifyJob,
    parse,
)
from holdfast_formats.rest.operations import Job, JobKind
from holdfast_service.wings.convert.foreign import sixteen_bits

ARGUMENTS: dict[str, dict[str, Any]] = {"compare": {"with": 3}, "export": {"to": "x"}, "import": {"from": "x"}}
ARGUMENTS["merge"] = {"recipe": "x"}
OF_CHECKPOINTS = ("verify", "compare", "export", "import", "merge")


@pytest.mark.parametrize("kind", get_args(JobKind))
def test_every_kind_has_one_document(kind: str) -> None:
    """It is what was asked, without what has its default; what is read from it, or from a stored job, is the same."""
    named = {"run": "r", "step": 5} if kind in OF_CHECKPOINTS else {"run": None, "step": None}
    document = {"kind": kind, **named, "arguments": ARGUMENTS.get(kind, {})}
    wanted = parse(document)
    assert wanted.model_dump() == json.loads(wanted.model_dump_json()) == document
    assert parse({**document, "arguments": {**ARGUMENTS.get(kind, {})}}) == wanted
    stored = {"id": 1, "state": "queued", "done_bytes": 0, "total_bytes": 0, "node": "n", "created": "now"}
    assert type(wanted).of(Job(**stored, **document, started=None, ended=None)) == wanted


def test_defaults_make_no_other_request() -> None:
    """A flag that is said to be off, and a kind that is not said, are as if they had been left out."""
    wanted = ImportJob(run="r", step=1, arguments=ImportArguments(source="s", as_is=False, kind=None, shards=2))
    assert wanted.model_dump()["arguments"] == {"from": "s", "shards": 2} and wanted.arguments.chosen == {"shards": 2}
    program = ImportArguments(source="s", kind="hf", program="p", dry_run=True)
    assert program.chosen == {"program": "p"}
    assert VerifyJob(run="r", step=1).model_dump()["arguments"] == {}
    assert ScrubJob().model_dump() == {"kind": "scrub", "run": None, "step": None, "arguments": {}}


@pytest.mark.parametrize(
    ("kind", "wrong", "says"),
    [
        ("verify", {"run": None}, "a job of kind 'verify' needs 'run'"),
        ("verify", {"step": None}, "a job of kind 'verify' needs 'step'"),
        ("verify", {"run": "a/b"}, "run name 'a/b' is not allowed"),
        ("verify", {"step": -1}, "the argument 'step' of a job of kind 'verify' is wrong"),
        ("verify", {"bogus": 1}, "a job of kind 'verify' has no argument 'bogus'"),
        ("verify", {"arguments": []}, "the argument 'arguments' of a job of kind 'verify' is wrong"),
        ("verify", {"arguments": {"repair": "yes"}}, "the argument 'repair' of a job of kind 'verify' is wrong"),
        ("compare", {"arguments": {}}, "needs 'with'"),
        ("compare", {"arguments": {"with": []}}, "'with'"),
        ("export", {"arguments": {}}, "needs 'to'"),
        ("export", {"arguments": {"to": ""}}, "'to'"),
        ("export", {"arguments": {"to": "x", "program": "p"}}, "'program' of an export needs `as`"),
        ("export", {"arguments": {"to": "x", "as": "hf", "model_only": True}}, "'model_only'"),
        ("import", {"arguments": None}, "needs 'from'"),
        ("import", {"arguments": {"from": "x", "dryrun": True}}, "has no argument 'dryrun'"),
        ("import", {"arguments": {"from": "x", "int16": "bits"}}, "'int16'"),
        ("import", {"arguments": {"from": "x", "shards": 0}}, "'shards'"),
        ("import", {"arguments": {"from": "x", "shards": "2"}}, "'shards'"),
        ("merge", {"arguments": {"recipe": {}}}, "'recipe'"),
        ("scrub", {}, "'step'"),
        ("rebuild", {}, "'run'"),
        ("fold", {}, "'fold' is not a kind of job"),
    ],
)
def test_a_wrong_request_is_refused(kind: str, wrong: dict[str, Any], says: str) -> None:
    """It names the argument and what is wrong, and mostly what would be right, wherever it is read."""
    with pytest.raises(InvalidRequest) as caught:
        parse({"kind": kind, "run": "r", "step": 5, "arguments": ARGUMENTS.get(kind, {}), **wrong})
    assert says in caught.value.detail
    assert caught.value.hint or kind in ("scrub", "rebuild") or wrong == {"arguments": []}


def test_a_wrong_request_is_not_made() -> None:
    """Neither by code that has the fields in hand."""
    with pytest.raises(InvalidRequest, match="run name"):
        CompareJob(run="../etc", step=1, arguments=CompareArguments(other="2"))


def test_what_sixteen_bits_are() -> None:
    """The words that may be said are those that readers know."""
    assert set(get_args(Int16)) == {sixteen_bits.INTEGERS, sixteen_bits.BFLOAT16}

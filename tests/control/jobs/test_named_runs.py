"""Whoever is shown a job is told of no run that the job names and that they may not read: however it is written there."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_formats.rest.operations import Job
from holdfast_service.control.jobs.named_runs import UNKNOWN, other_runs


def job(kind: str, **arguments: Any) -> Job:
    told = {"id": 1, "kind": kind, "state": "queued", "run": "mine", "step": 1, "arguments": arguments, "node": "n"}
    return Job.model_validate({**told, "done_bytes": 0, "total_bytes": 0, "created": "", "started": None, "ended": None})


@pytest.mark.parametrize(
    ("recipe", "runs"),
    [
        ("{models: [{model: mine@1}, {model: ./other}]}", set()),
        ("{models: [{model: mine@1}, {model: other@2}]}", {"other"}),
        ("models:\n  - model: base.v-2@0+adapter_1@300\nbase_model: far@9", {"base.v-2", "adapter_1", "far"}),
        ('{models: [{model: "s\\x65cret@1"}]}', {"secret"}),
        ('{models: [{model: "sec\\\n  ret@1"}]}', {"secret"}),
        ("{models: [{model: &a hidden@1}, {model: *a}]}", {"hidden"}),
        ("models: []  # better than noted@5", {"noted"}),
        ("{models: [", {UNKNOWN}),
        ("a: &a [*a]", {UNKNOWN}),
        ("{models: [{model: not/a/run@5}]}", {UNKNOWN}),
    ],
)
def test_recipes(recipe: str, runs: set[str]) -> None:
    found = other_runs(job("merge", recipe=recipe))
    assert found >= runs and bool(found) == bool(runs)


def test_comparisons() -> None:
    assert other_runs(job("compare", **{"with": "other@3"})) == {"other"}
    assert other_runs(job("compare", **{"with": "3"})) == other_runs(job("compare", **{"with": "mine@3"})) == set()
    assert other_runs(job("verify")) == set()

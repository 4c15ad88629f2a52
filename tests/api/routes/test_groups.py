"""Groups of runs over REST: all runs with a tag, what is best and last of a metric, and how their configs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.rest import groups
from holdfast.rest.api import Api
from holdfast_formats import metric_values
from holdfast_formats.errors import NoSuchResource
from holdfast_formats.rest.runs import RunChange, RunLaunch
from holdfast_service.api.access.authentication import Policy
from holdfast_service.control.database.schema import CheckpointRow
from holdfast_service.control.insight import run_groups
from tests.api.guarded import Guarded, code, guarded

STEPS = {"other": 1, "team-a": 5, "team-b": 5}


def sweep(guard: Guarded, losses: dict[str, dict[str, float]], configs: dict[str, dict[str, Any]]) -> None:
    """Tags each of these runs `sweep:lr`, with the metrics of its checkpoint and the config of its launch."""
    control = guard.running.services.control
    for run, metrics in losses.items():
        stored: Any = {name: metric_values.written(value) for name, value in metrics.items()}
        with control.catalog.database.write() as session:
            session.get_one(CheckpointRow, (run, STEPS[run])).metrics = stored
        control.run_metadata.launched(
            run, RunLaunch(attempt=1, at="2030-01-01T00:00:00Z", world=1, info=configs.get(run, {}))
        )
        control.run_metadata.change(run, RunChange(tag=["sweep:lr"]), "idle", False, "ann")


def test_a_sweep_at_a_glance(tmp_path: Path) -> None:
    """The best run first by either end of the metric; of the configs only what differs; other metrics on request."""
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        losses = {"team-a": {"loss": 2.0, "acc": 0.5}, "team-b": {"loss": 1.5, "acc": 0.25}, "other": {"acc": 1.0}}
        shared = {"layers": 12, "optim": {"name": "adamw"}}
        configs = {
            "team-a": {"config": {**shared, "optim": {"name": "adamw", "lr": 1e-3}}},
            "team-b": {"config": {**shared, "optim": {"name": "adamw", "lr": 1e-4}, "warmup": 10}},
        }
        sweep(guard, losses, configs)
        token = guard.token("read")

        def group(query: str = "") -> dict[str, Any]:
            return guard.ask("GET", f"/v1/groups/sweep:lr{query}", token).json()  # type: ignore[no-any-return]

        found = group()
        assert (found["runs"], found["metric"], found["metrics"], found["differs"]) == (
            3,
            "loss",
            ["acc", "loss"],
            ["optim.lr", "warmup"],
        )
        assert [one["run"] for one in found["members"]] == ["team-b", "team-a", "other"]
        assert found["best"] == {"run": "team-b", "step": 5, "value": 1.5} == found["members"][0]["best"]
        assert [one["config"] for one in found["members"]] == [
            {"optim.lr": "0.0001", "warmup": "10"},
            {"optim.lr": "0.001"},
            {},
        ]
        assert found["last"]["value"] in (1.5, 2.0) and sum(found["states"].values()) == 3
        highest = group("?metric=acc&mode=max")
        assert highest["best"] == {"run": "other", "step": 1, "value": 1.0}
        assert [one["last"] for one in highest["members"]] == [1.0, 0.5, 0.25]
        assert group("?metric=none")["best"] is None
        (listed,) = guard.ask("GET", "/v1/groups", token).json()["items"]
        assert listed == {name: found[name] for name in listed} and "members" not in listed
        assert code(guard.ask("GET", "/v1/groups/nothing", token)) == (404, "no-such-resource")
        assert code(guard.ask("GET", "/v1/groups/no%20tag", token)) == (400, "invalid-request")


def test_the_best_is_of_sound_checkpoints_and_as_new_as_the_run(tmp_path: Path) -> None:
    """One that is damaged, or unhealthy, does not count; nor does what was read before another launch."""
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        sweep(
            guard,
            {"team-a": {"loss": 2.0}, "team-b": {"loss": 1.0}},
            {run: {"config": {"lr": 1}} for run in ("team-a", "team-b")},
        )
        control, token = guard.running.services.control, guard.token("read")

        def best() -> dict[str, Any]:
            return guard.ask("GET", "/v1/groups/sweep:lr", token).json()["best"]  # type: ignore[no-any-return]

        assert best()["run"] == "team-b"
        with control.catalog.database.write() as session:
            session.get_one(CheckpointRow, ("team-b", 5)).healthy = False
        assert best()["run"] == "team-a"
        control.catalog.declare_attempt("team-a", "two", 1, "2030-01-02T00:00:00Z")
        launch = RunLaunch(attempt=2, at="2030-01-02T00:00:00Z", world=1, info={"config": {"lr": 2}})
        control.run_metadata.launched("team-a", launch)
        found = guard.ask("GET", "/v1/groups/sweep:lr", token).json()
        assert [one["config"] for one in found["members"]] == [{"lr": "2"}, {"lr": "1"}]


def test_runs_that_a_token_does_not_see_are_in_no_group(tmp_path: Path) -> None:
    """Neither their values, nor their number, nor that their configs differ; a group of these alone does not exist."""
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        sweep(
            guard,
            {"team-a": {"loss": 2.0}, "other": {"loss": 0.5, "secret": 1.0}},
            {"team-a": {"config": {"lr": 1}}, "other": {"config": {"lr": 2}}},
        )
        control = guard.running.services.control
        control.run_metadata.change("other", RunChange(tag=["theirs"]), "idle", False, "ann")
        assert guard.ask("GET", "/v1/groups/sweep:lr", guard.token("read")).json()["runs"] == 2  # all is read, and kept
        token = guard.token("read", "team-*")
        found = guard.ask("GET", "/v1/groups/sweep:lr", token).json()
        assert (found["runs"], found["differs"], found["metrics"], found["best"]["run"]) == (1, [], ["loss"], "team-a")
        assert [one["tag"] for one in guard.ask("GET", "/v1/groups", token).json()["items"]] == ["sweep:lr"]
        assert code(guard.ask("GET", "/v1/groups/theirs", token)) == (404, "no-such-resource")


def test_the_client_reads_every_page_of_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a group shows its first runs, and says how many it leaves out."""
    monkeypatch.setattr(run_groups, "MEMBERS_MAX", 2)
    with guarded(tmp_path, Policy()) as guard, Api(guard.running.url) as api:
        sweep(guard, {run: {"loss": float(step)} for run, step in STEPS.items()}, {})
        tags = [f"t{number:02d}" for number in range(25)]
        guard.running.services.control.run_metadata.change("other", RunChange(tag=tags), "idle", False, "ann")
        assert [one.tag for one in groups.groups(api)] == ["sweep:lr", *tags]
        found = groups.group(api, "sweep:lr", highest=True)
        assert (found.runs, found.left_out, [one.run for one in found.members]) == (3, 1, ["team-a", "other"])
        with pytest.raises(NoSuchResource):
            groups.group(api, "none")


def test_a_run_that_ends_in_nan_has_no_best(tmp_path: Path) -> None:
    """NaN is shown as what it is, and is never the best."""
    with guarded(tmp_path, Policy(tokens=True)) as guard:
        sweep(guard, {"team-a": {"loss": float("nan")}, "team-b": {"loss": 3.0}}, {})
        found = guard.ask("GET", "/v1/groups/sweep:lr", guard.token("read")).json()
        assert found["best"]["run"] == "team-b"
        assert [(one["run"], one["last"]) for one in found["members"]] == [("team-b", 3.0), ("team-a", "NaN")]

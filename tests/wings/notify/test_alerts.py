"""Alerts of runs, nodes and replicas, and the figures over all runs."""

from __future__ import annotations

from pathlib import Path

from holdfast_formats import timestamps
from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import Acknowledgement, RunSummary
from holdfast_service.control.insight.acknowledgements import AlertKey
from holdfast_service.control.insight.facts import ReplicaCounts, Save
from holdfast_service.control.insight.summary import summarise
from holdfast_service.wings.notify import alerts
from tests.control.insight.test_summary import NOW, facts, saves


def summary(run: str, **changes: object) -> RunSummary:
    return summarise(facts(run=run, **changes))


def node(**changes: object) -> bodies.Node:
    about = {"name": "n1", "version": "1", "socket": None, "started": "now", "arena_bytes": 0, "ranks": 0}
    return bodies.Node.model_validate(about | changes)


def test_nodes_tell_of_themselves_and_of_replicas() -> None:
    """A node that is lost, and a replica that cannot be reached, with what mends it; what is well is not told of."""
    told = [node(replicas={"far": "its disk is gone", "near": None}), node(name="n2", state="lost", live=False)]
    found = list(alerts.of_nodes(told))
    assert [(one.code, one.subject, one.remedy) for one in found] == [
        ("replica-lost", "far", "retry-replicas"),
        ("node-lost", "n2", "forget-node"),
    ]
    assert "its disk is gone" in found[0].text and all(one.hint and one.run is None for one in found)


def test_a_replica_that_is_behind_and_a_bucket_that_refuses() -> None:
    """By the rules of Prometheus, and in their words: bytes that wait for over an hour, requests that fail for five minutes.
    A lost replica says how far behind it is.
    """
    at = [timestamps.later(timestamps.utc_now(), -seconds) for seconds in (alerts.REFUSES_S - 60, alerts.REFUSES_S + 60)]
    fresh, lasting = ({"requests": {}, "failing": [{"kind": "put", "answer": "503", "since": one}]} for one in at)
    behind = {"replica": "far", "node": "n1", "missing": 2, "missing_bytes": 24_000_000, "lag_s": alerts.LAGS_S + 1}
    for lag, bucket, expected in (
        (behind, None, [("replica-lags", "far", "24.0 MB have yet to be copied to far, the oldest for 60 min")]),
        (behind | {"lag_s": alerts.LAGS_S - 1, "bucket": fresh}, fresh, []),
        (behind | {"missing_bytes": 0}, None, []),
        (
            behind | {"lag_s": 480.0, "bucket": lasting},
            lasting,
            [
                ("bucket-refuses", "n1", "the bucket has not carried out a put for 6 min: 503"),
                (
                    "replica-lost",
                    "far",
                    "the replica far cannot be reached: its bucket has not carried out a put for 6 min: 503; "
                    "2 checkpoints have yet to be copied there (24.0 MB, the oldest for 8 min)",
                ),
            ],
        ),
    ):
        found = alerts.of_nodes([node(replicas={"far": None}, lags=[lag], bucket=bucket)])
        assert [(one.code, one.subject, one.text) for one in found] == expected
    rules = Path("deploy/prometheus/alerts.yml").read_text()
    assert f"holdfast_replica_missing_bytes > 0 and holdfast_replica_lag_seconds > {alerts.LAGS_S:.0f}\n" in rules
    assert f'holdfast_objects_failing_seconds{{tier=""}} > {alerts.REFUSES_S:.0f}\n' in rules


def test_what_nobody_has_seen_comes_first() -> None:
    """Then errors before warnings, and the order has no ties."""
    board = [summary("b", life="died"), summary("a", free_bytes=17_000), summary("c", life="died")]
    seen = {AlertKey("b", "run-died"): Acknowledgement(by="ann", at="2030-01-01T00:00:00Z")}
    found = sorted(alerts.marked(alerts.of_runs(board), seen), key=alerts.place)
    assert [(one.run, one.code) for one in found] == [("c", "run-died"), ("a", "disk-nearly-full"), ("b", "run-died")]
    assert found[-1].acknowledged is not None and len({alerts.place(one) for one in found}) == 3


def test_alerts_stand_by_danger_to_data() -> None:
    """Saves that fail come first, then work that is lost, then what is damaged; warnings after all errors."""
    failing = (Save(1100, 1, "aborted", NOW - 9, NOW - 8, "no-space"), *saves())
    damaged = facts().held._replace(damaged=1, newest_damaged=700)
    board = [
        summary("a", life="died"),
        summary("b", saves=failing),
        summary("c", held=damaged, life="died"),
        summary("d", free_bytes=17_000),
    ]
    found = sorted([*alerts.of_runs(board), *alerts.of_nodes([node(replicas={"far": "gone"})])], key=alerts.place)
    assert [(one.run or one.subject, one.code) for one in found] == [
        ("b", "saves-failing"),
        ("a", "run-died"),
        ("c", "run-died"),
        ("c", "checkpoint-damaged"),
        ("far", "replica-lost"),
        ("d", "disk-nearly-full"),
    ]
    assert [item.code for item in board[2].attention] == ["run-died", "checkpoint-damaged"]
    unknown = found[0].model_copy(update={"code": "of-a-newer-daemon"})
    assert alerts.place(found[4]) < alerts.place(unknown) < alerts.place(found[5])


def test_a_lost_replica_is_said_once() -> None:
    """Not beside every run of which it has no copies."""
    board = [summary("a", copies={"far": ReplicaCounts(600, 0), "near": ReplicaCounts(600, 0)})]
    others = list(alerts.of_nodes([node(replicas={"far": "gone"})]))
    found = alerts.without_what_follows([*alerts.of_runs(board), *others])
    assert [(one.code, one.subject) for one in found] == [("replica-behind", "near"), ("replica-lost", "far")]
    assert alerts.overview(board, others).warnings == 1


def test_figures_over_all_runs() -> None:
    """States, alerts, who was lost last, who is exposed most, and what saves cost those that train."""
    board = [
        summary("calm"),
        summary("busy", now=NOW + 100),
        summary("dead", life="died", since="2030-03-17T17:00:00Z"),
        summary("dead-too", life="died", since="2030-03-17T17:30:00Z"),
        summary("over", life="finished"),
    ]
    found = alerts.overview(board, list(alerts.of_nodes([node(replicas={"far": "gone"})])))
    assert found.states == {"training": 2, "died": 2, "finished": 1}
    assert (found.errors, found.warnings, found.acknowledged, found.runs) == (3, 0, 0, 5)
    assert (found.newest_died, found.newest_died_since) == ("dead-too", "2030-03-17T17:30:00Z")
    assert (found.exposed_run, found.exposed_s) == ("busy", 145.0)
    assert found.cost is not None and abs(found.cost - 0.2 / 600) < 1e-5
    nothing = alerts.overview([], [])
    assert (nothing.runs, nothing.cost, nothing.exposed_s, nothing.free_bytes) == (0, None, None, None)

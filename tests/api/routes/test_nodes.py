"""What is told of nodes, to whom: the members of a real cluster, by the API, the pages, the metrics and the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast_formats.rest import bodies
from holdfast_formats.rest.lists import behind
from holdfast_formats.timestamps import utc_now
from holdfast_service.api.routes.nodes import _Record
from holdfast_service.control.access.tokens import Principal
from holdfast_service.wings.cluster.node_ranks import NodeRanks
from tests.checkpoints import build_root
from tests.serving import served
from tests.wings.cluster.nodes import Nodes, nodes
from tests.wings.console.reading import Page

__all__ = ["nodes"]


ALL_DUTIES = ["replica far", "scrub run@5", "upkeep"]


def about(name: str, **more: Any) -> dict[str, Any]:
    """What a node says of itself, as its daemon does."""
    known = {"pid": 7, "version": "9.9", "root": "/shared", "socket": "/run/x.sock", "started": utc_now(), "ranks": 2}
    known |= {"arena_bytes": 4096, "host": f"{name}.example", "url": f"http://{name}:8420", "held": {"run": 4096}}
    return {"name": name, **known, **more}


@pytest.fixture
def http(tmp_path: Path, nodes: Nodes) -> Iterator[httpx.Client]:
    """The API of node-1, beside a node that saves, one that was lost, and one that was stopped."""
    build_root(tmp_path, {"run": (5,)})
    here = nodes.add("node-1")
    told = {"node-2": {"sealed": 3, "catalog_waiting": 12}, "node-3": {"sealed": 1}, "node-4": {}}
    others = {name: nodes.add(name, joined=False) for name in told}
    for name, other in others.items():
        other.membership.about = lambda name=name: about(name, **told[name])
        other.membership.join(0.0)
        connected = {"run": NodeRanks(1, 6, 2)}
        other.node_ranks.report(connected)
    for duty in ("upkeep", "scrub run@5", "replica far"):
        assert others["node-2"].duties.has(duty)
    nodes.lapse(others["node-3"])
    others["node-4"].close()
    with served(tmp_path, nodes=here) as running, httpx.Client(base_url=running.url, trust_env=False) as client:
        yield client


def listed(http: httpx.Client) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in http.get("/v1/nodes").raise_for_status().json()["items"]}


def test_a_token_of_some_runs_counts_no_saves_of_others() -> None:
    node = bodies.Node(**about("a", sealed=3, catalog_waiting=12, busy=True))
    seen = _Record(node, {}, {}).seen_by(Principal("t", "write", "run"))
    assert (seen.sealed, seen.catalog_waiting, seen.busy) == (0, 0, True)


def test_members_are_told_of(http: httpx.Client) -> None:
    """State, ranks by run, duties, lag and addresses; a node that is gone holds nothing."""
    found = listed(http)
    assert {name: node["state"] for name, node in found.items()} == {
        "node-1": "live",
        "node-2": "live",
        "node-3": "lost",
        "node-4": "stopped",
    }
    live, lost = found["node-2"], found["node-3"]
    assert (live["runs"], live["duties"], live["sealed"], live["catalog_waiting"]) == ({"run": 2}, ALL_DUTIES, 3, 12)
    assert (live["host"], live["url"], live["since"][-1]) == ("node-2.example", "http://node-2:8420", "Z")
    assert 0 <= live["heard_s"] < 20 and lost["heard_s"] > 30
    assert (lost["live"], lost["runs"], lost["ranks"], lost["arena_bytes"], lost["sealed"]) == (False, {}, 0, 0, 0)


def test_a_node_that_has_not_described_itself_yet_is_listed(http: httpx.Client, nodes: Nodes) -> None:
    """It has joined and starts still: the list shows its name and state, and the others are as before."""
    nodes.add("node-5", joined=False).membership.join(0.0)
    found = listed(http)
    assert (found["node-5"]["state"], found["node-5"]["version"], found["node-5"]["ranks"]) == ("live", "", 0)
    assert found["node-2"]["version"] == "9.9"


def test_a_token_of_other_runs_sees_no_run_in_a_duty(http: httpx.Client) -> None:
    """A check of a checkpoint is a duty whose name is the checkpoint's."""
    asked = {"name": "other", "scope": "read", "runs": "other-*", "expires_s": 600}
    text = http.post("/v1/tokens", json=asked).raise_for_status().json()["token"]
    seen = http.get("/v1/nodes", headers={"Authorization": f"Bearer {text}"}).raise_for_status().json()["items"]
    assert {node["name"]: node["duties"] for node in seen}["node-2"] == ["upkeep"]
    assert listed(http)["node-2"]["duties"] == ALL_DUTIES


def test_a_lost_node_is_told_until_it_is_forgotten(http: httpx.Client) -> None:
    """By the page, the overview, a metric and the command; a live one cannot be forgotten."""
    page = Page(http.get("/nodes").text)
    assert page.faults() == []
    for part in ("node-3 is lost.", "Start its daemon again", "3 saves sealed, not committed yet; 12 records wait for"):
        assert part in page.text
    assert page.text.index("node-3 lost") < page.text.index("node-1 live")
    assert "1 lost" in Page(http.get("/").text).text
    assert lost_nodes(http) == ["node-3"]
    shown = called(http)
    assert "lost: node-3" in shown and "3 saves sealed" in shown and "upkeep" in shown
    refused = http.delete("/v1/nodes/node-2")
    assert (refused.status_code, refused.json()["code"]) == (409, "in-use")
    assert http.delete("/v1/nodes/nobody").status_code == 404
    assert http.delete("/v1/nodes/no%00body").status_code == 400
    assert "is no longer listed" in Page(http.post("/nodes/node-3/forget", follow_redirects=True).text).text
    assert "lost" not in called(http, "--forget", "node-4")
    assert listed(http).keys() == {"node-1", "node-2"} and lost_nodes(http) == []
    kinds = [event["kind"] for event in http.get("/v1/events").json()["items"]]
    assert kinds.count("node-forgotten") == 2


def test_the_secret_of_the_nodes_is_rotated(http: httpx.Client) -> None:
    """By the command too, and nothing that can be read tells it. Where one daemon is alone there is none."""
    assert http.post("/v1/nodes/secret").status_code == 204
    called(http, "--rotate-secret")
    kinds = [event["kind"] for event in http.get("/v1/events").json()["items"]]
    assert kinds.count("secret-rotated") == 2
    audited = [entry["kind"] for entry in http.get("/v1/audit").json()["items"]]
    assert audited.count("secret-rotated") == 2


def lost_nodes(http: httpx.Client) -> list[str]:
    families = {found.name: found.samples for found in text_string_to_metric_families(http.get("/metrics").text)}
    states = {sample.labels["state"]: sample.value for sample in families["holdfast_nodes"]}
    assert states["live"] == 2 and states["lost"] == len(families["holdfast_node_lost"])
    return [sample.labels["node"] for sample in families["holdfast_node_lost"]]


def called(http: httpx.Client, *arguments: str) -> str:
    environment = {"COLUMNS": "220", "HOLDFAST_URL": str(http.base_url)}
    done = CliRunner().invoke(app, ["nodes", *arguments], env=environment)
    assert done.exit_code == 0, done.output
    as_json = CliRunner().invoke(app, ["nodes", "--json"], env=environment)
    assert {node["name"] for node in json.loads(as_json.stdout)} == listed(http).keys()
    return done.stdout


def test_nobody_else_can_be_forgotten_where_one_daemon_is_alone(tmp_path: Path) -> None:
    """And its only node is live."""
    with served(tmp_path) as running, httpx.Client(base_url=running.url, trust_env=False) as alone:
        assert alone.delete("/v1/nodes/node-1").status_code == 404
        assert alone.post("/v1/nodes/secret").status_code == 404
        assert [(name, node["state"]) for name, node in listed(alone).items()] == [("node-1", "live")]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "nothing"),
        ({"heard_s": 19.0}, "nothing"),
        ({"heard_s": 25.4}, "not heard from for 25 s"),
        ({"sealed": 1}, "1 save sealed, not committed yet"),
        ({"catalog_waiting": 1}, "1 record waits for the catalog"),
        ({"sealed": 2, "catalog": "it is away", "catalog_waiting": 4}, "2 saves sealed, not committed yet; it is away"),
        ({"live": False, "state": "lost", "heard_s": 90.0, "sealed": 2}, None),
    ],
)
def test_how_far_a_node_is_behind(told: dict[str, Any], said: str | None) -> None:
    """In words, with what is unusual only."""
    assert behind(bodies.Node.model_validate(about("a") | told)).value == said

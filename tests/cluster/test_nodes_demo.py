"""The demo of several nodes, as a test: a node is lost for good, the training goes on, and the others show it all."""

from __future__ import annotations

import io
from collections.abc import Iterator

import httpx
import pytest
from rich.console import Console

from holdfast.demo.nodes.story import RESUMED, ClusterStage, cluster, play
from holdfast.rest.api import Api
from holdfast.rest.owner_token import owners
from tests.daemons import wait_until
from tests.dashboard.reading import Page
from tests.databases import why_not

pytestmark = pytest.mark.cluster
STEPS = 24


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterStage]:
    """Three nodes with a PostgreSQL of their own, and what the demo prints."""
    if reason := why_not():
        pytest.skip(reason)
    console = Console(file=io.StringIO(), width=120, highlight=False)
    with cluster(tmp_path_factory.mktemp("nodes"), 3, STEPS, None, console) as started:
        yield started


def test_a_training_goes_on_without_a_node_and_the_others_show_it(made: ClusterStage) -> None:
    """Every claim of the demo holds; API and pages of a node that is left show the loss, the takeover and the run."""
    proven, left = play(made)
    said = made.console.file.getvalue()  # type: ignore[attr-defined]
    assert proven and "✗" not in said and "resumed from the checkpoint of step 12" in said, said
    witness = left[-1]
    (lost,) = {machine.name for machine in made.machines} - {machine.name for machine in left}
    with Api(witness.url) as api:
        nodes = {node.name: node for node in api.nodes()}
        assert nodes[lost].state == "lost" and nodes[lost].duties == [] and nodes[lost].heard_s > 30
        assert {nodes[machine.name].state for machine in left} == {"live"}
        assert {duty for machine in left for duty in nodes[machine.name].duties} >= {"upkeep"}
        rounds = [(round.step, round.state) for round in api.rounds(RESUMED)]
        assert rounds[0] == (STEPS, "committed") and all(state in ("committed", "aborted") for _, state in rounds)
        assert sum(state == "aborted" for _, state in rounds) <= 1  # the save that was going on
        wait_until(lambda: all(found.verified for found in api.checkpoints(RESUMED)), 60)
    with signed_in(witness.url) as pages:
        wait_until(lambda: pages.get("/v1/events", params={"kind": "node-lost"}).json()["items"], 120)
        shown = Page(pages.get("/nodes").text)
        assert f"{lost} is lost." in shown.text and "Forget it" in shown.text and shown.faults() == []
        run = Page(pages.get(f"/runs/{RESUMED}").text)
        assert "Timeline of saves" in run.text and f"/runs/{RESUMED}/checkpoints/{STEPS}" in run.addresses()
        assert "1 lost" in Page(pages.get("/").text).text


def signed_in(url: str) -> httpx.Client:
    """A browser of the daemon's own user."""
    found = owners(url)
    assert found is not None
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {found.token}"}, trust_env=False)

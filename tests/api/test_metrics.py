"""Metrics: the declared table, docs/api.md and what a real daemon exposes after real saves are the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from holdfast import Checkpointer
from holdfast_formats.rest.operations import EVENTS
from holdfast_service.api.request_metrics import ROUTES_MAX, Requests
from holdfast_service.observe.metrics import METRICS, PHASES, RUNS_MAX
from tests.checkpoints import build_root
from tests.daemons import running, wait_until
from tests.serving import Served, served

API_MD = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
Families = dict[str, list[tuple[dict[str, str], float, str]]]


def scrape(url: str) -> Families:
    text = httpx.get(f"{url}/metrics", trust_env=False).raise_for_status().text
    return {
        family.name: [(sample.labels, sample.value, sample.name) for sample in family.samples]
        for family in text_string_to_metric_families(text)
    }


def value(families: Families, name: str, suffix: str = "", **labels: str) -> float:
    (found,) = [
        number for known, number, full in families[name] if known.items() >= labels.items() and full == name + suffix
    ]
    return found


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Families, str]]:
    """What a daemon exposes that a trainer has saved three steps to, and that was asked for something that is not there."""
    root = tmp_path_factory.mktemp("metrics") / "root"
    with running(root, "--node", "node-1", listen="127.0.0.1:0") as daemon:
        model = torch.nn.Linear(64, 64)
        with Checkpointer("llama", {"model": model}, at=str(daemon.socket)) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step).result(180)
            httpx.get(f"{daemon.url}/v1/runs/nope", trust_env=False)
            httpx.get(f"{daemon.url}/no/such/path", trust_env=False)
            path = f"{daemon.url}/v1/runs/llama/checkpoints/3"
            wait_until(lambda: httpx.get(path, trust_env=False).json()["verified"])
            yield scrape(daemon.url), daemon.url


def test_exactly_the_table_is_exposed(scraped: tuple[Families, str]) -> None:
    """Every metric is declared, with its labels, and every declared one is there, beside those of the process."""
    families, _ = scraped
    assert {name for name in families if not name.startswith("process_")} == set(METRICS)
    for name, declared in METRICS.items():
        for labels, _, _ in families[name]:
            assert set(labels) - {"le"} == set(declared.labels), name
    assert value(families, "process_resident_memory_bytes") > 0


def test_units_are_in_the_names() -> None:
    """Base units, at the end of the name, and a help text that says something."""
    for name, declared in METRICS.items():
        assert re.fullmatch(r"holdfast_[a-z_]+", name) and not name.endswith("_total")
        assert not re.search(r"(_ms|_mb|milli|minutes|kilo)", name)
        if declared.kind == "histogram":
            assert name.endswith("_seconds")
        assert len(declared.help) > 15


def test_api_md_lists_the_table() -> None:
    """docs/api.md has one row for each metric, with its labels, and none for another."""
    section = API_MD[API_MD.index("## Metrics") : API_MD.index("## Logs")]
    rows = dict(re.findall(r"^\| `(holdfast_[a-z_]+)` \| (.*) \|$", section, re.MULTILINE))
    exposed = {name + ("_total" if declared.kind == "counter" else ""): declared for name, declared in METRICS.items()}
    assert rows.keys() == exposed.keys()
    for name, declared in exposed.items():
        assert all(f"`{label}`" in rows[name] for label in declared.labels), name


def test_what_three_saves_leave(scraped: tuple[Families, str]) -> None:
    """Counts, phases, ages and bytes follow the saves."""
    families, _ = scraped
    assert value(families, "holdfast_rounds", "_total", state="committed") == 3
    assert value(families, "holdfast_save_seconds", "_count", phase="durable") == 3
    assert value(families, "holdfast_save_seconds", "_sum", phase="durable") > 0
    assert {labels["phase"] for labels, _, _ in families["holdfast_save_seconds"]} == set(PHASES)
    assert value(families, "holdfast_saved_bytes", "_total") >= 3 * 64 * 65 * 4
    assert 0 <= value(families, "holdfast_last_commit_age_seconds", run="llama") < 600
    assert 0 <= value(families, "holdfast_last_verified_age_seconds", run="llama") < 600
    assert 0 < value(families, "holdfast_exposed_seconds", run="llama") < 600
    assert value(families, "holdfast_exposed_steps", run="llama") == 0
    assert value(families, "holdfast_save_failures", run="llama") == 0
    assert value(families, "holdfast_run_bytes", run="llama") > 0
    assert value(families, "holdfast_arena_slots", state="held") >= 1
    assert 0 < value(families, "holdfast_arena_bytes") <= value(families, "holdfast_arena_bytes_max")
    assert value(families, "holdfast_events", "_total", kind="checkpoint-committed") == 3
    assert {labels["kind"] for labels, _, _ in families["holdfast_events"]} == set(EVENTS)
    assert sum(number for _, number, _ in families["holdfast_checkpoints"]) == 3


def test_requests_are_counted_by_route(scraped: tuple[Families, str]) -> None:
    """By template and class of status; what no route answers is one label, whatever its path."""
    families, _ = scraped
    name = "holdfast_http_request_seconds"
    assert value(families, name, "_count", route="/v1/runs/{run}", method="GET", status="4xx") == 1
    assert value(families, name, "_count", route="none", method="GET", status="4xx") == 1
    assert value(families, name, "_count", route="/v1/runs/{run}/checkpoints/{step}", method="GET", status="2xx") >= 1
    assert value(families, "holdfast_http_sent_bytes", "_total") > 0
    assert not any("nope" in labels["route"] or "no/such" in labels["route"] for labels, _, _ in families[name])


def test_number_of_series_is_bounded(tmp_path: Path) -> None:
    """Runs beyond the newest ones have no series of their own, nor have methods and routes without end."""
    build_root(tmp_path, {"tiny": (1,)})
    with served(tmp_path) as running_service:
        catalog = running_service.services.control.catalog
        for n in range(RUNS_MAX + 5):
            catalog.rounds.open(f"run-{n}", 1, 1, 1, "2026-01-02T00:00:00Z")
        families = scrape(running_service.url)
    runs = {labels["run"] for labels, _, _ in families["holdfast_run_bytes"]}
    assert len(runs) == RUNS_MAX
    assert f"run-{RUNS_MAX + 4}" in runs and "run-0" not in runs
    requests = Requests()
    for n in range(ROUTES_MAX + 50):
        requests.add("BREW" if n % 2 else "GET", f"/{n}", 200, 0.1, 1)
    histograms, sent = requests.all()
    assert len(histograms) <= ROUTES_MAX + 2
    assert {method for method, _, _ in histograms} == {"GET", "other"}
    assert sent == ROUTES_MAX + 50


def test_a_service_that_saved_nothing_has_the_table_too(tmp_path: Path) -> None:
    """Every metric is there, and histograms of saves count zero."""
    build_root(tmp_path, {"tiny": (1,)})
    with served(tmp_path) as running_service:
        assert isinstance(running_service, Served)
        families = scrape(running_service.url)
    assert {name for name in families if not name.startswith("process_")} == set(METRICS)
    assert {value for _, value, _ in families["holdfast_save_seconds"]} == {0.0}

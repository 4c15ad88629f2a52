"""The routes: what they answer, how lists go on, and how errors look."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zstandard
from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from holdfast_formats import errors, naming
from holdfast_service.api.app import ROUTERS
from holdfast_service.api.content.open_checkpoints import encode_cursor
from holdfast_service.control.checkpoints import run_files
from tests.checkpoints import build_root
from tests.serving import Served, served

TINY = "/v1/runs/tiny"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service over two runs, which tests only read."""
    root = tmp_path_factory.mktemp("root")
    build_root(root, {"tiny": (5, 10, 15), "other": (1,)})
    with served(root) as running:
        running.services.control.catalog.rounds.open("tiny", 20, 1, 2, "2026-01-02T00:00:00Z")
        yield running


def walk(http: httpx.Client, path: str, limit: int) -> list[dict]:
    """Every item of a list, page by page."""
    items: list[dict] = []
    cursor: dict[str, str] = {}
    while True:
        page = http.get(path, params={"limit": limit, **cursor}).raise_for_status().json()
        assert len(page["items"]) <= limit
        items += page["items"]
        if page["next"] is None:
            return items
        cursor = {"cursor": page["next"]}


def test_runs(http: httpx.Client) -> None:
    """Runs are listed by name with what they hold; one run is the same item."""
    listed = walk(http, "/v1/runs", 1)
    assert [(run["name"], run["checkpoints"], run["newest"]) for run in listed] == [("other", 1, 1), ("tiny", 3, 15)]
    assert http.get("/v1/runs/tiny").json() == listed[1]


def test_checkpoints(http: httpx.Client) -> None:
    """Checkpoints come newest first, in pages of any size; `latest` is the newest of them."""
    assert [made["step"] for made in walk(http, f"{TINY}/checkpoints", 2)] == [15, 10, 5]
    latest = http.get(f"{TINY}/checkpoints/latest").json()
    assert latest == http.get(f"{TINY}/checkpoints/15").json()
    assert (latest["groups"], latest["metrics"]) == (["model", "optim", "extra"], {"loss": 2.5})


def test_tensors(http: httpx.Client) -> None:
    """Tensors and aliases come group by group in natural order, whole or one group of them."""
    path = f"{TINY}/checkpoints/latest/tensors"
    every = walk(http, path, 2)
    assert every == walk(http, path, 1000)
    assert [tensor["group"] for tensor in every] == ["model"] * 6 + ["optim"] * 3
    aliases = [tensor for tensor in every if tensor["alias_of"]]
    assert [(tensor["name"], tensor["alias_of"]) for tensor in aliases] == [("lm_head.weight", "embed.weight")]
    assert http.get(path, params={"group": "optim"}).json()["items"] == every[6:]
    assert http.get(path, params={"group": "nope"}).json()["code"] == "no-such-resource"


def test_files_page(http: httpx.Client) -> None:
    """The list of files goes on behind its cursor."""
    path = f"{TINY}/checkpoints/5/files"
    assert walk(http, path, 3) == walk(http, path, 1000)


def test_manifest(http: httpx.Client, service: Served) -> None:
    """The manifest's validator is its SHA-256; with zstd it is smaller, the same, and has a validator of its own."""
    path = f"{TINY}/checkpoints/5/manifest"
    stored = (service.root / naming.checkpoint_path("tiny", 5) / naming.MANIFEST).read_bytes()
    plain = http.get(path, headers={"Accept-Encoding": "identity"})
    assert (plain.content, plain.headers["etag"]) == (stored, f'"{hashlib.sha256(stored).hexdigest()}"')
    assert http.get(path, headers={"If-None-Match": plain.headers["etag"], "Accept-Encoding": "gzip"}).status_code == 304
    with http.stream("GET", path, headers={"Accept-Encoding": "gzip, zstd;q=0.5"}) as packed:
        raw = b"".join(packed.iter_raw())
    assert packed.headers["content-encoding"] == "zstd"
    assert packed.headers["etag"] != plain.headers["etag"]
    assert len(raw) < len(stored)
    assert zstandard.ZstdDecompressor().decompress(raw) == stored
    refused = http.get(path, headers={"Accept-Encoding": "zstd;q=0"})
    assert "content-encoding" not in refused.headers


def test_rounds_and_nodes(http: httpx.Client) -> None:
    """Rounds can be asked for by run and state; the node says what it is."""
    (found,) = http.get("/v1/rounds", params={"run": "tiny", "state": "open"}).json()["items"]
    assert (found["run"], found["step"], found["state"]) == ("tiny", 20, "open")
    assert http.get("/v1/rounds", params={"run": "other"}).json()["items"] == []
    assert http.get("/v1/nodes").json()["items"][0]["name"] == "node-1"


def test_health_and_readiness(http: httpx.Client) -> None:
    """Both say the version; readiness has asked catalog and storage."""
    assert http.get("/healthz").json()["status"] == "ok"
    assert http.get("/readyz").json() == {"status": "ready", "version": "9.9", "root": http.get("/healthz").json()["root"]}


def test_metrics(http: httpx.Client) -> None:
    """The metrics parse, and follow catalog and node."""
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    assert families["holdfast_rounds_open"].samples[0].value == 1
    assert families["holdfast_arena_bytes"].samples[0].value == 4096
    assert {sample.labels["state"] for sample in families["holdfast_rounds"].samples} == {
        *("committed", "aborted", "dropped")
    }
    assert families["holdfast_storage_free_bytes"].samples[0].value > 0


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/runs/nope", 404, "no-such-run"),
        ("/v1/runs/nope/checkpoints", 404, "no-such-run"),
        ("/v1/runs/nope/checkpoints/latest", 404, "no-such-run"),
        (f"{TINY}/checkpoints/6", 404, "no-such-checkpoint"),
        (f"{TINY}/checkpoints/6/manifest", 404, "no-such-checkpoint"),
        (f"{TINY}/checkpoints/6/tensors", 404, "no-such-checkpoint"),
        (f"{TINY}/checkpoints/6/files/config.json", 404, "no-such-checkpoint"),
        (f"{TINY}/checkpoints/newest", 400, "invalid-request"),
        (f"{TINY}/checkpoints/-1", 400, "invalid-request"),
        (f"{TINY}/checkpoints/{10**30}", 400, "invalid-request"),
        ("/v1/runs?limit=0", 400, "invalid-request"),
        ("/v1/runs?limit=1001", 400, "invalid-request"),
        ("/v1/runs?cursor=%25%25", 400, "invalid-request"),
        (f"{TINY}/checkpoints?cursor=AAAA", 400, "invalid-request"),
        (f"{TINY}/checkpoints/5/tensors?cursor=!!", 400, "invalid-request"),
        (f"{TINY}/checkpoints/5/tensors?cursor={encode_cursor('one')}", 400, "invalid-request"),
        ("/v1/rounds?state=done", 400, "invalid-request"),
        ("/v1/nothing", 404, "no-such-resource"),
    ],
)
def test_errors_are_problems(http: httpx.Client, path: str, status: int, code: str) -> None:
    """Every error is problem+json with the status, code and hint of the error tree, and rebuilds as the same error."""
    got = http.get(path)
    body = got.json()
    assert got.headers["content-type"] == "application/problem+json"
    assert (got.status_code, body["status"], body["code"]) == (status, status, code)
    assert body["type"] == f"/problems/{code}"
    assert errors.from_problem(body).code == code


def test_wrong_method(http: httpx.Client) -> None:
    """405 is a problem too, and says which methods there are."""
    got = http.post("/v1/runs")
    assert (got.status_code, got.json()["status"], got.headers["allow"]) == (405, 405, "GET")
    assert got.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (f"{TINY}/policy", "GET, PUT"),
        (f"{TINY}/checkpoints/5", "DELETE, GET"),
        (f"{TINY}/checkpoints/5/pin", "DELETE, PUT"),
        (f"{TINY}/checkpoints/5/files/COMMIT", "GET, HEAD"),
        ("/v1/jobs", "GET, POST"),
        ("/v1/tokens", "GET, POST"),
        (f"/v1/ranks/{'0' * 32}", "DELETE, PUT"),
        ("/runs/tiny/policy", "GET, POST"),
    ],
)
def test_wrong_method_where_there_are_several(http: httpx.Client, path: str, allowed: str) -> None:
    """Allow has what every route of the path can do, not only the first one."""
    assert http.request("PATCH", path).headers["allow"] == allowed


def test_remove(tmp_path: Path) -> None:
    """DELETE removes a checkpoint and answers 204; a pinned one stays and answers 409."""
    build_root(tmp_path, {"tiny": (5, 10)})
    with served(tmp_path) as running, httpx.Client(base_url=running.url, trust_env=False) as http:
        assert http.delete(f"{TINY}/checkpoints/5").status_code == 204
        assert http.get(f"{TINY}/checkpoints/5").status_code == 404
        assert not (tmp_path / naming.checkpoint_path("tiny", 5)).exists()
        run_files.write_run_file(running.services.control.records, "tiny", run_files.RunFile(pins=(10,)))
        refused = http.delete(f"{TINY}/checkpoints/10")
        assert (refused.status_code, refused.json()["code"]) == (409, "pinned")
        assert http.delete(f"{TINY}/checkpoints/5").json()["code"] == "no-such-checkpoint"
        assert http.delete(f"{TINY}/checkpoints/latest").status_code == 400


def test_unknown_errors_stay_opaque(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is not one of ours is answered with an id alone; the log has the id and the cause."""

    def broken() -> None:
        raise RuntimeError("password is hunter2")

    with served(tmp_path, node=broken) as running:
        got = httpx.get(f"{running.url}/v1/nodes", trust_env=False)
    body = got.json()
    assert (got.status_code, body["code"]) == (500, "internal-error")
    assert "hunter2" not in got.text
    assert any(body["reference"] in record.message and record.exc_info for record in caplog.records)


def test_openapi(service: Served) -> None:
    """The description is complete: every operation has a summary, a tag and the problem as its other answer."""
    described = service.app.openapi()
    operations_listed = [operation for item in described["paths"].values() for operation in item.values()]
    assert len(operations_listed) == len([route for route in api_routes() if route.include_in_schema])
    for operation in operations_listed:
        assert operation["summary"]
        assert operation["tags"]
        assert "application/problem+json" in operation["responses"]["default"]["content"]
    assert "Problem" in described["components"]["schemas"]


def test_api_md_names_every_route_error_and_metric(http: httpx.Client) -> None:
    """docs/api.md has every route with its method, every error code with its status, and every metric."""
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    for route in api_routes():
        path = re.sub(r"\{(\w+)(:\w+)?\}", r"{\1}", route.path)
        for method in route.methods or ():
            assert re.search(rf"`{method} {re.escape(path)}`", text), f"{method} {path}"
    for leaf in errors.LEAVES:
        assert re.search(rf"`{leaf.code}` \| {leaf.status} ", text), leaf.code
    for family in text_string_to_metric_families(http.get("/metrics").text):
        assert family.name in text or family.name.startswith("process_")


def test_apps_do_not_share_state(tmp_path: Path) -> None:
    """Two apps in one process serve each their own root."""
    for name in ("one", "two"):
        build_root(tmp_path / name, {name: (1,)})
    with served(tmp_path / "one") as one, served(tmp_path / "two") as two:
        listed = [httpx.get(f"{running.url}/v1/runs", trust_env=False).json()["items"] for running in (one, two)]
    assert [[run["name"] for run in items] for items in listed] == [["one"], ["two"]]
    assert isinstance(one.app, FastAPI)


def api_routes() -> list[APIRoute]:
    """Every route of ours."""
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]

"""Lists in another order than by step: every page, whatever is equal, and cursors that belong to one order."""

from __future__ import annotations

import httpx
import pytest

from benchmarks import catalog_rows
from tests.serving import Served, served


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory):
    with served(tmp_path_factory.mktemp("root")) as running:
        database = running.services.control.catalog.database
        size = catalog_rows.Size(1, 25, 1)
        catalog_rows.fill(database, size)
        yield running


@pytest.mark.parametrize("sort", ["step", "-step", "created", "-created", "bytes", "-bytes", "tensors", "-tensors"])
def test_pages(service: Served, sort: str) -> None:
    """Pages together are the whole list, in order, each item once; equal values are in the order of steps."""
    steps, cursor = [], None
    path = f"{service.url}/v1/runs/{catalog_rows.name(0)}/checkpoints"
    while True:
        params = {"sort": sort, "limit": 4, **({"cursor": cursor} if cursor else {})}
        answer = httpx.get(path, params=params, trust_env=False).raise_for_status().json()
        steps += [item["step"] for item in answer["items"]]
        if (cursor := answer["next"]) is None:
            break
    assert steps == sorted(range(25), reverse=sort.startswith("-"))


def test_refused(service: Served) -> None:
    """A column that there is none of, and a cursor of another order."""
    path = f"{service.url}/v1/runs/{catalog_rows.name(0)}/checkpoints"
    assert httpx.get(path, params={"sort": "loss; DROP"}, trust_env=False).status_code == 400
    cursor = httpx.get(path, params={"sort": "bytes", "limit": 2}, trust_env=False).json()["next"]
    for sort in ("-bytes", "created", "-step"):
        assert httpx.get(path, params={"sort": sort, "cursor": cursor}, trust_env=False).status_code == 400

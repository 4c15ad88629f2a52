"""Many holders of tokens at once, fifty in the long form, each for a run of their own: every list, page, metric and stream
has that run alone, while all of them change something.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import NamedTuple

import httpx
import pytest

from holdfast_formats.rest.operations import TokenRequest
from holdfast_service.api.access.authentication import Policy
from tests.attack.matrix import ROUTES, Route
from tests.checkpoints import build_root
from tests.serving import Served, served

HOLDERS = 50
_NAMED = re.compile(r"holder-\d\d")
LISTS = [route for route in ROUTES if route.method == "GET" and route.about == "seen" and "{" not in route.path]
OF_A_RUN = [route for route in ROUTES if route.method == "GET" and route.about == "path" and "{label}" not in route.path]


class Holder(NamedTuple):
    number: int
    token: str

    @property
    def run(self) -> str:
        return f"holder-{self.number:02}"


class Crowd(NamedTuple):
    service: Served
    holders: list[Holder]


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    root = tmp_path_factory.mktemp("crowd") / "root"
    build_root(root, {f"holder-{number:02}": (5,) for number in range(HOLDERS)})
    with served(root, access=Policy(tokens=True)) as service:
        tokens = service.services.tokens
        wanted = [TokenRequest(name=f"t{number}", scope="admin", runs=f"holder-{number:02}") for number in range(HOLDERS)]
        yield Crowd(service, [Holder(number, tokens.create(one).token) for number, one in enumerate(wanted)])


def asked(client: httpx.Client, holder: Holder, path: str) -> str:
    """An answer in which no run but the holder's is named."""
    answer = client.get(path)
    assert answer.status_code in (200, 400, 404), (path, answer.text[:300])
    assert set(_NAMED.findall(answer.text)) <= {holder.run}, (holder, path)
    return answer.text


def marked(lines: Iterator[str]) -> str:
    """The run of the next event of a stream that tells of a pin."""
    told = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
    return next(str(event["run"]) for event in told if event.get("kind") == "mark-changed")


def everything(crowd: Crowd, holder: Holder, start: Barrier, full: bool) -> int:
    """Lists, pages, another's run, and the stream, while others do the same; how many requests these were.

    Each list is asked for by 3 or more of the holders, each page and route about a run by one or more. In the long form all
    ask for everything of the API, and 6 or more for each page, which costs many times as much.
    """
    url, other = crowd.service.url, f"holder-{(holder.number + 1) % HOLDERS:02}"
    headers = {"Authorization": f"Bearer {holder.token}"}

    def due(routes: list[Route], often: int, seldom: int) -> list[Route]:
        return [route for number, route in enumerate(routes) if (number + holder.number) % (often if full else seldom) == 0]

    lists, pages = ([route for route in LISTS if route.is_page is is_page] for is_page in (False, True))
    own = due([route for route in OF_A_RUN if not route.is_page], 1, 16)
    own += due([route for route in OF_A_RUN if route.is_page], 8, 16)
    paths = [route.path for route in (*due(lists, 1, 4), *due(pages, 8, 16))]
    paths += [route.target(holder.run) for route in own]
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=120, verify=False) as client:
        with client.stream("GET", "/v1/events", headers={"Accept": "text/event-stream"}) as stream:
            lines = stream.iter_lines()
            next(lines)
            start.wait(300)
            assert client.put(f"/v1/runs/{holder.run}/checkpoints/5/pin").status_code == 204
            assert marked(lines) == holder.run
        found = [asked(client, holder, path) for path in ["/v1/runs", *paths]]
        assert holder.run in found[0]
        for route in own:
            assert client.get(route.target(other)).status_code in (400, 404), route
        assert client.delete(f"/v1/runs/{other}/checkpoints/5/pin").status_code == 403
        assert client.delete(f"/v1/runs/{holder.run}/checkpoints/5/pin").status_code == 204
    return len(paths)


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.attack)])
def test_many_holders_at_once(crowd: Crowd, full: bool) -> None:
    """Each sees their own run and no other; and the audit log has what each did, and shows each theirs."""
    began = time.monotonic()
    asking = crowd.holders if full else crowd.holders[::3]
    start = Barrier(len(asking))
    with ThreadPoolExecutor(len(asking)) as pool:
        counts = list(pool.map(lambda holder: everything(crowd, holder, start, full), asking))
    assert min(counts) >= 2
    print(f"\n{len(asking)} holders asked for {sum(counts)} things in {time.monotonic() - began:.0f} s")
    audit = crowd.service.services.audit
    assert audit.settle(60) and audit.lost == 0
    for holder in asking[::5]:
        entries = httpx.get(
            f"{crowd.service.url}/v1/audit", headers={"Authorization": f"Bearer {holder.token}"}, trust_env=False
        ).json()["items"]
        assert {entry["run"] for entry in entries} == {holder.run}
        assert [entry["kind"] for entry in entries if entry["who"] == f"t{holder.number}" and entry["status"] == 204][
            :2
        ] == [
            "pin-removed",
            "pin-set",
        ]

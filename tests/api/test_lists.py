"""The filters of lists, over HTTP and through the typed client; marks beside checkpoints; the check of the catalog."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import httpx
import pytest
from sqlalchemy import update

from holdfast import Api
from holdfast.rest.filters import Filter, since
from holdfast_formats import naming
from holdfast_formats.errors import CorruptManifest, InvalidRequest
from holdfast_service.control.database.schema import CheckpointRow
from tests.checkpoints import build_root
from tests.serving import Served, served

NOW = "2030-01-01T00:00:00.000Z"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    """A run with four checkpoints: one is damaged, one unhealthy, one verified, one nothing; and another run."""
    build_root(tmp_path, {"tiny": (5, 10, 15, 20), "tall": (1,)})
    with served(tmp_path) as running:
        facts = {5: {"damage": {"code": "x"}}, 10: {"healthy": False, "verified": True}, 15: {"verified": True}}
        with running.services.control.catalog.database.write() as session:
            for step, known in facts.items():
                session.execute(update(CheckpointRow).where(CheckpointRow.step == step).values(**known))
        yield running


@pytest.fixture
def api(service: Served) -> Iterator[Api]:
    with Api(service.url) as connection:
        yield connection


def steps(api: Api, **wanted: object) -> list[int]:
    return [made.step for made in api.checkpoints("tiny", Filter(**wanted))]  # type: ignore[arg-type]


def test_checkpoints_by_state_step_and_time(api: Api) -> None:
    """Each filter alone and all of them together."""
    found = {state: steps(api, state=state) for state in ("damaged", "unhealthy", "verified", "committed")}
    assert found == {"damaged": [5], "unhealthy": [10], "verified": [15], "committed": [20]}
    assert steps(api, step_min=10, step_max=15) == [15, 10]
    created = api.checkpoint("tiny", 20).created
    assert steps(api, since=created) == [20, 15, 10, 5]  # all of one moment
    assert steps(api, since="2999-01-01T00:00:00Z") == []
    assert steps(api, state="verified", step_min=20) == []


def test_checkpoints_by_label(api: Api, service: Served) -> None:
    """Labels and pins are shown, and a label finds what has it; one that nothing has makes an empty list."""
    for step in (5, 15):
        api.request("PUT", f"/v1/runs/tiny/checkpoints/{step}/labels/good")
    api.request("PUT", "/v1/runs/tiny/checkpoints/15/labels/best")
    api.request("PUT", "/v1/runs/tiny/checkpoints/20/pin")
    assert steps(api, label="good") == [15, 5]
    assert steps(api, label="good", state="verified") == [15]
    assert steps(api, label="none") == []
    marks = {made.step: (made.pinned, made.labels) for made in api.checkpoints("tiny")}
    assert marks == {20: (True, []), 15: (False, ["best", "good"]), 10: (False, []), 5: (False, ["good"])}
    assert api.checkpoint("tiny").pinned and api.checkpoint("tiny", 15).labels == ["best", "good"]
    with pytest.raises(InvalidRequest):
        steps(api, label="a label")


def test_a_damaged_run_file_hides_no_checkpoint(api: Api, service: Served) -> None:
    """They are listed without marks; what is asked for by label is an error that names the file."""
    (service.root / "tiny" / naming.RUN_FILE).write_bytes(b"?")
    assert steps(api) == [20, 15, 10, 5]
    with pytest.raises(CorruptManifest):
        steps(api, label="good")


def test_rounds_by_step_and_time(api: Api, service: Served) -> None:
    """Rounds take the same bounds."""
    for step in (1, 2, 3):
        service.services.control.catalog.rounds.open("tiny", step, 1, 1, f"2030-01-0{step}T00:00:00.000Z")
    assert [made.step for made in api.rounds("tiny", wanted=Filter(step_min=2))] == [3, 2]
    assert [made.step for made in api.rounds(wanted=Filter(since="2030-01-02", step_max=2))] == [2]
    assert [made.step for made in api.rounds(state="committed", wanted=Filter(since="2030-01-02"))] == []


def test_runs_by_prefix(api: Api) -> None:
    """The beginning of a name is enough."""
    assert [run.name for run in api.runs("ti")] == ["tiny"]
    assert [run.name for run in api.runs("t")] == ["tall", "tiny"]
    assert list(api.runs("x")) == []


def test_runs_by_any_part_of_their_name_and_by_a_column(service: Served) -> None:
    """In the same order as their summaries, page by page; what is no column is refused."""

    def listed(path: str, **query: str) -> list[str]:
        page = httpx.get(f"{service.url}{path}", params=query, trust_env=False).json()
        names = [run.get("name") or run["run"] for run in page["items"]]
        return names + (listed(path, **{**query, "cursor": page["next"]}) if page["next"] else [])

    for path in ("/v1/runs", "/v1/summaries"):
        assert listed(path, q="IN") == ["tiny"] and listed(path, q="t l") == ["tall"]
        assert listed(path, prefix="t", sort="-name") == ["tiny", "tall"]
        largest = listed(path, sort="-storage", limit="2")
        assert sorted(largest) == sorted(listed(path, q="")) and largest == listed(path, sort="storage")[::-1]
        refused = httpx.get(f"{service.url}{path}", params={"sort": "colour"}, trust_env=False)
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid-request")


@pytest.mark.parametrize(
    "query", ["state=sound", "step_min=-1", "step_max=1e99", "since=yesterday", f"label={'x' * 200}", "label=a%00b"]
)
def test_what_is_no_filter_is_refused(service: Served, query: str) -> None:
    """By name, as an invalid request."""
    refused = httpx.get(f"{service.url}/v1/runs/tiny/checkpoints?{query}", trust_env=False)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid-request")


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v1/runs/a%00b", "invalid-request"),  # no path has such characters
        ("/v1/runs/a%00b/checkpoints", "invalid-request"),
        ("/v1/runs/a%E4%B8%AD/checkpoints", "no-such-run"),
        ("/v1/rounds?run=a%00b", "no-such-run"),
    ],
)
def test_no_run_has_such_a_name(service: Served, path: str, code: str) -> None:
    """What can be no run is not there."""
    assert httpx.get(service.url + path, trust_env=False).json()["code"] == code


def test_the_catalog_is_checked(service: Served) -> None:
    """A directory that is gone is named; nothing is changed by asking."""
    path = f"{service.url}/v1/catalog/check"
    sound = httpx.get(path, trust_env=False).json()
    assert (sound["count"], sound["checkpoints"], sound["manifests_read"]) == (0, 5, 0)
    assert httpx.get(f"{path}?thorough=true", trust_env=False).json()["manifests_read"] == 5
    shutil.rmtree(service.root / naming.checkpoint_path("tiny", 10))
    for _ in range(2):
        found = httpx.get(path, trust_env=False).json()
        assert [(item["kind"], item["run"], item["step"]) for item in found["items"]] == [("listed-but-gone", "tiny", 10)]


def test_times_as_people_give_them() -> None:
    """How long ago, a day, a moment; anything else is refused."""
    now = datetime(2030, 1, 31, 12, tzinfo=timezone.utc)
    given = {"90min": "2030-01-31T10:30:00Z", "12h": "2030-01-31T00:00:00Z", "3d": "2030-01-28T12:00:00Z"}
    assert {text: since(text, now) for text in given} == given
    assert since("2030-01-31") == "2030-01-31T00:00:00Z"
    assert since("2030-01-31T12:00:00+02:00") == "2030-01-31T10:00:00Z"
    assert since(None) is None
    with pytest.raises(InvalidRequest):
        since("soon")

"""Routes of health: tensors sorted and filtered page by page, layers, and what names mean besides numbers."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import CorruptStatistics, InvalidRequest, NoSuchCheckpoint, NoSuchResource, NoSuchRun
from holdfast_formats.rest import bodies
from holdfast_formats.rest.statistics import collect, encode, tabulate
from holdfast_service.api.app import Services
from holdfast_service.control.control import Control
from holdfast_service.control.database.schema import StatisticsRow
from holdfast_service.daemon.checking.health import Examination
from holdfast_service.daemon.checking.verifier import verify
from tests.checkpoints import build
from tests.control.published import mark_verified
from tests.serving import Served, served

RUN = "tiny"
LOSSES = {5: 0.5, 10: 0.25, 15: 0.1}


def arrays(step: int) -> dict[str, dict[str, np.ndarray]]:
    """Twelve layers that differ in everything that one can sort by, and a NaN in the last step."""
    rng = np.random.default_rng(step)
    model = {f"layers.{i}.w": (rng.standard_normal(10 + i) * (i + 1)).astype(np.float32) for i in range(12)}
    for i in range(12):
        model[f"layers.{i}.w"][: 11 - i] = 0
    if step == 15:
        model["layers.7.w"][-2:] = np.nan
    return {"model": model, "optim": {"layers.0.w/step": np.array(step, np.int64)}}


def add(services: Services, control: Control, step: int) -> None:
    """A checkpoint as a saver leaves it: listed, examined, verified."""
    directory = naming.checkpoint_path(RUN, step)
    made = build(services.root.directory / directory, arrays(step), run=RUN, step=step).manifest
    described = bodies.describe(made).model_copy(update={"metrics": {"loss": LOSSES[step]}})
    services.control.catalog.record_checkpoint(described)
    examined = Examination(services.control.records, control.health.before(RUN, step))
    verify(services.control.records, directory, passed=examined.passed)
    found = examined.result(made)
    assert found is not None
    control.health.take(made, found)
    mark_verified(services.control.catalog, RUN, step)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Three checkpoints, the last one unhealthy; and one that nobody has examined."""
    root = tmp_path_factory.mktemp("root")
    build(root / naming.checkpoint_path("other", 1), run="other", step=1)
    with served(root) as running:
        services = running.services
        control = Control(services.control.storage, services.control.catalog, None)
        for step in LOSSES:
            add(services, control, step)
        control.close()
        yield running


@pytest.fixture(scope="module")
def api(service: Served) -> Iterator[Api]:
    with Api(service.url) as api:
        yield api


def test_statistics_of_every_tensor(api: Api) -> None:
    """In the order of names as people count, equal to numpy's."""
    found = list(api.statistics(RUN, 10))
    assert [one.name for one in found] == [*(f"layers.{i}.w" for i in range(12)), "layers.0.w/step"]
    for one in found[:12]:
        now, before = (arrays(step)["model"][one.name].astype(np.float64) for step in (10, 5))
        assert one.mean == pytest.approx(now.mean(), rel=1e-5, abs=1e-6)
        assert one.rms == pytest.approx(np.sqrt((now**2).mean()), rel=1e-5)
        assert one.change == pytest.approx(np.linalg.norm(now - before), rel=1e-5)
        assert (one.changed_from, one.minimum, one.maximum) == (5, now.min(), now.max())
        assert one.zeros == (now == 0).mean()


@pytest.mark.parametrize("sort", ["name", "rms", "change", "nonfinite", "bytes", "zeros"])
def test_pages_hold_every_tensor_once(service: Served, sort: str) -> None:
    """Whatever the order: the most first, each on one page."""
    found: list[dict] = []
    with httpx.Client(base_url=service.url, trust_env=False) as http:
        query = {"sort": sort, "limit": "5", "group": "model"}
        while True:
            page = http.get(f"/v1/runs/{RUN}/checkpoints/15/statistics", params=query).raise_for_status().json()
            found += page["items"]
            if page["next"] is None:
                break
            query["cursor"] = page["next"]
    assert len({one["name"] for one in found}) == len(found) == 12
    keys = {
        "bytes": lambda one: one["elements"],
        "nonfinite": lambda one: one["nan"] + one["inf"],
        "name": lambda one: -int(one["name"].split(".")[1]),
    }
    values = [keys.get(sort, lambda one: one[sort])(one) for one in found]
    assert values == sorted(values, reverse=True)


def test_filters(api: Api) -> None:
    """By group, and by a part of the name."""
    assert [one.name for one in api.statistics(RUN, "latest", "optim")] == ["layers.0.w/step"]
    assert [one.name for one in api.statistics(RUN, part=".1", sort="nonfinite")] == [f"layers.{i}.w" for i in (1, 10, 11)]
    assert list(api.statistics(RUN, part="nobody")) == []
    assert next(iter(api.statistics(RUN, sort="nonfinite"))).name == "layers.7.w"
    assert next(iter(api.statistics(RUN, sort="nonfinite"))).nan == 2


def test_what_is_refused(api: Api, service: Served) -> None:
    """Groups that are not there, cursors of other lists, steps that nobody examined."""
    with pytest.raises(NoSuchResource, match="no group"):
        list(api.statistics(RUN, 10, "ema"))
    with pytest.raises(NoSuchResource, match="no statistics of other@1"):
        list(api.statistics("other", 1))
    path = f"/v1/runs/{RUN}/checkpoints/10/statistics"
    cursor = api.request("GET", path, params={"limit": 2}).json()["next"]
    for wrong in ({"cursor": cursor, "sort": "rms"}, {"cursor": cursor, "q": "nobody"}, {"cursor": "nonsense"}):
        with pytest.raises(InvalidRequest):
            api.request("GET", path, params=wrong)
    for last in (0, 10**6):
        with pytest.raises(InvalidRequest):
            api.layers(RUN, last=last)
    with pytest.raises(NoSuchRun):
        api.layers("nobody")


@pytest.mark.parametrize(("run", "code"), [(RUN, "no-such-checkpoint"), ("none", "no-such-run")])
def test_a_checkpoint_that_does_not_exist_is_not_found(service: Served, run: str, code: str) -> None:
    """404 as for every other resource of a checkpoint, not a directory without COMMIT."""
    answer = httpx.get(f"{service.url}/v1/runs/{run}/checkpoints/0/statistics", trust_env=False)
    assert (answer.status_code, answer.json()["code"]) == (404, code)


def test_layers(api: Api) -> None:
    """A row a layer, a cell a step."""
    shown = api.layers(RUN)
    assert shown.steps == [5, 10, 15]
    assert list(shown.layers) == [f"layers.{i}" for i in range(12)]
    assert [cell.nonfinite for cell in shown.layers["layers.7"] if cell] == [0, 0, 2]
    assert [cell.change is None for cell in shown.layers["layers.3"] if cell] == [True, False, False]
    assert api.layers(RUN, "optim", 1).steps == [15]


def test_names_of_checkpoints(api: Api) -> None:
    """The newest healthy and the best one; the unhealthy one has the best loss, and is neither."""
    assert api.checkpoint(RUN).state == "unhealthy"
    assert api.checkpoint(RUN, "latest-healthy").step == 10
    assert api.best(RUN, "loss").step == 10
    assert api.best(RUN, "loss", "max").step == 5
    assert {one.changed_from for one in api.statistics(RUN, "latest-healthy")} == {5}
    with pytest.raises(NoSuchCheckpoint):
        api.best(RUN, "accuracy")
    with pytest.raises(NoSuchCheckpoint):
        api.checkpoint("other", "latest-healthy")
    for path in (f"/v1/runs/{RUN}/checkpoints/best", f"/v1/runs/{RUN}/checkpoints/best/manifest"):
        with pytest.raises(InvalidRequest, match="needs a metric"):
            api.request("GET", path)


def test_damaged_statistics(api: Api, service: Served) -> None:
    """A named error of this route, and of no other; nor do those of another checkpoint pass for this one's."""
    database = service.services.control.catalog.database
    with database.read() as session:
        sound = session.get_one(StatisticsRow, (RUN, 5)).data
    try:
        for data, tensors in ((sound[:-3], 13), (b"x", 13), (encode(collect(tabulate([]), np.empty(0, np.int64))), 0)):
            with database.write() as session:
                row = session.get_one(StatisticsRow, (RUN, 5))
                row.data, row.tensors = data, tensors
            with pytest.raises(CorruptStatistics):
                list(api.statistics(RUN, 5))
            assert api.layers(RUN).steps == [5, 10, 15]
            assert len(list(api.tensors(RUN, 5))) == 13
    finally:
        with database.write() as session:
            row = session.get_one(StatisticsRow, (RUN, 5))
            row.data, row.tensors = sound, 13

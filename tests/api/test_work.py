"""Jobs that the service does beside checks: comparisons, and the catalog made anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint
from holdfast_formats.rest.jobs import CompareJob, RebuildJob
from tests.checkpoints import build, flip, varied_arrays
from tests.serving import Served, served


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    """Two checkpoints, of which the second has one tensor doubled."""
    arrays: dict[str, dict[str, Any]] = {group: dict(held) for group, held in varied_arrays().items()}
    arrays["model"]["layers.0.q.weight"] = arrays["model"]["layers.0.q.weight"] * np.float32(2)
    build(tmp_path / naming.checkpoint_path("tiny", 5), step=5)
    build(tmp_path / naming.checkpoint_path("tiny", 10), arrays, step=10)
    with served(tmp_path) as running:
        yield running


def compared(api: Api, other: object) -> Any:
    job = api.submit_job(CompareJob(run="tiny", step=5, arguments={"with": other}))
    return api.wait_job(job.id)


def test_two_checkpoints_are_compared_whole(service: Served) -> None:
    """What is equal is counted, what is not is named, the most changed first; progress is in bytes read."""
    with Api(service.url) as api:
        job = compared(api, 10)
    assert (job.state, job.result["tensors"]) == ("done", {"equal": 7, "changed": 1})
    assert [one["name"] for one in job.result["most"]] == ["layers.0.q.weight"]
    assert job.result["most"][0]["relative"] == pytest.approx(1.0)
    assert job.done_bytes == job.total_bytes == 2 * 24 * 40 * 4


def test_tensors_with_nan_are_the_first_that_are_told(service: Served) -> None:
    """Before those that have changed most, of which the page shows the first alone."""
    arrays: dict[str, dict[str, Any]] = {group: dict(held) for group, held in varied_arrays().items()}
    arrays["model"]["layers.0.q.weight"] = arrays["model"]["layers.0.q.weight"] * np.float32(3)
    moments = arrays["optim"]["layers.0.q.weight/exp_avg"]
    arrays["optim"]["layers.0.q.weight/exp_avg"] = np.full_like(moments, np.nan)
    build(service.root / naming.checkpoint_path("tiny", 15), arrays, step=15)
    with Api(service.url) as api:
        api.wait_job(api.submit_job(RebuildJob()).id)
        result = api.wait_job(compared(api, 15).id).result
    assert [one["name"] for one in result["most"]] == ["layers.0.q.weight/exp_avg", "layers.0.q.weight"]
    assert result["nonfinite"] == 1 and result["most"][0]["relative"] is None


def test_what_cannot_be_compared_is_refused_before_it_is_a_job(service: Served) -> None:
    """No checkpoint, or nothing that names one; damage that is met is the job's problem."""
    with Api(service.url) as api:
        for other, error in (("tiny@7", NoSuchCheckpoint), ("latest", InvalidRequest), ("no such run@5", InvalidRequest)):
            with pytest.raises(error):
                compared(api, other)
        with pytest.raises(InvalidRequest, match="with"):
            api.submit_job(CompareJob(run="tiny", step=5))
        tensor = next(t for t in api.tensors("tiny", 10) if t.name == "layers.0.q.weight")
        flip(service.root / naming.checkpoint_path("tiny", 10) / tensor.file, tensor.start + 3)
        job = compared(api, "tiny@10")
    assert (job.state, job.problem["code"], job.problem["tensor"]) == ("failed", "corrupt-extent", "layers.0.q.weight")


def test_the_catalog_is_made_anew_as_a_job(service: Served) -> None:
    """What the catalog had forgotten is listed again."""
    service.services.control.catalog.forget_checkpoint("tiny", 5)
    with Api(service.url) as api:
        job = api.submit_job(RebuildJob())
        made = api.wait_job(job.id)
        assert [item["kind"] for item in made.result["mended"]] == ["not-listed"]
        assert [checkpoint.step for checkpoint in api.checkpoints("tiny")] == [10, 5]

"""The disk is full in the middle of merges: each fails by name, and with room it comes to the same bits."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.rest.jobs import ImportJob, MergeJob
from holdfast_formats.rest.operations import Job
from tests.crash import ledger
from tests.crash.disks import memory_disk
from tests.crash.job_service import JobService, done
from tests.crash.test_hostile import fill, needs_root
from tests.daemons import wait_until

FULL = "disk full in a merge"
FILES = 4
RECIPE = """
merge_method: dare_ties
base_model: base@1
models: [{model: one@1}, {model: directory/two}]
parameters: {weight: 0.6, density: 0.4}
dtype: float32
"""


def put_models(place: Path) -> None:
    chance = np.random.default_rng(4)
    for name in ("base", "one", "directory/two"):
        (place / name).mkdir(parents=True)
        arrays = {f"layers.{i}.weight": chance.standard_normal((100, 200), np.float32) for i in range(FILES)}
        save_file(arrays, place / name / "model.safetensors", metadata={"format": "pt"})
        (place / name / "config.json").write_text("{}")


def put_runs(api: Api) -> None:
    for run in ("base", "one"):
        done(api, api.submit_job(ImportJob(run=run, step=1, arguments={"from": run})))


def wanted(step: int) -> MergeJob:
    return MergeJob(run="merged", step=step, arguments={"recipe": RECIPE})


def has_ended(service: JobService, job: Job) -> bool:
    """Whether the log says that a merge has failed, or it is there: the catalog may have no room to say so."""
    there = service.root / naming.checkpoint_path("merged", job.step or 0) / naming.COMMIT
    return there.exists() or f"job {job.id} failed" in Path(f"{service.root}.log").read_text()


def digests(root: Path, step: int) -> dict[str, list[str]]:
    """Of every extent of a checkpoint's tensors, which have been read back."""
    path = root / naming.checkpoint_path("merged", step)
    made = manifests.decode((path / naming.MANIFEST).read_bytes(), (path / naming.COMMIT).read_bytes())
    return {name: [one.digest for one in tensor.extents] for name, tensor in made.tensors["model"].items()}


@needs_root
@pytest.mark.crash_slow
@pytest.mark.parametrize("tries", [20])
def test_a_disk_that_is_full_in_a_merge(tmp_path: Path, tries: int) -> None:
    """From an act of it on there is not one byte more: the job says so, nothing stays, and with room it is the same."""
    put_models(tmp_path / "place")
    with memory_disk(tmp_path / "root", "64m"), JobService(tmp_path) as service, ThreadPoolExecutor(1) as pool:
        api: Api = service.start()
        put_runs(api)
        service.log.write_bytes(b"")
        done(api, api.submit_job(wanted(0)))
        acts, expected, filler = len(service.acts()), digests(service.root, 0), service.root / "filler"
        failed = 0
        for number in range(1, tries + 1):
            ledger.tried(FULL)
            service.arm(1 + (number - 1) * (acts - 1) // tries, "STOP")
            submitted = pool.submit(api.submit_job, wanted(number))  # it may be answered once the service goes on
            wait_until(lambda: service.stopped)
            fill(filler)
            service.go_on()
            job = submitted.result(180)
            wait_until(lambda job=job: has_ended(service, job))
            filler.unlink()
            while (found := api.job(job.id, 5)).state in ("queued", "running"):
                pass
            if found.state != "done":
                failed += 1
                assert found.problem is not None and found.problem["code"] == "no-space" and found.problem["hint"], found
                assert not os.listdir(service.root / "merged" / naming.STAGING)
                done(api, api.submit_job(wanted(number)))
            assert digests(service.root, number) == expected
            assert not os.listdir(service.root / "merged" / naming.STAGING)
            ledger.survived(FULL)
        assert failed
        api.close()

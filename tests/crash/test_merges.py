"""The service is killed in the middle of merges: each goes on at the next start, and comes to the same bits."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.disk import manifest
from holdfast_formats.rest.operations import JobRequest
from tests.crash import ledger
from tests.crash.test_imports import ImportingService, done

LANE = "service killed in a merge"
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


def wanted(step: int) -> JobRequest:
    return JobRequest(kind="merge", run="merged", step=step, arguments={"recipe": RECIPE})


def digests(root: Path, step: int) -> dict[str, list[str]]:
    """Of every extent of a checkpoint's tensors, which have been read back."""
    path = root / naming.checkpoint_path("merged", step)
    made = manifest.decode((path / naming.MANIFEST).read_bytes(), (path / naming.COMMIT).read_bytes())
    return {name: [one.digest for one in tensor.extents] for name, tensor in made.tensors["model"].items()}


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.crash_slow)])
def test_killed_in_a_merge(tmp_path: Path, kills: int) -> None:
    """At acts all over it, the last one after the commit: it repeats one file at most, and no bit is another one."""
    put_models(tmp_path / "place")
    with ImportingService(tmp_path) as service:
        api: Api = service.start()
        for run in ("base", "one"):
            done(api, api.submit_job(JobRequest(kind="import", run=run, step=1, arguments={"from": run})))
        service.log.write_bytes(b"")
        done(api, api.submit_job(wanted(0)))
        acts, expected = len(service.acts()), digests(service.root, 0)
        for number in range(1, kills + 1):
            ledger.tried(LANE)
            point = 1 + number * (acts - 1) // kills
            service.log.write_bytes(b"")
            Path(f"{service.log}.kill").write_text(str(point))
            job = api.submit_job(wanted(number))
            api.close()
            api = service.restarted()
            done(api, job)
            created = Counter(line for line in service.acts() if line.startswith("create ") and ".safetensors" in line)
            assert len(created) == FILES and sum(created.values()) - len(created) <= 1, (point, created)
            assert digests(service.root, number) == expected
            assert not os.listdir(service.root / "merged" / naming.STAGING)
            ledger.survived(LANE)
        api.close()

"""The service is killed at acts all over its jobs: each goes on at the next start, and repeats one file at most."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast.read.root_directory import open_checkpoint
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.rest.jobs import ExportJob, ImportJob
from tests.crash import ledger, test_exports, test_merges
from tests.crash.job_service import JobService, done
from tests.crash.test_exports import STEP, WAYS, files_of, points
from tests.in_memory import in_memory

RNG = np.random.default_rng(11)
ARRAYS = {f"layers.{number}.weight": RNG.standard_normal((100, 200)).astype(np.float32) for number in range(6)}


class Work(Protocol):
    """A kind of job, with all that it needs in place; `number` is each try's own, and 0 of the undisturbed one."""

    def job(self, number: int) -> object:
        """What is submitted."""

    def check(self, number: int) -> None:
        """What came of a try is what comes of one that nothing disturbs, and nothing is beside it."""


class Import:
    def __init__(self, service: JobService, api: Api) -> None:
        self._root, source = service.root, service.place / "model"
        source.mkdir(parents=True)
        save_file(ARRAYS, source / "model.safetensors")
        (source / "config.json").write_text("{}")

    def job(self, number: int) -> object:
        return ImportJob(run="mine", step=number, arguments={"from": "model"})

    def check(self, number: int) -> None:
        with open_checkpoint(self._root, None, "mine", number) as reader:
            assert reader.verify() == []
            for name, array in ARRAYS.items():
                assert np.array_equal(reader.read("model", name), array)
        assert not os.listdir(self._root / "mine" / naming.STAGING)


class Merge:
    """No bit is another one."""

    def __init__(self, service: JobService, api: Api) -> None:
        self._root = service.root
        test_merges.put_models(service.place)
        test_merges.put_runs(api)

    def job(self, number: int) -> object:
        return test_merges.wanted(number)

    def check(self, number: int) -> None:
        assert test_merges.digests(self._root, number) == test_merges.digests(self._root, 0)
        assert not os.listdir(self._root / "merged" / naming.STAGING)


class Export:
    """Of all kinds, as a directory of that name."""

    def __init__(self, service: JobService, api: Api, name: str) -> None:
        self._place, self._way = service.place, WAYS[name]
        self._place.mkdir()
        test_exports.fill(service.root)

    def job(self, number: int) -> object:
        where = {"to": "out" if number else "clean", **self._way.arguments}
        return ExportJob(run=self._way.run, step=STEP, arguments=where)

    def check(self, number: int) -> None:
        if number:
            assert sorted(os.listdir(self._place)) == ["clean", "out"]
            assert files_of(self._place / "out") == files_of(self._place / "clean")
            shutil.rmtree(self._place / "out")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: what a kill leaves asks nothing of a disk."""
    with in_memory() as directory:
        yield directory


def kinds() -> Iterator[object]:
    """Every kind of job: some are killed twice, and all at more acts in the long lane."""
    work: dict[str, Callable[[JobService, Api], Work]] = {"import": Import, "merge": Merge}
    work |= {f"export-{name}".replace(" ", "-"): partial(Export, name=name) for name in WAYS}
    for name, kind in work.items():
        if name in ("import", "merge", "export-hf"):
            yield pytest.param(kind, 2, id=name)
        often = 3 if name.startswith("export") else 20
        yield pytest.param(kind, often, id=f"{name}-often", marks=pytest.mark.crash_slow)


@pytest.mark.parametrize(("kind", "kills"), [*kinds()])
def test_killed_in_a_job(kind: Callable[[JobService, Api], Work], kills: int, tmp_path: Path) -> None:
    """At acts all over it, the last one when all is done: after the restart the job is done, whether or not it had been
    before it could say so, and what it made is sound.
    """
    lane = "service killed in a job"
    with JobService(tmp_path) as service:
        api = service.start()
        work = kind(service, api)
        service.log.write_bytes(b"")
        done(api, api.submit_job(work.job(0)))
        acts, files = len(service.acts()), service.created().keys()
        work.check(0)
        for number, at in enumerate(points(acts, kills + 1)[1:], 1):
            ledger.tried(lane)
            service.arm(at)
            job = api.submit_job(work.job(number))
            api.close()
            api = service.restarted()
            assert done(api, job).result is not None
            created = service.created()
            assert len(created) == len(files) and sum(created.values()) - len(created) <= 1, (at, created)
            work.check(number)
            ledger.survived(lane)
        api.close()

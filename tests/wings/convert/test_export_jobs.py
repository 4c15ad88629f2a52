"""Exports for other programs: complete or not there, proven, gone on with after an interruption, and every job refused early
that must fail.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from holdfast_formats import naming
from holdfast_formats.errors import (
    AlreadyCommitted,
    CheckpointError,
    CorruptExtent,
    InUse,
    InvalidRequest,
    NoSpace,
    StateMismatch,
)
from holdfast_formats.rest.jobs import ExportJob
from holdfast_formats.rest.operations import Job
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.jobs.runner import Interrupted
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.storage import PosixStore, PosixTier
from tests.checkpoints import build, flip
from tests.daemon.copies_world import CopiesWorld, copies_world
from tests.job_requests import an_export
from tests.wings.convert.exports.sources import LLAMA, llama, trained, values_of
from tests.wings.convert.transfers import Transfers

WEIGHTS = llama(hidden=16)
GROUPS = trained(WEIGHTS)
ASSETS = {"config.json": json.dumps(LLAMA).encode()}
RUN, STEP = "llama", 2


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CopiesWorld]:
    with copies_world(tmp_path, replicas=()) as made:
        path = made.root / naming.checkpoint_path(RUN, STEP)
        build(path, GROUPS, run=RUN, step=STEP, assets=ASSETS, ranks=values_of(list(WEIGHTS)), file_bytes_max=20_000)
        roots.reconcile(PosixStore(made.tier), made.catalog)
        yield made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "place"
    made.mkdir()
    return made


@pytest.fixture
def transfers(world: CopiesWorld, place: Path) -> Transfers:
    return Transfers(world.control, world.repairer, place)


def job(tries: int = 1, **arguments: object) -> Job:
    made = {"created": "now", "started": "now", "ended": None, "done_bytes": 0, "total_bytes": 0, "node": "node"}
    return Job(id=1, kind="export", state="running", run=RUN, step=STEP, arguments=arguments, tries=tries, **made)


class Told:
    """Remembers how far it was told that the work is, and ends it at the n-th word."""

    def __init__(self, stop_at: int = 0, how: type[BaseException] = KeyboardInterrupt) -> None:
        self.reports: list[tuple[int, int]] = []
        self._stop_at, self._how = stop_at, how

    def report(self, done_bytes: int, total_bytes: int) -> None:
        self.reports.append((done_bytes, total_bytes))
        if len(self.reports) == self._stop_at:
            raise self._how


def test_averages_as_a_hugging_face_directory(transfers: Transfers, place: Path) -> None:
    """The directory appears whole, the report says what was done, the progress ends at its end."""
    told = Told()
    done = transfers.export_job(job(to="sub/out", **{"as": "hf", "weights": "ema", "dtype": "f32"}), told)
    found = load_file(place / "sub" / "out" / "model.safetensors")
    assert found.keys() == WEIGHTS.keys()
    for name, array in GROUPS["ema"].items():
        assert found[name].tobytes() == array.tobytes()
    assert os.listdir(place / "sub") == ["out"]
    assert (done["to"], done["as"], done["tensors"], done["committed"]) == ("sub/out", "hf", len(WEIGHTS), False)
    assert done["files"] == 3 and done["bytes"] == sum(p.stat().st_size for p in (place / "sub" / "out").iterdir())
    assert {one["what"] for one in done["left_out"]} >= {f"group optim ({3 * len(WEIGHTS)} tensors)"}
    assert told.reports[-1][0] == told.reports[-1][1] == 2 * done["bytes"]
    json.dumps(done)


@pytest.mark.parametrize("kind", ["dcp", "paddle-uc", "paddle-flex"])
def test_the_other_ways(transfers: Transfers, place: Path, kind: str) -> None:
    """Files in subdirectories too; the same bytes whenever it is done."""
    transfers.export_job(job(to="a", **{"as": kind}), Quiet())
    transfers.export_job(job(to="b", **{"as": kind}), Quiet())
    files = [{str(p.relative_to(place / d)): p.read_bytes() for p in (place / d).rglob("*") if p.is_file()} for d in "ab"]
    assert files[0] == files[1] and files[0]
    assert sorted(os.listdir(place)) == ["a", "b"]


def test_an_interrupted_job_goes_on(transfers: Transfers, place: Path) -> None:
    """A service that closes leaves what is finished; the next start writes the rest, and the notes go."""
    wanted = {"to": "out", "as": "paddle-uc"}
    with pytest.raises(Interrupted):
        transfers.export_job(job(**wanted), Told(4, Interrupted))
    staged = place / ".out.partial"
    before = {path.name: path.stat().st_ino for path in staged.iterdir()}
    finished = {path.name for path in staged.iterdir()} - {max(staged.iterdir(), key=lambda p: p.stat().st_mtime_ns).name}
    assert finished
    transfers.export_job(job(tries=2, **wanted), Quiet())
    assert os.listdir(place) == ["out"]
    for name in finished:
        assert (place / "out" / name).stat().st_ino == before[name]
    model = load_file(place / "out" / "model-00001-of-00001.safetensors")
    assert all(model[name].tobytes() == array.tobytes() for name, array in WEIGHTS.items())


@pytest.mark.parametrize("stop_at", [1, 3, 8])
def test_a_cancelled_job_leaves_nothing(transfers: Transfers, place: Path, stop_at: int) -> None:
    """Neither files nor notes."""
    with pytest.raises(KeyboardInterrupt):
        transfers.export_job(job(to="out", **{"as": "paddle-uc"}), Told(stop_at))
    assert os.listdir(place) == []


@pytest.mark.parametrize("group", ["model", "ema"])
def test_damage_is_not_exported(world: CopiesWorld, transfers: Transfers, place: Path, group: str) -> None:
    """A flipped bit of what is exported is named and nothing is left; one of what is not does no harm."""
    made = roots.load_manifest(world.tier, RUN, STEP)
    entry = made.tensors[group]["model.norm.weight"]
    flip(world.root / naming.checkpoint_path(RUN, STEP) / entry.file, entry.start)
    wanted = job(to="out", **{"as": "hf", "weights": "ema"})
    if group == "model":
        transfers.export_job(wanted, Quiet())
        return
    with pytest.raises(CorruptExtent) as caught:
        transfers.export_job(wanted, Quiet())
    assert caught.value.members["tensor"] == "model.norm.weight" and os.listdir(place) == []


class Flipping(PosixTier):
    """Turns a bit of every file that it reads back."""

    def read_stored(self, path: str, offset: int, buffer: np.ndarray) -> int:  # type: ignore[override]
        read = super().read_stored(path, offset, buffer)
        buffer[0] ^= 1
        return read


def test_a_copy_that_is_not_what_was_written(world: CopiesWorld, transfers: Transfers, place: Path) -> None:
    """It is read back before it gets its name."""

    with pytest.raises(CorruptExtent, match="differ from what was written"):
        transfers.export(Flipping(place), an_export(RUN, STEP, "out", **{"as": "hf"}), Quiet())
    assert os.listdir(place) == []


def test_a_disk_without_room_is_said_first(transfers: Transfers, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written."""
    monkeypatch.setattr(PosixTier, "free_bytes", lambda self: 100)
    with pytest.raises(NoSpace, match="100 are free"):
        transfers.export_job(job(to="out", **{"as": "hf"}), Quiet())
    assert os.listdir(place) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"as": "onnx"}, "unknown format"),
        ({"as": "hf", "weights": "average"}, "unknown choice of weights 'average'"),
        ({"as": "hf", "dtype": "int4"}, "int4"),
        ({"as": "hf", "model_only": True}, "'model_only'"),
        ({"as": "hf", "weight": "ema"}, "'weight'"),
        ({"as": "hf", "dtype": 16}, "'dtype'"),
        ({"as": "hf", "layout": ""}, "'layout'"),
        ({"as": 5}, "'as'"),
        ({"weights": "ema"}, "'weights' of an export needs `as`"),
        ({"as": "hf", "to": "../out"}, "'../out'"),
    ],
)
def test_what_must_fail_is_refused_before_it_is_a_job(
    transfers: Transfers, place: Path, arguments: dict[str, object], says: str
) -> None:
    """By the argument's name."""
    with pytest.raises(InvalidRequest) as caught:
        transfers.check(ExportJob(run=RUN, step=STEP, arguments={"to": "out", **arguments}))
    assert says in str(caught.value) and os.listdir(place) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"as": "peft"}, CheckpointError),
        ({"as": "dcp", "layout": "megatron"}, InvalidRequest),
        ({"as": "hf", "program": "statements = 'a -> b'"}, InvalidRequest),
        ({"as": "paddle-uc", "weights": "ema"}, InvalidRequest),
    ],
)
def test_what_does_not_fit_the_checkpoint_leaves_nothing(
    transfers: Transfers, place: Path, arguments: dict[str, object], error: type[CheckpointError]
) -> None:
    """It is found when the files are planned, before one is written."""
    with pytest.raises(error):
        transfers.export_job(job(to="out", **arguments), Quiet())
    assert os.listdir(place) == []


def test_a_name_that_is_taken(transfers: Transfers, place: Path) -> None:
    """It stays as it is."""
    (place / "out").mkdir()
    with pytest.raises(AlreadyCommitted):
        transfers.export_job(job(to="out", **{"as": "hf"}), Quiet())
    assert os.listdir(place) == ["out"] and not os.listdir(place / "out")


PROGRAM = """
name = "up"
from = "hf"
to = "mine"
statements = '''
(.*)\\.up_proj.weight -> $1.UP.weight
* -> *
'''
"""


def test_two_exports_to_one_name(transfers: Transfers, place: Path) -> None:
    """The second one is refused while the first writes: both used to write into one directory, and one published it."""
    refused = []

    class Meanwhile(Told):
        def report(self, done_bytes: int, total_bytes: int) -> None:
            for other in ("dcp", None):
                with pytest.raises(InUse) as raised:
                    transfers.export_job(job(to="out", **({"as": other} if other else {})), Told())
                refused.append(raised.value)

    transfers.export_job(job(to="out", **{"as": "hf"}), Meanwhile())
    assert refused and os.listdir(place) == ["out"]
    assert not any(name.endswith(".distcp") or name == naming.COMMIT for name in os.listdir(place / "out"))


def test_not_into_a_run(world: CopiesWorld) -> None:
    """Where the directory for exports is above the root, a job could make a directory that looks like a checkpoint."""
    (world.root / naming.LOCK).touch()
    transfers = Transfers(world.control, world.repairer, world.root.parent)
    for arguments in ({}, {"as": "hf"}):
        wanted = {"to": f"{world.root.name}/{naming.checkpoint_path(RUN, 9)}", **arguments}
        with pytest.raises(InvalidRequest, match="outside the checkpoint root"):
            transfers.check(ExportJob(run=RUN, step=STEP, arguments=wanted))
        with pytest.raises(InvalidRequest, match="outside the checkpoint root"):
            transfers.export_job(job(**wanted), Told())


def test_a_program_renames_what_belongs_together(transfers: Transfers, place: Path) -> None:
    """Weights and averages have the new names; the report names the program."""
    program = PROGRAM.replace(
        "(.*)\\.up_proj.weight -> $1.UP.weight",
        "model.layers.$LAYER_ID.mlp.up_proj.weight -> model.layers.$LAYER_ID.UP.weight",
    )
    done = transfers.export_job(job(to="out", program=program, **{"as": "hf", "weights": "ema", "dtype": "f32"}), Quiet())
    found = load_file(place / "out" / "model.safetensors")
    assert np.array_equal(found["model.layers.1.UP.weight"], GROUPS["ema"]["model.layers.1.mlp.up_proj.weight"])
    assert len(found) == len(WEIGHTS) and any("'up'" in note for note in done["notes"])
    with pytest.raises(StateMismatch):
        transfers.export_job(job(to="again", program=program.replace("* -> *", ""), **{"as": "hf"}), Quiet())

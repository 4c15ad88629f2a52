"""Exports and imports: complete or not there, every byte proven, nothing reached that was not meant."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from holdfast_formats import naming
from holdfast_formats.errors import (
    AlreadyCommitted,
    CheckpointError,
    CorruptExtent,
    CorruptManifest,
    InUse,
    InvalidRequest,
    NoSpace,
    NoSuchCheckpoint,
    QuotaExceeded,
    StateMismatch,
)
from holdfast_formats.lineage import Rewind
from holdfast_formats.rest.jobs import ExportJob, ImportJob
from holdfast_formats.rest.operations import Job
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.checkpoints.run_files import RunFile, write_run_file
from holdfast_service.control.nodes import OneNode
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.storage import PosixStore
from tests.checkpoints import build, flip
from tests.crash import test_replacements
from tests.daemon.copies_world import RUN, CopiesWorld, contents, copies
from tests.job_requests import request
from tests.wings.convert.transfers import Transfers

RNG = np.random.default_rng(3)
ARRAYS = {
    "model.layers.10.weight": RNG.standard_normal((300, 400)).astype(np.float32),
    "model.layers.2.weight": RNG.standard_normal((7, 5)).astype(np.float16),
    "scalar": np.array(3, np.int64),
    "none": np.zeros((0, 4), np.float32),
}


world = copies(replicas=())


@pytest.fixture
def transfers(world: CopiesWorld, tmp_path: Path) -> Transfers:
    (tmp_path / "place").mkdir()
    return Transfers(world.control, world.repairer, tmp_path / "place")


def job(kind: str, step: int | None = 5, run: str = RUN, **arguments: object) -> Job:
    made = {"created": "now", "started": "now", "ended": None, "done_bytes": 0, "total_bytes": 0, "node": "node"}
    return Job(id=1, kind=kind, state="running", run=run, step=step, arguments=arguments, **made)


class Told:
    """Remembers how far it was told that the work is, and can stop it."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.reports: list[tuple[int, int]] = []
        self._stop_at = stop_at

    def report(self, done_bytes: int, total_bytes: int) -> None:
        self.reports.append((done_bytes, total_bytes))
        if self._stop_at is not None and len(self.reports) >= self._stop_at:
            raise KeyboardInterrupt


def hugging_face(directory: Path, sharded: bool) -> Path:
    """A model's directory as transformers leaves it."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    (directory / "pytorch_model.bin").write_bytes(b"never read")
    (directory / ".cache").mkdir()
    if not sharded:
        save_file(ARRAYS, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    for number, (name, array) in enumerate(ARRAYS.items(), 1):
        file = f"model-0000{number}-of-00004.safetensors"
        save_file({name: array}, directory / file)
        weight_map[name] = file
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.mark.parametrize("sharded", [False, True])
def test_a_hugging_face_directory_is_packed_and_committed(
    world: CopiesWorld, transfers: Transfers, tmp_path: Path, sharded: bool
) -> None:
    """Equal tensors, the assets beside them, nothing else; verified, listed, and told."""
    source = hugging_face(tmp_path / "place" / "sub" / "llama", sharded)
    before = contents_of_files(source)
    told = Told()
    done = transfers.import_job(job("import", 7, "brought", **{"from": "sub/llama"}), told)
    assert (done["tensors"], done["step"]) == (4, 7)
    path = world.root / naming.checkpoint_path("brought", 7)
    found = load_file(path / "model.safetensors")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)
    names = {"COMMIT", "manifest.json", "state.json", "config.json", "model.safetensors", "model.safetensors.index.json"}
    assert {entry.name for entry in path.iterdir()} == names
    assert world.catalog.checkpoint("brought", 7).verified
    assert told.reports[-1][0] == told.reports[-1][1] >= 2 * sum(array.nbytes for array in ARRAYS.values())
    assert contents_of_files(source) == before and not world.tier.list(f"brought/{naming.STAGING}")


def contents_of_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_a_checkpoint_goes_out_and_comes_back(world: CopiesWorld, transfers: Transfers, tmp_path: Path) -> None:
    """The export is the checkpoint, byte for byte; imported it is again, and under another name all but the names."""
    told = Told()
    done = transfers.export_job(job("export", to="out/five"), told)
    out = tmp_path / "place" / "out" / "five"
    assert contents(out) == contents(world.path()) and done["committed"]
    assert told.reports[-1][0] == told.reports[-1][1] == 2 * world.built[RUN, 5].manifest.bytes
    assert os.listdir(out.parent) == ["five"]
    transfers.import_job(job("import", 8, "other", **{"from": "out/five"}), Quiet())
    made = verify(world.tier, naming.checkpoint_path("other", 8))
    assert (made.run, made.step, made.tensors) == ("other", 8, world.built[RUN, 5].manifest.tensors)
    assert json.loads(world.tier.read(f"{naming.checkpoint_path('other', 8)}/state.json"))["step"] == 8
    world.control.rotation.remove(RUN, 5, newest=True)
    transfers.import_job(job("import", 5, **{"from": "out/five"}), Quiet())
    assert contents(out) == contents(world.path())


def test_a_copy_is_read_back_before_it_is_one(
    world: CopiesWorld, transfers: Transfers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that the disk did not keep are found before anybody sees a checkpoint, and two nodes never share a directory."""
    transfers.export_job(job("export", to="five"), Quiet())
    size = world.built[RUN, 5].manifest.bytes
    places: set[str] = set()

    class Flipping(Told):
        def report(self, done_bytes: int, total_bytes: int) -> None:
            super().report(done_bytes, total_bytes)
            if done_bytes == size:  # all is copied
                (staged,) = (world.root / "other" / naming.STAGING).iterdir()
                places.add(staged.name)
                file = next(staged.glob("model*.safetensors"))
                flip(file, file.stat().st_size - 1)

    for node in ("one", "two"):
        monkeypatch.setattr(OneNode, "node", node)
        with pytest.raises(CorruptExtent):
            transfers.import_job(job("import", 8, "other", **{"from": "five"}), Flipping())
    assert len(places) == 2
    assert not world.tier.list(naming.checkpoint_path("other", 8)) and not world.tier.list(f"other/{naming.STAGING}")


def test_an_import_is_on_the_line_that_lives(world: CopiesWorld, transfers: Transfers, tmp_path: Path) -> None:
    """In a run that has gone back, what is brought in is not taken for what training left behind; nor at a restart."""
    for attempt in (1, 2):  # the second one takes the place of the first, by a rewind
        test_replacements.save(world.tier, attempt)
    roots.reconcile(PosixStore(world.tier), world.catalog)
    rewinds = list(test_replacements.REWOUND.rewinds)
    for step, source in ((9, hugging_face(tmp_path / "place" / "llama", False)), (10, tmp_path / "place" / "five")):
        if step == 10:
            transfers.export_job(job("export", to="five"), Quiet())
        transfers.import_job(job("import", step, "r", **{"from": source.name}), Quiet())
        made = world.catalog.checkpoint("r", step)
        assert not made.abandoned and [Rewind(*rewind) for rewind in made.rewinds] == rewinds
    assert world.control.lineage_index.abandoned("r") == set() and world.catalog.newest("r") == 10


def test_the_model_alone(world: CopiesWorld, transfers: Transfers, tmp_path: Path) -> None:
    """A plain Hugging Face directory: the model's files, its index and the assets."""
    transfers.export_job(job("export", to="model", model_only=True), Quiet())
    kept = {name for name in contents(world.path()) if name.startswith("model") or name in ("config.json", "empty.txt")}
    assert set(os.listdir(tmp_path / "place" / "model")) == kept
    for name in kept:
        assert (tmp_path / "place" / "model" / name).read_bytes() == (world.path() / name).read_bytes()


@pytest.mark.parametrize("model_only", [False, True])
@pytest.mark.parametrize("spoiled", ["nothing", "a file more", "a bit", "a file less"])
def test_a_copy_that_was_killed_when_it_had_its_name(
    world: CopiesWorld, transfers: Transfers, tmp_path: Path, model_only: bool, spoiled: str
) -> None:
    """The next start finds it done, if it is this very copy; another job finds the name taken."""
    first = job("export", to="out", model_only=model_only)
    done = transfers.export_job(first, Quiet())
    out = tmp_path / "place" / "out"
    weights = next(path for path in sorted(out.iterdir()) if path.suffix == ".safetensors")
    if spoiled == "a file more":
        (out / "mine.txt").write_text("kept")
    elif spoiled == "a bit":
        flip(weights, weights.stat().st_size - 1)
    elif spoiled == "a file less":
        weights.unlink()
    with pytest.raises(AlreadyCommitted):
        transfers.export_job(first, Quiet())
    again = first.model_copy(update={"tries": 2})
    if spoiled == "nothing":
        assert transfers.export_job(again, Quiet()) == done
    else:
        with pytest.raises(AlreadyCommitted):
            transfers.export_job(again, Quiet())
    assert sorted(os.listdir(tmp_path / "place")) == ["out"]


@pytest.mark.parametrize("path", ["../out", "/etc/out", "a/../../out", "a//b", "", ".", "a\0b", ".hidden"])
def test_no_path_leads_out(world: CopiesWorld, transfers: Transfers, tmp_path: Path, path: str) -> None:
    """Neither an export nor an import reaches anything beside the place; nothing is written."""
    before = sorted(tmp_path.rglob("*"))
    for work in (
        lambda: transfers.export_job(job("export", to=path), Quiet()),
        lambda: transfers.import_job(job("import", 9, **{"from": path}), Quiet()),
    ):
        with pytest.raises(InvalidRequest):
            work()
    assert sorted(tmp_path.rglob("*")) == before


def test_no_export_goes_to_an_address(transfers: Transfers, tmp_path: Path) -> None:
    """A command's path has lost a slash by then; below the place it would be a directory `s3:`."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidRequest, match="is a URL"):
        transfers.export_job(job("export", to="s3:/bucket/out"), Quiet())
    assert sorted(tmp_path.rglob("*")) == before


def test_no_link_leads_out(world: CopiesWorld, transfers: Transfers, tmp_path: Path) -> None:
    """A link below the place is not followed: not as a directory, not as a file of an import, not as a target's parent."""
    secret = hugging_face(tmp_path / "secret", sharded=False)
    place = tmp_path / "place"
    (place / "link").symlink_to(secret)
    (place / "linked").mkdir()
    (place / "linked" / "model.safetensors").symlink_to(secret / "model.safetensors")
    for source in ("link", "linked"):
        with pytest.raises(InvalidRequest):
            transfers.import_job(job("import", 9, **{"from": source}), Quiet())
    before = contents_of_files(secret)
    with pytest.raises(CheckpointError):
        transfers.export_job(job("export", to="link/out"), Quiet())
    assert contents_of_files(secret) == before and not (secret / "out").exists()


def test_what_is_there_is_not_overwritten(world: CopiesWorld, transfers: Transfers, tmp_path: Path) -> None:
    """A name that is taken, even by an empty directory, is refused; so is a step that is committed."""
    (tmp_path / "place" / "taken").mkdir()
    with pytest.raises(AlreadyCommitted):
        transfers.export_job(job("export", to="taken"), Quiet())
    source = hugging_face(tmp_path / "place" / "hf", sharded=False)
    before = contents(world.path())
    with pytest.raises(AlreadyCommitted):
        transfers.import_job(job("import", 5, **{"from": source.name}), Quiet())
    assert contents(world.path()) == before


def test_nothing_is_brought_into_a_run_that_trains(world: CopiesWorld, tmp_path: Path) -> None:
    """Its ranks would take it at their next restore. Another run takes it, a dry run only says what would be, and what is
    queued when the ranks come is refused then.
    """
    source = hugging_face(tmp_path / "place" / "hf", sharded=False)
    wanted = job("import", 9, **{"from": source.name})
    training = {wanted.run}
    transfers = Transfers(world.control, world.repairer, tmp_path / "place", training.__contains__)
    for act in (
        lambda: transfers.check(ImportJob(run=wanted.run, step=9, arguments={"from": source.name})),
        lambda: transfers.import_job(wanted, Quiet()),
    ):
        with pytest.raises(InUse, match="ranks of"):
            act()
    dry = job("import", 9, **{"from": source.name, "dry_run": True})
    assert transfers.import_job(dry, Quiet())["dry_run"]
    training.clear()
    assert transfers.import_job(wanted, Quiet())["step"] == 9


def test_without_a_place_nothing_is_reached(world: CopiesWorld) -> None:
    """A service that was not given one refuses."""
    nowhere = Transfers(world.control, world.repairer)
    for work in (
        lambda: nowhere.export_job(job("export", to="x"), Quiet()),
        lambda: nowhere.import_job(job("import", 9, **{"from": "x"}), Quiet()),
    ):
        with pytest.raises(InvalidRequest, match="neither exports nor imports directories"):
            work()
    with pytest.raises(InvalidRequest, match="needs 'step'"):
        nowhere.export_job(job("export", None, to="x"), Quiet())


def test_damage_is_neither_exported_nor_imported(world: CopiesWorld, transfers: Transfers, tmp_path: Path) -> None:
    """It is named, and nothing of it is left."""
    entry = next(e for e in world.built[RUN, 5].manifest.tensors["optim"].values() if e.nbytes)
    transfers.export_job(job("export", to="sound"), Quiet())
    for directory in (world.path(), tmp_path / "place" / "sound"):
        flip(directory / entry.file, entry.start)
    with pytest.raises(CorruptExtent):
        transfers.export_job(job("export", to="out"), Quiet())
    with pytest.raises(CorruptExtent):
        transfers.import_job(job("import", 9, **{"from": "sound"}), Quiet())
    assert os.listdir(tmp_path / "place") == ["sound"]
    assert not world.path(9).exists() and not world.tier.list(f"{RUN}/{naming.STAGING}")


@pytest.mark.parametrize("kind", ["export", "import"])
def test_stopped_work_leaves_nothing(world: CopiesWorld, transfers: Transfers, tmp_path: Path, kind: str) -> None:
    """A job that is cancelled in the middle leaves no directory behind, here or there."""
    hugging_face(tmp_path / "place" / "hf", sharded=False)
    wanted = job("export", to="out") if kind == "export" else job("import", 9, **{"from": "hf"})
    with pytest.raises(KeyboardInterrupt):
        getattr(transfers, f"{kind}_job")(wanted, Told(stop_at=2))
    assert os.listdir(tmp_path / "place") == ["hf"]
    assert not world.path(9).exists() and not world.tier.list(f"{RUN}/{naming.STAGING}")


def broken(directory: Path, how: str) -> None:
    """A Hugging Face directory that is not one."""
    model, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if how == "cut":
        os.truncate(model, model.stat().st_size - 1)
    elif how == "huge header":
        model.write_bytes((2**60).to_bytes(8, "little") + model.read_bytes()[8:])
    elif how == "twice":
        save_file({"scalar": np.array(1)}, directory / "another.safetensors")
    elif how == "none":
        model.unlink()
        (directory / "pytorch_model.bin").unlink()
    else:
        weight_map = {
            "traversal": {name: "../../secret.safetensors" for name in ARRAYS},
            "missing tensor": dict.fromkeys([*ARRAYS, "nowhere"], "model.safetensors"),
            "unlisted tensor": dict.fromkeys([*ARRAYS][1:], "model.safetensors"),
            "missing file": dict.fromkeys(ARRAYS, "model-2.safetensors"),
        }.get(how)
        index.write_text(json.dumps({"weight_map": weight_map}) if weight_map else "[" * 100_000)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("cut", CorruptManifest),
        ("huge header", CorruptManifest),
        ("twice", StateMismatch),
        ("none", StateMismatch),
        ("traversal", InvalidRequest),
        ("missing tensor", StateMismatch),
        ("unlisted tensor", StateMismatch),
        ("missing file", CorruptManifest),
        ("bomb", CorruptManifest),
    ],
)
def test_a_source_that_cannot_be_true(
    world: CopiesWorld, transfers: Transfers, tmp_path: Path, how: str, error: type[CheckpointError]
) -> None:
    """It is refused by name, with a hint that fits, and nothing is written."""
    broken(hugging_face(tmp_path / "place" / "hf", sharded=False), how)
    with pytest.raises(error) as caught:
        transfers.import_job(job("import", 9, **{"from": "hf"}), Quiet())
    assert "step" not in caught.value.hint and caught.value.hint
    assert not world.path(9).exists() and not world.tier.list(f"{RUN}/{naming.STAGING}")


def test_an_import_that_does_not_fit(world: CopiesWorld, transfers: Transfers, tmp_path: Path) -> None:
    """The run's quota counts for it as for a save."""
    write_run_file(world.tier, RUN, RunFile(policy=RetentionPolicy(quota_bytes=10_000)))
    transfers.export_job(job("export", to="five"), Quiet())
    hugging_face(tmp_path / "place" / "hf", sharded=False)
    for source in ("five", "hf"):
        with pytest.raises(CheckpointError) as caught:
            transfers.import_job(job("import", 9, **{"from": source}), Quiet())
        assert caught.value.status == NoSpace.status
    assert not world.path(9).exists()


@pytest.mark.parametrize("kind", ["ours", "foreign"])
def test_an_import_whose_quota_is_used_up_meanwhile(
    world: CopiesWorld, transfers: Transfers, tmp_path: Path, kind: str
) -> None:
    """What a save has committed while it was copied counts: it is refused before it is seen, and leaves nothing."""
    build(tmp_path / "place" / "ours", run="elsewhere", step=3)
    hugging_face(tmp_path / "place" / "foreign", sharded=False)
    there = world.catalog.checkpoint(RUN, 5)
    write_run_file(world.tier, "full", RunFile(policy=RetentionPolicy(quota_bytes=2**20)))

    class Saving(Quiet):
        def report(self, done_bytes: int, total_bytes: int) -> None:
            world.catalog.record_checkpoint(there.model_copy(update={"run": "full", "step": 1, "bytes": 2**20}))

    world.catalog.declare_attempt("full", "launch", 1, "now")
    with pytest.raises(QuotaExceeded):
        transfers.import_job(job("import", 9, "full", **{"from": kind}), Saving())
    assert not world.tier.list(f"full/{naming.CHECKPOINTS}") and not world.tier.list(f"full/{naming.STAGING}")


def test_an_import_fences_nobody_off(world: CopiesWorld, transfers: Transfers, tmp_path: Path) -> None:
    """An attempt number from elsewhere never gets above those of the run (I6); in a run of nobody's it stays."""
    build(tmp_path / "place" / "far", run="elsewhere", step=3)
    attempt = world.control.launches.declare("live", "launch", 1, None)
    world.catalog.declare_attempt("elsewhere", "x", 1, "now")
    assert attempt == 1
    transfers.import_job(job("import", 4, "fresh", **{"from": "far"}), Quiet())
    assert world.catalog.newest_attempt("fresh") == 1
    transfers.import_job(job("import", 4, "live", **{"from": "far"}), Quiet())
    assert world.control.saves.begin("live", 5, attempt, 1)


@pytest.mark.parametrize(
    ("kind", "step", "arguments", "error"),
    [
        ("export", 5, {"to": "../x"}, InvalidRequest),
        ("export", 5, {}, InvalidRequest),
        ("export", 6, {"to": "x"}, NoSuchCheckpoint),
        ("export", None, {"to": "x"}, InvalidRequest),
        ("export", 5, {"to": "x", "model_only": "no"}, InvalidRequest),
        ("export", 5, {"to": "x", "modelonly": True}, InvalidRequest),
        ("export", 5, {"to": "x" * 256}, InvalidRequest),
        ("import", 6, {"from": "nowhere"}, InvalidRequest),
        ("import", 6, {"from": ["hf"]}, InvalidRequest),
        ("import", 5, {"from": "hf"}, AlreadyCommitted),
        ("import", 6, {"from": "hf", "kind": "paper"}, InvalidRequest),
        ("import", 6, {"from": "hf", "as_is": "yes"}, InvalidRequest),
        ("import", 6, {"from": "hf", "program": 3}, InvalidRequest),
        ("import", 6, {"from": "hf", "dryrun": True}, InvalidRequest),
    ],
)
def test_what_could_only_fail_is_no_job(
    transfers: Transfers,
    tmp_path: Path,
    kind: Any,
    step: int | None,
    arguments: dict[str, Any],
    error: type[CheckpointError],
) -> None:
    """It is refused where it is submitted; what can work is not."""
    hugging_face(tmp_path / "place" / "hf", sharded=False)
    with pytest.raises(error):
        transfers.check(request(kind, RUN, step, **arguments))
    transfers.check(ExportJob(run=RUN, step=5, arguments={"to": "x"}))
    sound = {"from": "hf", "kind": "hf", "as_is": False, "dry_run": True}
    transfers.check(ImportJob(run=RUN, step=6, arguments=sound))


def test_a_repair(world: CopiesWorld, transfers: Transfers, tmp_path: Path) -> None:
    """It says what was mended, and raises the damage that is left."""
    flip(world.path() / "model.safetensors.index.json", 20)
    done = transfers.repair(RUN, 5)
    assert [file["file"] for file in done["repaired"]] == ["model.safetensors.index.json"]
    flip(world.path() / "config.json", 3)
    with pytest.raises(CorruptExtent):
        transfers.repair(RUN, 5)

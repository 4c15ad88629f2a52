"""Imports from the request to the commit: what becomes of groups and values, what is told, and what ends them."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import state_json
from holdfast_formats.errors import (
    AlreadyCommitted,
    CatalogUnavailable,
    CheckpointError,
    InvalidRequest,
    NoSpace,
    StateMismatch,
)
from holdfast_formats.files import Files
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.listing import FileUse, ForeignListing, ForeignPiece, ForeignTensor
from holdfast_formats.naming import Place
from holdfast_formats.region import whole
from holdfast_formats.rest.jobs import ImportJob, ReadOptions
from holdfast_formats.tensors import TensorSpec
from holdfast_service.control.jobs.catalog import Jobs
from holdfast_service.control.jobs.runner import Cancelled, Interrupted
from holdfast_service.control.jobs.staged import wanted_places
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.storage import PosixTier
from holdfast_service.wings.convert import importing
from holdfast_service.wings.convert.foreign import hugging_face
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.import_jobs import Importer
from tests.crash.calls import steered
from tests.daemon.copies_world import RUN, CopiesWorld, copies
from tests.job_requests import an_import
from tests.wings.convert.test_jobs import ARRAYS, Told
from tests.wings.convert.test_jobs import hugging_face as a_model

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


world = copies(replicas=())


@pytest.fixture
def importer(world: CopiesWorld) -> Importer:
    return Importer(world.control)


def staged(world: CopiesWorld, run: str = "mine") -> list[str]:
    return world.tier.list(f"{run}/{naming.STAGING}")


def a_training(directory: Path) -> Path:
    """A checkpoint of a program of our own: weights, and moments that it stores the other way round."""
    directory.mkdir()
    (directory / "weights").write_bytes(ROWS.tobytes())
    (directory / "moments").write_bytes(b"head" + ROWS.T.tobytes() + np.float32(7).tobytes())
    (directory / "about.json").write_text('{"a": 1}')
    (directory / "lock").write_bytes(b"")
    return directory


def _read(files: Files, options: ReadOptions) -> ForeignListing:
    def tensor(group: str, name: str, piece: ForeignPiece) -> ForeignTensor:
        return ForeignTensor(TensorSpec(group, name, "F32", piece.box.shape), (piece,))

    box = whole((3, 4))
    tensors = [
        tensor("model", "w", ForeignPiece("weights", 0, box, (4, 1))),
        tensor("optim", "w/exp_avg", ForeignPiece("moments", 4, box, (1, 3))),
        tensor("optim", "w/step", ForeignPiece("moments", 52, whole(()), ())),
    ]
    uses = (
        FileUse("weights", "tensors"),
        FileUse("moments", "tensors"),
        FileUse("about.json", "asset"),
        FileUse("lock", "unused", "an empty file that says that somebody writes"),
    )
    documents = {"optim": {"optimizer": {"lr": 0.5}}, "extra": {"scheduler": {"last": [1, 2]}}}
    notes = (f"as_is is {options.as_is}",)
    listed = {one.key: one for one in tensors}
    return ForeignListing("own", listed, uses, documents, ("about.json",), notes, step=40)


OWN = ForeignKind("own", "a training of our own", lambda files: "moments" in files.list(""), _read)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PosixTier:
    """A source of that kind, which imports know beside Hugging Face's."""
    monkeypatch.setattr(importing, "KINDS", (OWN, hugging_face.KIND))
    return PosixTier(a_training(tmp_path / "own"))


def test_groups_values_and_where_they_come_from(world: CopiesWorld, importer: Importer, own: PosixTier) -> None:
    """Every group has its file, values stand in state.json as a trainer's, and its source says what each file became."""
    done = importer.bring(own, an_import("mine", 40, as_is=True), Quiet())
    path = naming.checkpoint_path("mine", 40)
    made = verify(world.tier, path)
    assert made.groups == ("extra", "model", "optim") and done["tensors"] == 3
    optim = load_file(world.root / path / "optim.safetensors")
    assert np.array_equal(optim["w/exp_avg"], ROWS) and optim["w/step"] == 7
    assert world.tier.read(f"{path}/about.json") == b'{"a": 1}'
    state = world.tier.read(f"{path}/{naming.STATE}")
    values = state_json.for_rank(state, 3).values
    assert json.loads(values["optim"]["optimizer"]) == {"lr": 0.5}
    assert json.loads(values["extra"]["scheduler"]) == {"last": [1, 2]}
    source = state_json.source_of(state)
    assert source is not None and (source["kind"], source["step"], source["as_is"]) == ("own", 40, True)
    assert source["notes"] == ["as_is is True"]
    files = {one["file"]: one for one in source["files"]}
    assert files["lock"]["reason"] == "an empty file that says that somebody writes"
    for name in ("weights", "moments", "about.json"):
        data = own.read(name)
        assert (files[name]["bytes"], files[name]["xxh3"]) == (len(data), digest(data))
    assert done["source"] == source and done["groups"]["extra"]["values"] == ["scheduler"]
    assert not staged(world) and world.catalog.checkpoint("mine", 40).verified


def test_another_step_is_noted(importer: Importer, own: PosixTier) -> None:
    """A checkpoint may be imported under another step than its training's, and says so."""
    done = importer.bring(own, an_import("mine", 1), Quiet())
    assert done["source"]["notes"][-1] == "the training was at step 40; the checkpoint is imported as step 1"


def test_a_dry_run_is_the_report(world: CopiesWorld, importer: Importer, own: PosixTier) -> None:
    """It tells the same of groups and files as the import, but for digests, and writes nothing."""
    before = sorted(world.root.rglob("*"))
    dry = importer.bring(own, an_import("mine", 40, dry_run=True), Quiet())
    assert dry["dry_run"] and sorted(world.root.rglob("*")) == before
    done = importer.bring(own, an_import("mine", 40), Quiet())
    assert dry["groups"] == done["groups"] and dry["written"] == done["written"]
    without = [{name: value for name, value in file.items() if name != "xxh3"} for file in done["source"]["files"]]
    assert dry["source"]["files"] == without


def test_what_is_left_out_is_on_record(world: CopiesWorld, importer: Importer, own: PosixTier) -> None:
    """The report, the dry run and state.json list what options left out, and no file of it is there."""
    asked = {"leave_out": ["lock", "w/step"], "weights_only": True}
    dry = importer.bring(own, an_import("mine", 40, **asked, dry_run=True), Quiet())
    done = importer.bring(own, an_import("mine", 40, **asked), Quiet())
    path = naming.checkpoint_path("mine", 40)
    source = state_json.source_of(world.tier.read(f"{path}/{naming.STATE}"))
    assert source is not None and source["left_out"] == done["source"]["left_out"] == dry["source"]["left_out"]
    assert [(part["what"], part["reason"], part["tensors"], part["bytes"]) for part in source["left_out"]] == [
        ("optim", "--weights-only", 1, 48),
        ("optim/w/step", "--leave-out w/step", 1, 4),
        ("optim/optimizer", "--weights-only", 0, 0),
        ("extra/scheduler", "--weights-only", 0, 0),
        ("lock", "--leave-out lock", 0, 0),
    ]
    assert (source["leave_out"], source["weights_only"]) == (["lock", "w/step"], True)
    assert verify(world.tier, path).groups == ("model",)
    files = {one["file"]: (one["use"], one.get("reason")) for one in source["files"]}
    assert files["moments"] == ("unused", "all tensors of it are left out")
    assert files["lock"] == ("unused", "left out by choice")


def test_names_that_are_no_unicode(world: CopiesWorld, importer: Importer, tmp_path: Path) -> None:
    """A file's name may be any bytes; the report, which is JSON, has them written out."""
    source = a_model(tmp_path / "hf", sharded=False)
    (source / os.fsdecode(b"\xff.gguf")).write_bytes(b"")
    done = importer.bring(PosixTier(source), an_import("mine", 1), Quiet())
    assert "\\udcff.gguf" in [file["file"] for file in done["source"]["files"]]
    json.dumps(done, ensure_ascii=False).encode()


def test_a_kind_that_is_said(importer: Importer, own: PosixTier, tmp_path: Path) -> None:
    """It is read as that kind, whatever it looks like; a Holdfast checkpoint takes no options."""
    with pytest.raises(InvalidRequest, match="no safetensors"):
        importer.bring(own, an_import("mine", 1, kind="hf"), Quiet())
    with pytest.raises(InvalidRequest, match="no COMMIT"):
        importer.bring(own, an_import("mine", 1, kind="holdfast"), Quiet())
    committed = PosixTier(tmp_path / "root" / naming.checkpoint_path(RUN, 5))
    with pytest.raises(InvalidRequest, match="imported unchanged"):
        importer.bring(committed, an_import("mine", 1, as_is=True), Quiet())
    assert importer.bring(committed, an_import("mine", 1, dry_run=True), Quiet())["source"]["kind"] == "holdfast"


def test_one_that_was_never_committed(importer: Importer, tmp_path: Path) -> None:
    """Without COMMIT its weights look like a Hugging Face model, whose import would leave state.json out."""
    copied = tmp_path / "copied"
    shutil.copytree(tmp_path / "root" / naming.checkpoint_path(RUN, 5), copied)
    (copied / naming.COMMIT).unlink()
    with pytest.raises(StateMismatch, match="it was not committed"):
        importer.bring(PosixTier(copied), an_import("mine", 1), Quiet())


class Spoiling(Quiet):
    """Does something once, when some bytes have been read."""

    def __init__(self, act: Any) -> None:
        self._act = act

    def report(self, done_bytes: int, total_bytes: int) -> None:
        act, self._act = self._act, lambda: None
        act()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_source_that_changes_is_not_committed(world: CopiesWorld, importer: Importer, tmp_path: Path, file: str) -> None:
    """Weights or another file: the import ends by its name, and leaves nothing."""
    source = a_model(tmp_path / "hf", sharded=False)
    spoil = Spoiling(lambda: os.utime(source / file, ns=(1, 1)))
    with pytest.raises(StateMismatch, match=rf"{file} changed while the source was being read"):
        importer.bring(PosixTier(source), an_import("mine", 1), spoil)
    assert not staged(world) and not world.tier.list(naming.checkpoint_path("mine", 1))


def test_a_full_disk_leaves_nothing(world: CopiesWorld, importer: Importer, tmp_path: Path) -> None:
    """Where it fills up in the middle, the import ends with that, and frees what it has taken."""
    source = PosixTier(a_model(tmp_path / "hf", sharded=False))
    calls = 0

    def full(name: str, call: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += name in ("pwritev", "fallocate")
        if name == "pwritev" and calls > 1:
            raise OSError(28, "No space left on device")
        return call(*arguments, **options)

    with steered(full), pytest.raises(NoSpace):
        importer.bring(source, an_import("mine", 1), Quiet())
    assert calls > 1 and not staged(world)
    importer.bring(source, an_import("mine", 1), Quiet())


def test_two_at_once(world: CopiesWorld, importer: Importer, tmp_path: Path) -> None:
    """Of two sources for one step one is committed, whole, and the other is told so; both leave no staging."""
    sources = [a_model(tmp_path / name, sharded=False) for name in ("a", "b")]
    save_file({"other": ROWS}, sources[1] / "model.safetensors", metadata={"format": "pt"})
    ends: list[object] = []

    def bring(source: Path) -> None:
        try:
            ends.append(importer.bring(PosixTier(source), an_import("mine", 1), Quiet())["tensors"])
        except CheckpointError as error:
            ends.append(type(error))

    threads = [threading.Thread(target=bring, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tensors = {name for group in verify(world.tier, naming.checkpoint_path("mine", 1)).tensors.values() for name in group}
    assert AlreadyCommitted in ends and len(tensors) in ends and tensors in ({"other"}, set(ARRAYS))
    assert not staged(world)


class Stopping(Told):
    """Stops the work at the n-th report, as a service that closes or somebody who cancels."""

    def __init__(self, stop_at: int, how: type[Cancelled]) -> None:
        super().__init__()
        self._at, self._how = stop_at, how

    def report(self, done_bytes: int, total_bytes: int) -> None:
        super().report(done_bytes, total_bytes)
        if len(self.reports) == self._at:
            raise self._how


def test_what_a_closing_service_leaves_is_gone_on_from(
    world: CopiesWorld, importer: Importer, own: PosixTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays for the job, through the sweep of a start; who cancels leaves nothing, and nobody's is swept."""
    with pytest.raises(Cancelled):
        importer.bring(own, an_import("mine", 40), Stopping(2, Cancelled))
    assert not staged(world)
    with pytest.raises(Interrupted):
        importer.bring(own, an_import("mine", 40), Stopping(2, Interrupted))
    (left, progress) = staged(world)
    assert progress == naming.progress_path(left)
    kept = world.tier.stamp(f"mine/{naming.STAGING}/{left}/model.safetensors")
    jobs = Jobs(world.catalog.database, "node", lambda: "now")
    job, _ = jobs.submit(ImportJob(run="mine", step=40, arguments={"from": "own"}))
    for _ in range(2):
        spared = wanted_places(world.catalog.database, world.tier)
        assert [place.path for place in spared] == [f"mine/{naming.STAGING}/{left}"]
        assert not world.control.store.sweep(spared)
    importer.bring(own, an_import("mine", 40), Quiet(), again=True)
    assert world.tier.stamp(f"{naming.checkpoint_path('mine', 40)}/model.safetensors") == kept
    with pytest.raises(Interrupted):
        importer.bring(own, an_import("mine", 41), Stopping(2, Interrupted))
    jobs.cancel(job.id)
    assert wanted_places(world.catalog.database, world.tier) == []
    world.control.recovery.recover()
    assert not staged(world)


def test_a_job_that_had_committed_is_done(world: CopiesWorld, importer: Importer, own: PosixTier, tmp_path: Path) -> None:
    """Killed behind the commit, it finds its own checkpoint; another import of that step finds it taken."""
    first = importer.bring(own, an_import("mine", 40), Quiet())
    second = importer.bring(own, an_import("mine", 40), Quiet(), again=True)
    assert {**first, "groups": None} == {**second, "groups": None}
    other = PosixTier(a_model(tmp_path / "hf", sharded=False))
    for source, wanted, again in (
        (own, an_import("mine", 40), False),
        (own, an_import(RUN, 5), True),
        (other, an_import("mine", 40), True),
    ):
        with pytest.raises(AlreadyCommitted):
            importer.bring(source, wanted, Quiet(), again)


class AwayCatalog:
    """A database that does not answer."""

    def read(self) -> Any:
        raise CatalogUnavailable("the catalog is away")


def test_nothing_of_a_job_is_swept_while_nobody_knows_the_jobs(world: CopiesWorld) -> None:
    """Without the catalog all that jobs have staged stays; what saves have left is swept as ever."""
    place = naming.job_place("mine", 7, "f" * 16)
    for path in (place.path, naming.progress_path(place.path), naming.staging_path("mine", 3, 1)):
        world.tier.put(f"{path}/file", b"x")
    away: Any = AwayCatalog()
    assert world.control.store.sweep(wanted_places(away, world.tier)) == [naming.staging_path("mine", 3, 1)]
    assert len(world.control.store.sweep(wanted_places(world.catalog.database, world.tier))) == 2


def test_a_place_of_staging_is_that_of_the_job(world: CopiesWorld) -> None:
    """Its name is one that a sweep knows, and that no launch and no repair has."""
    place = naming.job_place("mine", 7, "f" * 16)
    found = naming.parse_staging_directory(place.path.rpartition("/")[2])
    assert found is not None and Place("mine", *found) == place and naming.is_job_place(found)
    assert not naming.is_job_place(Place("mine", 7, naming.NO_ATTEMPT)) and not naming.is_job_place(Place("mine", 7, 3, 9))


PROGRAM = """
name = "join"
from = "own"
to = "fused"
statements = '''
a, b -> ab, sizes=equal
c -> d^T
'''
"""


def a_fused_training(directory: Path) -> PosixTier:
    """Two matrices with moments and steps, that a program joins, and one that it turns."""
    directory.mkdir()
    arrays = {name: np.float32(number) + ROWS for number, name in enumerate("abc")}
    for name, array in arrays.items():
        (directory / name).write_bytes(array.tobytes())
        (directory / f"{name}.step").write_bytes(np.float32(7).tobytes())
    return PosixTier(directory)


def _read_fused(files: Files, options: ReadOptions) -> ForeignListing:
    def tensor(group: str, name: str, file: str, shape: tuple[int, ...]) -> ForeignTensor:
        piece = ForeignPiece(file, 0, whole(shape), (4, 1) if shape else ())
        return ForeignTensor(TensorSpec(group, name, "F32", shape), (piece,))

    tensors = [tensor("model", name, name, (3, 4)) for name in "abc"]
    tensors += [tensor("optim", f"{name}/exp_avg", name, (3, 4)) for name in "abc"]
    tensors += [tensor("optim", f"{name}/step", f"{name}.step", ()) for name in "abc"]
    uses = tuple(FileUse(name, "tensors") for name in files.list(""))
    document = optimizer_state.document([(["a", "b"], {"lr": 0.5}), (["c"], {"lr": 0.25})])
    return ForeignListing("fused", {one.key: one for one in tensors}, uses, {"optim": {"optimizer": document}})


FUSED = ForeignKind("fused", "a training whose matrices are joined", lambda files: True, _read_fused)


def test_a_program_maps_tensors_and_values(
    world: CopiesWorld, importer: Importer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, moments and the optimizer's groups get the new names; steps that become one must be equal."""
    monkeypatch.setattr(importing, "KINDS", (FUSED,))
    source = a_fused_training(tmp_path / "fused")
    importer.bring(source, an_import("mine", 1, program=PROGRAM), Quiet())
    path = world.root / naming.checkpoint_path("mine", 1)
    model, optim = load_file(path / "model.safetensors"), load_file(path / "optim.safetensors")
    assert model.keys() == {"ab", "d"} and optim.keys() == {"ab/exp_avg", "ab/step", "d/exp_avg", "d/step"}
    assert np.array_equal(model["ab"], np.concatenate([ROWS, ROWS + 1]))
    assert np.array_equal(model["d"], (ROWS + 2).T) and np.array_equal(optim["d/exp_avg"], (ROWS + 2).T)
    state = (path / naming.STATE).read_bytes()
    groups = json.loads(state_json.for_rank(state, 0).values["optim"]["optimizer"])["groups"]
    assert groups["ab"]["params"] == ["ab"] and groups["ab"]["lr"] == 0.5 and groups["d"]["params"] == ["d"]
    told = state_json.source_of(state)
    assert told is not None and told["program"] == PROGRAM and "'join'" in told["notes"][0]
    (tmp_path / "fused" / "b.step").write_bytes(np.float32(8).tobytes())
    with pytest.raises(StateMismatch, match="'a/step' and 'b/step'"):
        importer.bring(source, an_import("mine", 2, program=PROGRAM), Quiet())
    assert not staged(world)
    with pytest.raises(InvalidRequest, match="no program 'nothing'"):
        importer.bring(source, an_import("mine", 2, program="nothing"), Quiet())


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_types_that_no_reader_has_are_refused(importer: Importer, tmp_path: Path, dtype: str) -> None:
    """safetensors has a name for them, and neither torch nor numpy could read the checkpoint."""
    header = json.dumps({"scales": {"dtype": dtype, "shape": [4], "data_offsets": [0, 3]}}).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "source").mkdir()
    (tmp_path / "source/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(StateMismatch, match=f"'scales' is {dtype}"):
        importer.bring(PosixTier(tmp_path / "source"), an_import("mine", 1), Quiet())


def test_a_component_of_diffusers_is_loaded_by_diffusers(world: CopiesWorld, importer: Importer, tmp_path: Path) -> None:
    """Its files keep the name that diffusers looks for, with an index that names them; so does one in shards."""
    config = json.dumps({"_class_name": "UNet2DModel", "_diffusers_version": "0.35.0"})
    for step, shards in ((1, 1), (2, 2)):
        source = tmp_path / f"unet{shards}"
        source.mkdir()
        (source / "config.json").write_text(config)
        (source / "diffusion_pytorch_model.bin").write_bytes(b"the same again")
        stem = "diffusion_pytorch_model"
        names = [f"{stem}.safetensors"] if shards == 1 else [f"{stem}-0000{n}-of-00002.safetensors" for n in (1, 2)]
        for number, name in enumerate(names):
            save_file({f"conv.{number}.weight": ROWS}, source / name, metadata={"format": "pt"})
        if shards > 1:
            placed = {f"conv.{number}.weight": name for number, name in enumerate(names)}
            (source / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
        importer.bring(PosixTier(source), an_import("unet", step), Quiet())
        made = tmp_path / "root" / naming.checkpoint_path("unet", step)
        index = json.loads((made / f"{stem}.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == {f"conv.{number}.weight" for number in range(shards)} and "metadata" in index
        held = {name for file in set(index["weight_map"].values()) for name in load_file(made / file)}
        assert held == set(index["weight_map"])
        assert (made / "config.json").read_text() == config and (made / f"{stem}.safetensors").is_file()

"""Old checkpoints are stored in fewer bytes by a rule: masters bit for bit, moments as stated; every reader sees values."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.read.reader import CheckpointReader
from holdfast.read.root_directory import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.disk import coded, manifests
from holdfast_formats.errors import CorruptExtent, InUse, NoSpace, StateMismatch
from holdfast_formats.mapping.committed_files import CommittedFiles
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.mapping.reading import fetched
from holdfast_formats.region import Box, whole
from holdfast_formats.rest.jobs import ExportTerms
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.config import parse
from holdfast_service.control.checkpoints import run_files
from holdfast_service.daemon.copying import compactor
from holdfast_service.daemon.copying import thinner as thinner_module
from holdfast_service.daemon.copying.copies import CopyControl
from holdfast_service.daemon.copying.thinner import Thinner
from holdfast_service.storage import PosixTier, posix
from holdfast_service.wings.convert import foreign_export
from holdfast_service.wings.convert.exports.source import of_committed
from tests.checkpoints import flip, trained_arrays
from tests.daemon.copies_world import RUN, CopiesWorld, contents, copies, copies_world
from tests.daemons import wait_until

STEPS = (5, 10, 15)
EMBED = "embed.weight"


world = copies(STEPS, arrays=trained_arrays())


def opened(world: CopiesWorld, step: int = 5) -> CheckpointReader:
    """The checkpoint, every byte of it proven; the catalog says the same of it."""
    assert world.control.record_queue.recorded(30)
    reader = open_checkpoint(world.root, None, RUN, step)
    assert reader.verify() == []
    listed = world.catalog.checkpoint(RUN, step)
    assert listed.bytes == reader.manifest.bytes and set(listed.groups) == set(reader.manifest.groups)
    assert (listed.compacted is None) == (reader.manifest.compacted is None)
    return reader


@pytest.mark.parametrize("rule", ["exact", "bf16", "int8"])
def test_older_ones_are_stored_in_fewer_bytes(world: CopiesWorld, rule: str) -> None:
    """Weights are the same files; masters come back bit for bit, moments as far off as it says, the rest exactly."""
    weights = next(path.name for path in sorted(world.path().iterdir()) if path.name.startswith("model-0"))
    inode = os.stat(world.path() / weights).st_ino
    before = world.catalog.checkpoint(RUN, 5)
    world.keep(optim=rule, optim_full=1)
    shown = world.control.rotation.verdicts.preview(RUN)
    assert [(v.step, v.keep, v.thin, v.compact) for v in shown.verdicts] == [
        (15, True, False, False),
        (10, True, False, True),
        (5, True, False, True),
    ]
    assert world.thinner().run_once(RUN) == [5, 10]
    arrays = trained_arrays()
    with opened(world) as reader:
        small = reader.manifest.compacted
        assert small is not None and small.optim == rule and small.bytes == before.bytes
        assert os.stat(world.path() / weights).st_ino == inode and os.stat(world.path() / weights).st_nlink == 1
        for group, named in arrays.items():
            for name, saved in named.items():
                found = reader.read(group, name)
                assert (found.dtype, found.shape) == (saved.dtype, saved.shape)
                one = small.tensors.get(group, {}).get(name)
                if one is None or one.coding == "low16":
                    assert found.tobytes() == saved.tobytes(), (group, name)
                else:
                    exact = saved.astype(np.float64)
                    apart = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
                    assert one.error == pytest.approx(apart, rel=1e-9) and 0 < apart < (
                        0.003 if rule == "bf16" else compactor.ERROR_MAX
                    )
        coded = {name: one.coding for name, one in small.tensors.get("optim", {}).items()}
        kinds = {"exact": set(), "bf16": {"bf16"}, "int8": {"int8", "int8-log", "bf16"}}[rule]
        assert set(coded.values()) == kinds
        assert small.tensors["master"].keys() == arrays["master"].keys() - {"layers.0.loose.weight"}
        assert small.exact["master"] == {"layers.0.loose.weight": compactor.NOT_ROUNDED}
        beside = compactor.NEGATIVE if rule == "int8" else f"exp_avg also stays as it is: {compactor.NOT_FINITE}"
        left = {"layers.0.loose.weight/exp_avg": compactor.NOT_FINITE, "layers.0.loose.weight/exp_avg_sq": beside}
        assert small.exact.get("optim", {}) == ({} if rule == "exact" else left)
    after = world.catalog.checkpoint(RUN, 5)
    assert after.verified and after.checked == before.checked and after.created == before.created
    told = world.events("checkpoint-compacted")
    assert [one["freed"] for one in told] == [before.bytes - after.bytes] * 2
    assert shown.bytes_compacted == pytest.approx(sum(one["freed"] for one in told), rel=0.3)  # files have fewer headers
    assert world.control.rotation.verdicts.preview(RUN).bytes_saved == 2 * (before.bytes - after.bytes)
    assert world.leftovers() == [] and world.thinner().run_once(RUN) == []


def test_any_box_is_decoded(world: CopiesWorld) -> None:
    """Blocks that a shard's edge cuts, strided receivers, parts of ties; also with all of it proven first."""
    world.keep(optim="int8", optim_full=1)
    world.thinner().run_once(RUN)
    with opened(world) as reader:
        for group, name in (("optim", f"{EMBED}/exp_avg"), ("optim", f"{EMBED}/exp_avg_sq"), ("master", EMBED)):
            whole = reader.read(group, name)
            for box in (Box((0, 0), (64, 1)), Box((1, 250), (3, 20)), Box((63, 255), (1, 45)), Box((5, 7), (0, 9))):
                (rows, columns), part = zip(box.offset, box.shape, strict=True), reader.read(group, name, box)
                assert np.array_equal(part, whole[rows[0] : sum(rows), columns[0] : sum(columns)])
    with holdfast.open(f"{RUN}@5", root=world.root) as checkpoint:
        entry = checkpoint.tensors["optim"][f"{EMBED}/exp_avg"]
        assert (entry.dtype, entry.shape) == ("F32", (64, 300)) and f"{EMBED}/exp_avg.q8" not in checkpoint.tensors["optim"]


def test_exports_and_merges_have_values(world: CopiesWorld) -> None:
    """What they read is a listing; a file of masters under the weights' names has every bit."""
    world.keep(optim="int8", optim_full=1)
    world.thinner().run_once(RUN)
    with opened(world) as reader:
        directory, made = naming.checkpoint_path(RUN, 5), reader.manifest
        files = CommittedFiles(world.tier, made, directory)
        source = of_committed(files, made)
        assert {key.group for key in source.listing.tensors} == set(trained_arrays())
        for group, named in trained_arrays().items():
            assert source.group(group).keys() == named.keys()
            for name in named:
                found = fetched(files, source.listing.tensors[TensorKey(group, name)])
                assert found.tobytes() == reader.read(group, name).tobytes(), (group, name)
        same, other = TensorKey("master", EMBED), TensorKey("master", "layers.0.norm.weight")
        assert source.equal(same, same) and not source.equal(same, other)
        terms = ExportTerms(form="hf", weights="master", dtype="f32")
        export = foreign_export.plan_export(world.tier, directory, made, terms)
        foreign_export.write(export, world.tier, foreign_export.staged_at(world.tier, "exported"), CopyControl())
    loaded = load_file(world.root / "exported" / "model.safetensors")
    for name, saved in trained_arrays()["master"].items():
        assert loaded[name].view(torch.int32).numpy().tobytes() == saved.tobytes(), name


def test_who_does_not_know_it_sees_no_values(world: CopiesWorld) -> None:
    """An earlier version finds codes under other names, and nothing under the tensor's own."""
    world.keep(optim="int8", optim_full=1)
    world.thinner().run_once(RUN)
    document = json.loads((world.path() / naming.MANIFEST).read_bytes())
    assert f"{EMBED}/exp_avg" not in document["tensors"]["optim"] and EMBED not in document["tensors"]["master"]
    stored = {name: entry["dtype"] for name, entry in document["tensors"]["optim"].items() if name.startswith(EMBED)}
    assert stored == {
        f"{EMBED}/count": "I64",
        f"{EMBED}/exp_avg.q8": "I8",
        f"{EMBED}/exp_avg.q8.scale": "F32",
        f"{EMBED}/exp_avg_sq.q8log": "U8",
        f"{EMBED}/exp_avg_sq.q8log.range": "F32",
        f"{EMBED}/step": "F32",
    }
    del document["compacted"]
    manifests.validate(manifests._decode(json.dumps(document).encode()))


def test_one_of_a_later_version_is_refused_by_name(world: CopiesWorld) -> None:
    """Its other tensors are read."""
    world.keep(optim="bf16", optim_full=1)
    world.thinner().run_once(RUN)
    document = json.loads((world.path() / naming.MANIFEST).read_bytes())
    document["compacted"]["tensors"]["optim"][f"{EMBED}/exp_avg"]["coding"] = "int3"
    encoded = json.dumps(document).encode()
    made = manifests._decode(encoded)
    (world.path() / naming.MANIFEST).write_bytes(encoded)
    (world.path() / naming.COMMIT).write_bytes(manifests.encode_commit(made, encoded))
    with open_checkpoint(world.root, None, RUN, 5) as reader:
        reader.read("optim", f"{EMBED}/exp_avg_sq")
        with pytest.raises(StateMismatch, match=r"embed.weight/exp_avg.*'int3'"):
            reader.read("optim", f"{EMBED}/exp_avg")


def test_both_rules(world: CopiesWorld) -> None:
    """The newest exact, then some in fewer bytes, and of older ones the weights. A compact one is thinned too."""
    before = world.catalog.checkpoint(RUN, 5).bytes
    world.keep(optim="int8", optim_full=1)
    world.thinner().run_once(RUN)
    world.keep(optim="int8", optim_full=1, keep_full=2)
    world.copy()
    assert world.thinner().run_once(RUN) == [5]
    world.copy()
    made = [opened(world, step).manifest for step in STEPS]
    assert [(one.thinned is not None, one.compacted is not None) for one in made] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    assert made[0].thinned is not None and made[0].thinned.bytes == before
    for step in STEPS:
        assert contents(world.path(step)) == contents(world.root.parent / "far" / naming.checkpoint_path(RUN, step))


def test_copies_follow(world: CopiesWorld, tmp_path: Path) -> None:
    """A replica's copy keeps its own files of what stayed; what was missed meanwhile is caught up with."""
    world.copy()
    there = tmp_path / "far" / naming.checkpoint_path(RUN, 5)
    weights = next(path.name for path in sorted(there.iterdir()) if path.name.startswith("model-0"))
    inode = os.stat(there / weights).st_ino
    world.keep(optim="bf16", optim_full=1)
    world.thinner().run_once(RUN)
    assert world.control.record_queue.recorded(30)
    world.copy()
    assert contents(there) == contents(world.path(5)) and os.stat(there / weights).st_ino == inode
    world.keep(optim="bf16", optim_full=1, keep_full=2)
    world.thinner().run_once(RUN)
    world.add("late", PosixTier(tmp_path / "late"))
    world.copy("late")
    world.copy()
    assert contents(there) == contents(world.path(5)) == contents(tmp_path / "late" / naming.checkpoint_path(RUN, 5))
    assert not os.listdir(tmp_path / "far" / RUN / naming.STAGING)


def test_a_copy_that_is_still_whole_mends_what_stayed(world: CopiesWorld) -> None:
    """Its storage may have been away since: its files of the weights are the very same. Codes nobody has; nothing follows
    what is damaged.
    """
    world.copy()
    world.keep(optim="int8", optim_full=1)
    world.thinner().run_once(RUN)
    before, there = contents(world.path()), world.root.parent / "far" / naming.checkpoint_path(RUN, 5)
    copied = contents(there)
    for name in sorted(name for name in before if name.startswith("model-0")):
        flip(world.path() / name, 4500)
    with open_checkpoint(world.root, None, RUN, 5) as reader, pytest.raises(CorruptExtent):
        reader.read("master", EMBED)  # whose high bits are there
    assert world.repairer.repair(RUN, 5, CorruptExtent("found", file="model-00001-of-00002.safetensors")) == "replica far"
    assert contents(world.path()) == before
    codes = "optim.safetensors"
    flip(world.path() / codes, 4500)
    assert world.repairer.repair(RUN, 5, CorruptExtent("found", file=codes)) is None
    world.copy()
    assert contents(there) == copied


def test_a_flipped_bit_of_any_part_is_found(world: CopiesWorld) -> None:
    """Codes, scales, ranges, low bits, the list of ties, and the weights under them: no value of them is handed over."""
    world.keep(optim="int8", optim_full=1)
    world.thinner().run_once(RUN)
    with opened(world) as reader:
        made = reader.manifest
    assert made.compacted is not None and f"{EMBED}.low16.ties" in made.tensors["master"]
    tried = 0
    for group, coded_tensors in made.compacted.tensors.items():
        for name in coded_tensors:
            for need in coded.needs(made, group, name, whole(coded_tensors[name].shape)).values():
                stored = made.tensors[need.group][need.name]
                flip(world.path() / stored.file, stored.start + stored.nbytes - 1)
                with open_checkpoint(world.root, None, RUN, 5) as reader:
                    with pytest.raises(CorruptExtent):
                        reader.read(group, name)
                    assert [one.tensor for one in reader.verify()] == [need.name]
                flip(world.path() / stored.file, stored.start + stored.nbytes - 1)
                tried += 1
    assert tried > 10 and opened(world).manifest == made


def test_who_reads_the_directory_is_told_that_it_was_replaced(world: CopiesWorld) -> None:
    """Not that it is damaged: what stands there now is sound."""
    readers = [open_checkpoint(world.root, None, RUN, 5) for _ in range(3)]
    world.keep(optim="int8", optim_full=1)
    assert world.thinner().run_once(RUN) == [5, 10]
    weights = readers[0].read("model", EMBED)
    assert weights.tobytes() == trained_arrays()["model"][EMBED].tobytes()
    with pytest.raises(InUse, match="was replaced or removed"):
        readers[0].read("optim", f"{EMBED}/exp_avg")
    with pytest.raises(InUse, match="was replaced or removed"):
        readers[1].verify()
    with pytest.raises(InUse, match="was replaced or removed"):
        readers[2].read_file("optim.safetensors.index.json")
    for reader in readers:
        reader.close()


def test_runs_without_a_policy_have_the_usual_one(world: CopiesWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no file, adds to the trainer's `keep_last`, and ends with the run's own policy."""
    control = world.control
    own = control.rotation.file(RUN).etag
    usual = parse(["--keep-optim", "exact", "--keep-optim-full", "2", "--keep-full", "4"], {}).usual_policy
    monkeypatch.setattr(control.files, "_usual", usual)
    file = control.rotation.file(RUN)
    assert file.etag != own and file.policy is None and file.in_force.optim_full == 2 and file.in_force.last is None
    assert world.thinner().run_once(RUN) == [5] and opened(world).manifest.compacted is not None
    control.rotation.mark(RUN, 15, lambda file: run_files.pinned(file, 15))
    assert "optim" not in (world.root / RUN / naming.RUN_FILE).read_text()
    world.keep(last=7)
    monkeypatch.setattr(control.files, "_usual", RetentionPolicy(keep_full=1))
    assert world.thinner().run_once(RUN) == [] and control.rotation.file(RUN).in_force.keep_full is None


def test_marks_readers_and_other_saves_hold(world: CopiesWorld) -> None:
    """What is pinned or read stays as it is; one that was saved anew is not touched."""
    world.keep(optim="bf16", optim_full=1)
    world.control.rotation.mark(RUN, 5, lambda file: run_files.pinned(file, 5))
    with world.control.readers.reading(RUN, 10):
        assert world.thinner().run_once(RUN) == []
    with pytest.raises(InUse, match="saved again"):
        world.control.thinning.publish(naming.job_place(RUN, 10, "1"), b"", b"", b"another COMMIT", "bf16")
    assert [opened(world, step).manifest.compacted for step in STEPS] == [None] * 3


def test_a_rule_of_before_is_not_done(world: CopiesWorld) -> None:
    """Whoever wants `exact` now gets no int8 from a worker that began under the earlier policy, nor any after `none`."""
    thinning = world.control.thinning
    world.keep(optim="int8", optim_full=1)

    class Slow:
        """The policy is changed when the first one is staged."""

        due, clear = thinning.due, thinning.clear
        after = RetentionPolicy(optim="exact", optim_full=1)
        tried: list[int] = []  # noqa: RUF012

        def publish(self, place: naming.Place, *parts: Any) -> Any:
            self.tried.append(place.step)
            world.control.rotation.set_policy(RUN, self.after, "*")
            assert world.control.rotation.wait_until_applied()
            return thinning.publish(place, *parts)

    slow = Slow()
    assert Thinner(world.control.store, slow).run_once(RUN) == [] and slow.tried == [5]
    assert world.leftovers() == []
    slow.after = RetentionPolicy(last=9)
    assert Thinner(world.control.store, slow).run_once(RUN) == [] and slow.tried == [5, 5]
    world.keep(optim="exact", optim_full=1)
    assert world.thinner().run_once(RUN) == [5, 10]
    world.keep(optim="int8", optim_full=1)
    assert world.thinner().run_once(RUN) == []
    small = [opened(world, step).manifest.compacted for step in STEPS]
    assert [one and one.optim for one in small] == ["exact", "exact", None]


def test_a_policy_waits_for_what_is_being_published(world: CopiesWorld) -> None:
    """When it is set, nothing is removed, thinned or compacted by the one before any more."""
    rotation = world.control.rotation
    setting = threading.Thread(target=rotation.set_policy, args=(RUN, RetentionPolicy(last=9), "*"))
    with rotation.deciding(RUN):
        setting.start()
        setting.join(0.3)  # a slow machine proves less, and fails no more
        assert rotation.file(RUN).policy is None
    setting.join(180)
    assert rotation.file(RUN).policy == RetentionPolicy(last=9) and rotation.wait_until_applied()


def test_values_that_a_few_large_ones_hide_are_not_lost(tmp_path: Path) -> None:
    """A block's largest value says nothing of the others: where eight bits would lose them, bfloat16 keeps them."""
    arrays = trained_arrays()
    moments = arrays["optim"][f"{EMBED}/exp_avg"]
    moments[:] = np.random.default_rng(1).standard_normal(moments.shape)
    moments[:, ::256] = 1e6
    with copies_world(tmp_path, (5, 10), arrays=arrays) as world:
        world.keep(optim="int8", optim_full=1)
        assert world.thinner().run_once(RUN) == [5]
        with opened(world) as reader:
            small = reader.manifest.compacted
            assert small is not None and small.tensors["optim"][f"{EMBED}/exp_avg"].coding == "bf16"
            assert small.tensors["optim"][f"{EMBED}/exp_avg_sq"].coding == "int8-log"
            assert np.allclose(reader.read("optim", f"{EMBED}/exp_avg"), moments, rtol=2**-8)


def test_damage_full_disks_and_nothing_to_save(world: CopiesWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays whole, with nothing in staging, and the others are done."""
    world.keep(optim="int8", optim_full=1)
    flip(next(path for path in sorted(world.path(5).iterdir()) if path.name.startswith("optim-0")), 4500)
    reported: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(PosixTier, "free_bytes", lambda self: 4096)
        assert world.thinner().run_once(RUN) == []
    assert world.leftovers() == []
    assert world.control.record_queue.recorded(30)
    told = world.control.events.after(0, 100, kind="thinning-failed")
    assert [one.step for one in told] == [5, 10] and all("free space" in one.text for one in told)
    assert world.thinner(suspect=lambda run, step, error: reported.append(step)).run_once(RUN) == [10]
    assert reported == [5] and world.catalog.checkpoint(RUN, 5).compacted is None

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(posix.PosixFile, "write", full)
        world.keep(optim="exact", optim_full=1)
        assert world.thinner().run_once(RUN) == []
    assert world.leftovers() == [] and NoSpace.retryable


def test_it_is_tried_again_once_there_may_be_room(world: CopiesWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells of room that others have made. Before there is any, nothing of the checkpoint is read."""
    world.keep(optim="int8", optim_full=1)
    monkeypatch.setattr(thinner_module, "AGAIN_S", 0.05)
    worker = world.thinner().worker
    with monkeypatch.context() as patch:
        patch.setattr(PosixTier, "free_bytes", lambda self: 4096)
        patch.setattr(compactor, "_look", None)
        worker.due(RUN)
        assert worker.settle(60)
    wait_until(lambda: all(world.catalog.checkpoint(RUN, step).compacted is not None for step in (5, 10)))
    worker.close()


def test_what_cannot_be_smaller_stays(world: CopiesWorld, tmp_path: Path) -> None:
    """A checkpoint without anything that the rule knows is not tried."""
    with copies_world(tmp_path / "other", (5, 10)) as other:
        other.keep(optim="int8", optim_full=1)
        assert other.thinner().run_once(RUN) == []
        assert other.control.rotation.verdicts.preview(RUN).bytes_compacted == 0

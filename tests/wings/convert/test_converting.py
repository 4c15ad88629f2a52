"""Conversions from directory to directory: the same bytes as an import and an export, and refused alike."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from holdfast_formats import naming
from holdfast_formats.errors import AlreadyCommitted, CheckpointError, StateMismatch
from holdfast_service.control.checkpoints import roots
from holdfast_service.daemon.copying.copies import CopyControl
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.daemon.copying.streaming import StreamTarget
from holdfast_service.storage import PosixStore, PosixTier, StagedDirectory
from holdfast_service.wings.convert import converting, importing
from holdfast_service.wings.convert import export_jobs as exports
from holdfast_service.wings.convert.export_jobs import ExportWork
from holdfast_service.wings.convert.importing import Goal
from tests.checkpoints import build, flip
from tests.daemon.copies_world import CopiesWorld, copies_world
from tests.in_memory import in_memory
from tests.job_requests import a_conversion, an_export, an_import
from tests.wings.convert.exports.sources import LLAMA, llama, trained, values_of
from tests.wings.convert.transfers import Transfers

WEIGHTS = llama(hidden=16)
STEP = 2
KINDS = ("hf", "peft", "dcp", "paddle-uc", "paddle-flex")
ADAPTER = {
    f"base_model.model.layers.{n}.q.lora_{side}.weight": np.full(shape, n, np.float32)
    for n in range(2)
    for side, shape in (("A", (2, 8)), ("B", (8, 2)))
}
PROGRAM = """
name = "up"
from = "hf"
to = "mine"
statements = '''
model.layers.$LAYER_ID.mlp.up_proj.weight^T -> model.layers.$LAYER_ID.UP.weight
* -> *
'''
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: nothing here asks anything of a disk."""
    with in_memory() as directory:
        yield directory


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CopiesWorld]:
    with copies_world(tmp_path, replicas=()) as made:
        assets = {"config.json": json.dumps(LLAMA).encode()}
        path = made.root / naming.checkpoint_path("llama", STEP)
        build(path, trained(WEIGHTS), run="llama", step=STEP, assets=assets, ranks=values_of(list(WEIGHTS)))
        adapter = {"adapter_config.json": json.dumps({"peft_type": "LORA", "r": 2}).encode()}
        path = made.root / naming.checkpoint_path("adapter", STEP)
        build(path, {"adapter": ADAPTER}, run="adapter", step=STEP, assets=adapter)
        roots.reconcile(PosixStore(made.tier), made.catalog)
        yield made


@pytest.fixture
def transfers(world: CopiesWorld) -> Transfers:
    return Transfers(world.control, world.repairer)


def converted(source: Path, target: Path, terms: dict[str, Any]) -> dict[str, Any]:
    conversion = converting.plan_conversion(PosixTier(source), a_conversion(**terms))
    return exports.convert(conversion, ExportWork(PosixTier(target.parent), target.name, Quiet()))


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its path there."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_as_an_import_and_an_export(transfers: Transfers, tmp_path: Path, kind: str) -> None:
    """Byte by byte, to whatever kind, with and without a program; what the two cannot do together is refused alike."""
    place, outcomes = tmp_path / "place", []
    run = "adapter" if kind == "peft" else "llama"
    transfers.export(PosixTier(place), an_export(run, STEP, "source", **{"as": kind}), Quiet())
    transfers.bring(PosixTier(place / "source"), an_import("again", STEP), Quiet())
    before = files_of(place / "source")
    for made_as, program in product(KINDS, (None, PROGRAM)):
        terms = {"as": made_as, "program": program}
        try:
            transfers.export(PosixTier(place), an_export("again", STEP, "both", **terms), Quiet())
        except CheckpointError as refused:
            with pytest.raises(type(refused)) as caught:
                converted(place / "source", place / "once", terms)
            assert caught.value.detail == refused.detail
            outcomes.append(None)
        else:
            done = converted(place / "source", place / "once", terms)
            assert files_of(place / "once") == files_of(place / "both"), (made_as, program)
            assert done["files"] == len(files_of(place / "once"))
            assert {file["file"] for file in done["source"]["files"]} == before.keys()
            outcomes.append(made_as)
            for name in ("both", "once"):
                shutil.rmtree(place / name)
        assert os.listdir(place) == ["source"] and files_of(place / "source") == before
    assert set(outcomes) >= ({"peft"} if kind == "peft" else set(KINDS) - {"peft"})


class Meddling:
    """Does something to the source when the work is a way along."""

    def __init__(self, at: int, act: Callable[[], object]) -> None:
        self._at, self._act, self._count = at, act, 0

    def report(self, done_bytes: int, total_bytes: int) -> None:
        self._count += 1
        if self._count == self._at:
            self._act()


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize(
    ("what", "says"),
    [("tensors", "model.safetensors changed"), ("asset", "config.json changed"), ("more", "more.bin has come")],
)
def test_a_source_that_changes_meanwhile(transfers: Transfers, tmp_path: Path, at: int, what: str, says: str) -> None:
    """Its file is named, and nothing is left; the same for one that was only copied, and for one that has come."""
    place = tmp_path / "place"
    transfers.export(PosixTier(place), an_export("llama", STEP, "source", **{"as": "hf"}), Quiet())
    source = place / "source"
    acts: dict[str, Callable[[], object]] = {
        "tensors": lambda: os.utime(source / "model.safetensors", ns=(1, 1)),
        "asset": lambda: (source / "config.json").write_text("{}"),
        "more": lambda: (source / "more.bin").write_bytes(b"x"),
    }
    conversion = converting.plan_conversion(PosixTier(source), a_conversion(form="hf"))
    with pytest.raises(StateMismatch, match=says):
        exports.convert(conversion, ExportWork(PosixTier(place), "out", Meddling(at, acts[what])))
    assert os.listdir(place) == ["source"]


def test_stored_twice_with_different_values(tmp_path: Path) -> None:
    """Nobody knows which one is right: refused by name, as an import refuses it."""
    source = tmp_path / "source"
    source.mkdir()
    for number in (1, 2):
        arrays = {"w": np.full((3, 4), number, np.float32), f"only.{number}": np.ones(3, np.float32)}
        save_file(arrays, source / f"model-{number:05}-of-00002.safetensors", metadata={"format": "pt"})
    for made_as in ("hf", "dcp"):
        with pytest.raises(CheckpointError) as caught:
            converted(source, tmp_path / "out", {"as": made_as})
        with pytest.raises(type(caught.value)) as other:
            importing.write(
                importing.plan_import(PosixTier(source), Goal("mine", 0, 0), an_import("mine", 0).arguments),
                StreamTarget(StagedDirectory(PosixTier(tmp_path), "staged")),
                CopyControl(),
            )
        assert caught.value.detail == other.value.detail and not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["byte", "file", "nothing"])
def test_a_name_that_is_taken_when_work_is_done_again(transfers: Transfers, tmp_path: Path, change: str) -> None:
    """It is this work's own if every byte is, and no file more; else it stays, and is somebody's."""
    place = tmp_path / "place"
    wanted = an_export("llama", STEP, "sub/out", **{"as": "paddle-uc"})
    transfers.export(PosixTier(place), wanted, Quiet())
    out = place / "sub" / "out"
    if change == "byte":
        flip(out / "model-00001-of-00001.safetensors", 3000)
    elif change == "file":
        (out / "mine").write_text("x")
    before = files_of(out)
    with pytest.raises(AlreadyCommitted):
        transfers.export(PosixTier(place), wanted, Quiet())
    if change == "nothing":
        assert transfers.export(PosixTier(place), wanted, Quiet(), again=True)["to"] == "sub/out"
    else:
        with pytest.raises(AlreadyCommitted):
            transfers.export(PosixTier(place), wanted, Quiet(), again=True)
    assert files_of(out) == before and os.listdir(place / "sub") == ["out"]


def test_a_computed_tensor(tmp_path: Path) -> None:
    """A Gemma's norms, which GGUF stores plus one, by the executor that streams and proves."""
    sizes = {"hidden_size": 16, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    config = {**LLAMA, **sizes, "model_type": "gemma", "vocab_size": 12, "max_position_embeddings": 32}
    source = tmp_path / "source"
    source.mkdir()
    weights = {name: array for name, array in WEIGHTS.items() if name != "lm_head.weight"}
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(config))
    done = converted(source, tmp_path / "made", {"as": "gguf", "dtype": "F32"})
    assert done["tensors"] == len(weights)
    last = weights["model.norm.weight"].astype(np.float32) + np.float32(1)
    assert last.tobytes() in (tmp_path / "made" / "model.gguf").read_bytes()


def test_files_in_directories_of_their_own(transfers: Transfers, tmp_path: Path) -> None:
    """DeepSpeed keeps each parameter in one; they are staged, published and found as others are."""
    place = tmp_path / "place"
    transfers.export(PosixTier(place), an_export("llama", STEP, "source", **{"as": "dcp"}), Quiet())
    transfers.export(PosixTier(place), an_export("llama", STEP, "direct", **{"as": "deepspeed-universal"}), Quiet())
    transfers.bring(PosixTier(place / "source"), an_import("again", STEP), Quiet())
    transfers.export(PosixTier(place), an_export("again", STEP, "both", **{"as": "deepspeed-universal"}), Quiet())
    direct, both = files_of(place / "direct"), files_of(place / "both")
    settings = f"global_step{STEP}_universal/zero/optimizer_state.pt"  # to which DCP's export adds `foreach` and others
    assert direct.keys() == both.keys() and all(both[name] == data for name, data in direct.items() if name != settings)
    name = f"global_step{STEP}_universal/zero/model.norm.weight/fp32.pt"
    held = torch.load(place / "direct" / name, weights_only=True)["param"].numpy()
    assert held.tobytes() == trained(WEIGHTS)["master"]["model.norm.weight"].tobytes()

"""Every reader of bytes that somebody else may have made, each with valid inputs to begin from."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from safetensors import torch as safetensors_torch

from holdfast_formats import naming
from holdfast_formats.disk import manifests, safetensors, state_json
from holdfast_formats.errors import CheckpointError, from_problem
from holdfast_formats.layout import language
from holdfast_formats.layout.rules import choice, document
from holdfast_formats.layout.rules.table import compile_table
from holdfast_formats.mapping import reading
from holdfast_formats.region import Box
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_formats.root_files import RootMark
from holdfast_formats.staging import arena, slot_table, wire
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.api.access import bodies
from holdfast_service.api.content import open_checkpoints
from holdfast_service.control.access import tokens
from holdfast_service.control.catalog import pages
from holdfast_service.control.checkpoints import run_files
from holdfast_service.daemon.arena import holder
from holdfast_service.storage.memory import MemoryTier
from holdfast_service.wings.convert.foreign.gguf import kinds as gguf
from holdfast_service.wings.convert.foreign.nemo import kinds as nemo
from holdfast_service.wings.convert.foreign.nemo.archive import ArchivedFiles
from holdfast_service.wings.convert.foreign.orbax import kinds as orbax
from holdfast_service.wings.convert.foreign.trainers import trainer
from tests.wings.convert.foreign.gguf.files import LLAMA as GGUF_METADATA
from tests.wings.convert.foreign.gguf.files import encoded as gguf_file
from tests.wings.convert.foreign.gguf.files import llama
from tests.wings.convert.foreign.nemo import archives as nemo_files
from tests.wings.convert.foreign.orbax import files as orbax_files
from tests.wings.convert.foreign.trainers import directories as trainers

from .mutating import bytes_changed, framed, mutated

GOLDEN = Path(__file__).parents[1] / "golden" / "v1/golden/checkpoints/step-00000500"
Mutate = Callable[[random.Random, bytes], bytes]


class Parser(NamedTuple):
    """`parse` either understands an input or raises an error of ours by name."""

    name: str
    parse: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    mutate: Mutate = mutated


def _safetensors(data: bytes) -> None:
    with suppress(CheckpointError):
        safetensors.decode(data, 2**40)  # the head of a file that is said to be large
    found = safetensors.decode(data, len(data))
    safetensors.encode(found.tensors, found.metadata)


def _manifest(data: bytes) -> None:
    sha256 = hashlib.sha256(data).hexdigest()
    try:
        files = json.loads(data)["files"]
        stated = (sum(file["bytes"] for file in files), len(files))
        commit = msgspec.json.encode(manifests.Commit(1, sha256, *stated)) + b"\n"
    except Exception:  # then there is no COMMIT that fits
        commit = msgspec.json.encode(manifests.Commit(1, sha256, 0, 0)) + b"\n"
    made = manifests.decode(data, commit)
    manifests.validate(made)


def _commit(data: bytes) -> None:
    manifests.decode((GOLDEN / naming.MANIFEST).read_bytes(), data)


def _run_file(data: bytes) -> None:
    tier = MemoryTier()
    tier.replace("run/run.json", data)
    file = run_files.read_run_file(tier, "run")
    run_files.write_run_file(tier, "run", file)


def _arena(data: bytes) -> None:
    memory = memoryview(data)
    made = arena.read_superblock(memory)
    arena.read_owner(memory)
    for slot in range(made.slots):
        arena.read_header(memory, made, slot)


def _holder(data: bytes) -> None:
    fd = os.memfd_create("fuzz")
    try:
        os.pwrite(fd, data, 0)
        holder.sealed_saves(fd)
    finally:
        os.close(fd)


def _frames(messages: Any, data: bytes) -> None:
    decoder = wire.FrameDecoder(messages)
    middle = len(data) // 2
    for message in [*decoder.feed(data[:middle]), *decoder.feed(data[middle:])]:
        wire.encode_frame(message)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _layout(data: bytes) -> None:
    found = language.parse(_text(data))
    assert language.parse(language.text(found)) == found


def _rules(data: bytes) -> None:
    compile_table(choice._lineage(document.check(document.decode(data))))


def _state(data: bytes) -> None:
    state_json.for_rank(data, 1)
    for group in ("extra", "optim"):
        state_json.by_rank(data, group)


def _problem(data: bytes) -> None:
    body = bodies.parse(data)
    if isinstance(body, dict):
        str(from_problem(body))
        from_problem(body).problem()


def _gguf(data: bytes) -> None:
    tier = MemoryTier()
    tier.replace("m.gguf", data)
    with suppress(CheckpointError):
        gguf.read(tier, ReadOptions(as_is=True))
    gguf.read(tier, ReadOptions())


def _nemo(data: bytes) -> None:
    """An archive, and the checkpoint in it."""
    tier = MemoryTier()
    tier.replace("m.nemo", data)
    for tensor in nemo.read(ArchivedFiles(tier, "m.nemo"), ReadOptions()).tensors.values():
        reading.fetched(ArchivedFiles(tier, "m.nemo"), tensor)


def _orbax(name: str, files: Mapping[str, bytes], data: bytes) -> None:
    """A file of a checkpoint, of which the others are whole; all of it is read."""
    tier = MemoryTier()
    for path, whole in files.items():
        tier.replace(path, data if path == name else whole)
    for tensor in orbax.read(tier, ReadOptions()).tensors.values():
        if tensor.spec.nbytes < 2**20:
            reading.fetched(tier, tensor)


class _TorchFile(NamedTuple):
    """A file of a Trainer's checkpoint: its pickle, which is changed, and the other members of its zip."""

    name: str
    pickle: bytes
    members: dict[str, bytes]

    @staticmethod
    def of(name: str, value: Any) -> _TorchFile:
        saved = io.BytesIO()
        torch.save(value, saved)
        with zipfile.ZipFile(saved) as members:
            held = {path: members.read(path) for path in members.namelist()}
        return _TorchFile(name, held.pop("archive/data.pkl"), held)

    def parse(self, data: bytes) -> None:
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as members:
            for path, held in {"archive/data.pkl": data, **self.members}.items():
                members.writestr(path, held)
        tier = MemoryTier()
        weights = {"w": torch.ones(2)}
        for name, held in (
            ("model.safetensors", safetensors_torch.save(weights, {"format": "pt"})),
            ("trainer_state.json", b'{"global_step": 4}'),
            (self.name, made.getvalue()),
        ):
            tier.replace(name, held)
        trainer.KIND.read(tier, ReadOptions())


def _segment() -> bytes:
    made = arena.geometry(2, 4096, 4096)
    memory = bytearray(made.segment_bytes)
    arena.write_superblock(memoryview(memory), made, arena.SegmentOwner("run", 0, 1, 1))
    for slot in range(made.slots):
        arena.write_header(memoryview(memory), made, slot, arena.SlotHeader(arena.SlotState.SEALED, 5, 1, 8, 8, 1))
    return bytes(memory)


def _table() -> bytes:
    spec = TensorSpec("model", "w", "F32", (4, 4))
    held = (StagedFragment(spec, (Box((0, 0), (2, 4)),), 0),)
    made = SlotTable(
        "run", 5, 1, 0, 1, ("model", "extra"), held, {"extra": {"lr": "0.1"}}, {"model": {"v": "w"}}, metrics={"loss": 2.5}
    )
    return slot_table.encode(made)


def _wire_seeds(*messages: wire.Message) -> tuple[bytes, ...]:
    return tuple(map(wire.encode_frame, messages))


_STATE = state_json.merge(
    5, {"loss": 2.5}, ["model", "extra"], {0: {"extra": {"lr": "0.1", "x": "[1]"}}, 1: {"extra": {"lr": "0.1", "x": "[2]"}}}
)
_CURSOR = open_checkpoints.encode_cursor("model", "w").encode()
_LAYOUTS = (
    b"tp=4,pp=2,dp=8",
    b"tp=2,pp=2:3/1,sharding=4:stage1:flat:align=8:pad=2:bucket=99,vocab=64,qkv=heads,experts=stacked,rules=gpt-2",
    b"tp=8,etp=1,ep=8,cp=2,dp=2,order=tp-cp-ep-dp-pp",
    b'{"tp": 2, "pp": 2}',
)
_RULES = Path(document.__file__).parent
_RUN_FILE = (
    b'{"format":1,"keep_last":3,"pins":[5],"labels":{"good":[5,10]},"policy":{"last":2,"every_steps":10,'
    b'"best":[{"metric":"loss","mode":"min","count":1}],"steps":[1],"quota_bytes":5}}'
)
_framed_8: Mutate = partial(framed, length_bytes=8)
_framed_4: Mutate = partial(framed, length_bytes=wire.LENGTH_BYTES)
_FILES = tuple(path.read_bytes() for path in sorted(GOLDEN.glob("*.safetensors")))[:3]

_GGUF = tuple(gguf_file(GGUF_METADATA, {name: one for name, one, _ in llama(dtype).values()}) for dtype in ("f4", "f2"))

_NEMO = io.BytesIO()
torch.save({"w": torch.ones(2), "b": torch.zeros(3, dtype=torch.bfloat16)}, _NEMO)
_NEMO_TAR = nemo_files.packed(
    nemo_files.member("./model_config.yaml", b"a: 1"), nemo_files.member("./model_weights.ckpt", _NEMO.getvalue())
)

_ARRAYS = orbax_files.zarr("params.w", np.arange(1, 13, dtype="f4"), (5,)) | orbax_files.zarr_3(
    "step", np.arange(1, 5), (4,), (2,)
)
_ORBAX = orbax_files.database(_ARRAYS) | orbax_files.tree("params.w", "step")
_ORBAX_FILES = {"orbax-manifest": "manifest.ocdbt", "orbax-data": orbax_files.DATA, "orbax-tree": "_METADATA"}

_TRAINER = (
    _TorchFile.of("optimizer.pt", trainers.trained()[1].state_dict()),
    _TorchFile.of("rng_state.pth", trainers.drawn()),
    _TorchFile.of("scheduler.pt", trainers.trained()[2].state_dict()),
)

PARSERS = (
    *(Parser(f"trainer-{one.name.partition('.')[0]}", one.parse, (one.pickle,), bytes_changed) for one in _TRAINER),
    *(Parser(name, partial(_orbax, file, _ORBAX), (_ORBAX[file],), bytes_changed) for name, file in _ORBAX_FILES.items()),
    Parser("nemo", _nemo, (_NEMO_TAR, gzip.compress(_NEMO_TAR)), bytes_changed),
    Parser("gguf", _gguf, _GGUF, bytes_changed),
    Parser("safetensors", _safetensors, _FILES, _framed_8),
    Parser("manifest", _manifest, ((GOLDEN / naming.MANIFEST).read_bytes(),)),
    Parser("commit", _commit, ((GOLDEN / naming.COMMIT).read_bytes(),)),
    Parser("run-file", _run_file, (_RUN_FILE,)),
    Parser("table", lambda data: slot_table.decode(data, 10_000), (_table(),)),
    Parser("arena", _arena, (_segment(),), bytes_changed),
    Parser("holder", _holder, (_segment(),), bytes_changed),
    Parser(
        "wire-to-daemon",
        partial(_frames, wire.TO_DAEMON),
        _wire_seeds(
            wire.Hello(id=1, run="r", rank=0, world=1, launch="x"),
            wire.Reserve(id=2, slots=2, data_bytes=5, table_bytes=5),
            wire.Lease(id=3, step=5),
            wire.Choose(id=4, turn=0, groups=("model",)),
        ),
        _framed_4,
    ),
    Parser(
        "wire-to-rank",
        partial(_frames, wire.TO_RANK),
        _wire_seeds(
            wire.Welcome(reply_to=1, attempt=1, node="n", root="/r", mark=RootMark(id="r"), version="1", url=None),
            wire.Failed(reply_to=2, problem={"code": "no-space", "detail": "d", "hint": "h"}),
            wire.Outcome(step=5, attempt=1, state="aborted", problem={"code": "round-aborted"}),
        ),
        _framed_4,
    ),
    Parser("layout", _layout, _LAYOUTS, mutated),
    Parser("rules", _rules, tuple(path.read_bytes() for path in sorted(_RULES.rglob("*.toml")))[:3], bytes_changed),
    Parser("state", _state, (_STATE,)),
    Parser("cursor", lambda data: pages.decode_cursor("run", _text(data)), (b"cnVuOmE=",), bytes_changed),
    Parser("cursor-of-tensors", lambda data: open_checkpoints.decode_cursor(_text(data), 2), (_CURSOR,), bytes_changed),
    Parser("body", bodies.parse, (_RUN_FILE, b'{"name": "a", "runs": "*", "expires_s": 60}')),
    Parser("problem", _problem, (b'{"code": "no-space", "detail": "d", "hint": "h", "needed": 5, "type": "t"}',)),
    Parser("token", lambda data: tokens.well_formed(_text(data)), (tokens.PREFIX.encode() + b"A" * 48,), bytes_changed),
)

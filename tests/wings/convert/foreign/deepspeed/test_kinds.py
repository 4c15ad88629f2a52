"""Checkpoints that DeepSpeed wrote are whole tensors by name, bit for bit, and what does not fit is refused by file and key.

`tests/golden/make_deepspeed.py` made them, and the tensors that DeepSpeed's own functions give beside them.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from holdfast_formats.errors import CheckpointError, CorruptManifest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping import reading
from holdfast_formats.mapping.listing import ForeignListing, ForeignTensor, TensorKey
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert.foreign.deepspeed.kinds import KIND
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS

GOLDEN = Path(__file__).parents[4] / "golden/foreign/deepspeed.tar.xz"
VARIANTS = (
    "zero1_fp32",
    "zero1_bf16_accumulated",
    "zero2_bf16_round_robin",
    "zero2_fp16",
    "zero3_fp32",
    "zero3_bf16",
)
TAG = "global_step3"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(target, filter="data")
    return target


@pytest.fixture
def directory(unpacked: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of one of them, without what is expected of it."""
    source = unpacked / getattr(request, "param", "zero2_fp16")
    for path in source.rglob("*"):
        if path.is_file() and path.name != "expected.safetensors":
            target = tmp_path / "source" / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path / "source"


def read(directory: Path) -> ForeignListing:
    return KIND.read(hub_snapshot.opened(directory), ReadOptions())


def bits(files: Files, tensor: ForeignTensor) -> bytes:
    """The values, after those of its copies were found to be the same."""
    found = reading.fetched(files, tensor).tobytes()
    if tensor.copies:
        assert reading.fetched(files, tensor._replace(pieces=tensor.copies)).tobytes() == found
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_as_deepspeed_says(unpacked: Path, name: str) -> None:
    """Every weight, master and moment is what DeepSpeed's own functions give, and nothing is left out."""
    wanted = load_file(unpacked / name / "expected.safetensors")
    files = hub_snapshot.opened(unpacked / name)
    assert choose(files, None, KINDS) is KIND
    (unpacked / name / "expected.safetensors").rename(unpacked / f"{name}.safetensors")
    try:
        listing = KIND.read(files, ReadOptions())
        compare(files, listing, wanted, "fp32" in name)
    finally:
        (unpacked / f"{name}.safetensors").rename(unpacked / name / "expected.safetensors")
    used = {use.file for use in listing.files}
    assert {f"{TAG}/{path.name}" for path in (unpacked / name / TAG).iterdir()} <= used
    assert all(use.reason for use in listing.files if use.use == "unused")
    assert listing.step == 3


def compare(files: Files, listing: ForeignListing, wanted: dict[str, torch.Tensor], plain: bool) -> None:
    """All tensors of the listing against DeepSpeed's."""
    expected = {}
    for name, tensor in wanted.items():
        parameter, slash, kind = name.rpartition("/")
        group = "master" if kind == "master" else "optim" if slash else "model"
        if not (plain and kind == "master"):
            expected[TensorKey(group, parameter if kind == "master" else name)] = tensor
    trained = {key.name.rpartition("/")[0] for key in expected if key.group == "optim"}
    steps = {TensorKey("optim", f"{name}/step") for name in trained}
    # The tied head is a name of the weight of `embed`, which DeepSpeed lists once.
    assert set(listing.tensors) == {*expected, *steps, TensorKey("model", "head.weight")}
    for key, tensor in expected.items():
        assert listing.tensors[key].spec.shape == tuple(tensor.shape)
        assert bits(files, listing.tensors[key]) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), key
    head, embed = (listing.tensors[TensorKey("model", f"{name}.weight")] for name in ("head", "embed"))
    assert bits(files, head) == bits(files, embed)
    assert {reading.fetched(files, listing.tensors[key]).item() for key in steps} <= {1.0, 2.0, 3.0}


def test_documents(unpacked: Path) -> None:
    """The schedule, the scaler, counters, and what the caller gave, as JSON; hyper-parameters by name."""
    listing = KIND.read(_Only(unpacked / "zero2_fp16"), ReadOptions())
    extra = listing.documents["extra"]
    theirs = extra["deepspeed"]
    assert theirs["counters"] == {"global_steps": 3, "global_samples": 36, "skipped_steps": 0}
    assert extra["scheduler"] == {"last_batch_iteration": 2}
    assert theirs["client_state"] == {"epoch": 2, "seen": {"$tuple": ["a", 1]}} and theirs["tag"] == ""
    assert theirs["loss_scale"]["dynamic"] is True and "dtype" not in theirs["loss_scale"]
    assert extra["deepspeed_checkpoint"]["ds_version"] == "0.19.8"
    groups = listing.documents["optim"]["optimizer"]["groups"]
    decays = {
        name: group["weight_decay"] for group in groups.values() if isinstance(group, dict) for name in group["params"]
    }
    assert decays["embed.weight"] == 0.01 and decays["scale"] == 0.0


def test_hyper_parameters_of_zero_3(unpacked: Path) -> None:
    """Its groups list sub-groups of parameters."""
    listing = KIND.read(_Only(unpacked / "zero3_bf16"), ReadOptions())
    (group,) = (one for one in listing.documents["optim"]["optimizer"]["groups"].values() if isinstance(one, dict))
    assert set(group["params"]) == {"scale", "embed.weight", "mix.weight", "mix.bias", "out.weight", "out.bias"}
    assert group["lr"] == 0.0006826061944859854 and group["betas"] == {"$tuple": [0.9, 0.999]}
    assert not any("hyper-parameters" in note for note in listing.notes)


class _Only:
    """The files of a directory without what is expected of it."""

    def __init__(self, directory: Path) -> None:
        self.files = hub_snapshot.opened(directory)
        self.read, self.read_into, self.size = self.files.read, self.files.read_into, self.files.size

    def list(self, path: str) -> list[str]:
        return [name for name in self.files.list(path) if name != "expected.safetensors"]


def test_the_directory_of_a_step(directory: Path) -> None:
    """The directory of one step is read by itself as well, with the same tensors; others beside it are named."""
    inner = KIND.read(hub_snapshot.opened(directory / TAG), ReadOptions())
    assert set(inner.tensors) == set(read(directory).tensors)
    (directory / "global_step1").mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    uses = {use.file: use for use in read(directory).files}
    assert (uses["global_step1"].use, uses["config.json"].use) == ("unused", "asset")
    assert "copy" in uses["model.safetensors"].reason


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a file of a checkpoint again, with a change."""
    import sys
    import types

    made: dict[str, Any] = {}
    for name in ("ZeroStageEnum", "LossScaler", "DynamicLossScaler", "fragment_address"):
        made[name] = type(name, (int,) if name == "ZeroStageEnum" else (), {})
    homes = {
        "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
        "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
        "deepspeed.utils.tensor_fragment": ("fragment_address",),
    }
    before = dict(sys.modules)
    try:
        for home in homes:
            parts = home.split(".")
            for depth in range(1, len(parts) + 1):
                sys.modules[".".join(parts[:depth])] = types.ModuleType(".".join(parts[:depth]))
        for home, names in homes.items():
            for name in names:
                made[name].__module__ = home
                setattr(sys.modules[home], name, made[name])
        value = torch.load(path, weights_only=False)
        change(value)
        torch.save(value, path)
    finally:
        for name in sys.modules.keys() - before.keys():
            del sys.modules[name]


OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def _set(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(value: Any) -> None:
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (OPTIMIZER, _set("surprise", to=1), "has 'surprise'"),
        (OPTIMIZER, _set("optimizer_state_dict", "surprise", to=1), "has 'surprise'"),
        (OPTIMIZER, _set("optimizer_state_dict", "partition_count", to=[2, 2]), "but 3 ranks have files"),
        (OPTIMIZER, _set("optimizer_state_dict", "zero_stage", to=1), "from another ZeRO stage"),
        (
            OPTIMIZER,
            _set("optimizer_state_dict", "base_optimizer_state", "state", 0, "step", to=7),
            r"_states.pt has|from another step",
        ),
        (OPTIMIZER, _set("optimizer_state_dict", "base_optimizer_state", "state", 0, "exp_avg", to="x"), "neither flat nor"),
        (OPTIMIZER, _set("optimizer_state_dict", "base_optimizer_state", to=[]), "has no dict"),
        (
            OPTIMIZER,
            _set("optimizer_state_dict", "single_partition_of_fp32_groups", 0, to=torch.zeros(40)),
            "elements in all partitions|out of order",
        ),
        (MODEL, _set("module", "surprise", to={}), "has 'surprise'"),
        (MODEL, _set("data_sampler", to={"a": 1}), "has 'data_sampler'"),
        (MODEL, _set("client", to=[torch.ones(2)]), r"has 'client_state\.client"),
        (MODEL, _set("mp_world_size", to=2), "tensor-parallel ranks"),
        (
            MODEL,
            _set("param_shapes", 0, "embed.weight", to=torch.Size((12, 5))),
            "elements in all partitions|is not where|its master",
        ),
        (MODEL, lambda value: value["module"].pop("mix.bias"), "lacks weight 'mix.bias'"),
        (MODEL, lambda value: value["param_shapes"][0].pop("mix.weight"), "has different parameter groups"),
        (MODEL, lambda value: value.pop("global_steps"), "has no number 'global_steps'"),
    ],
)
def test_what_does_not_fit(directory: Path, file: str, change: Callable[[dict[str, Any]], None], said: str) -> None:
    """Keys that nobody knows, files of other steps, stages and worlds, and sizes that disagree: by file."""
    _edit(directory / TAG / file, lambda value: None)
    read(directory)
    _edit(directory / TAG / file, change)
    with pytest.raises(StateMismatch, match=said) as refused:
        read(directory)
    assert str(refused.value.members["file"]).startswith(TAG)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "lacks files of some ranks of tensor parallelism"),
        ("layer_00-model_00-model_states.pt", "does not belong to a checkpoint that uses only ZeRO"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "does not belong to a checkpoint that uses only ZeRO"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "belong to the same rank"),
        ("zero_pp_rank_5_mp_rank_00_optim_states.pt", "the file of rank 3 is missing"),
    ],
)
def test_other_kinds_of_parallelism(directory: Path, name: str, said: str) -> None:
    """Files of tensor, pipeline and expert parallelism, and of ranks that are not all there, are refused by name."""
    (directory / TAG / name).write_bytes(b"")
    with pytest.raises(StateMismatch, match=said):
        read(directory)


@pytest.mark.parametrize("directory", ["zero2_fp16", "zero3_bf16"], indirect=True)
def test_files_that_are_missing_or_cut_off(directory: Path) -> None:
    """Without any one of its files, or with one cut off, nothing is listed; a file that nobody knows is named."""
    for path in sorted((directory / TAG).iterdir()):
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(StateMismatch):
            read(directory)
        path.write_bytes(data[:-30])
        with pytest.raises(CorruptManifest, match=path.name):
            read(directory)
        path.write_bytes(data)
    (directory / "optimizer.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is not known in this kind"):
        read(directory)

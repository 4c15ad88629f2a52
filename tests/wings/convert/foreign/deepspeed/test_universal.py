"""A universal checkpoint is the same training as the checkpoint that it was converted from, bit for bit.

`converted` writes what `ds_to_universal` of DeepSpeed 0.19 writes; `tests/integrations/deepspeed` has the real one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast_formats.errors import CheckpointError, CorruptManifest, StateMismatch
from holdfast_formats.mapping import reading
from holdfast_formats.mapping.listing import ForeignListing, TensorKey
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert.foreign.deepspeed.kinds import KIND
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from tests.wings.convert.foreign.deepspeed.test_kinds import TAG, directory, unpacked

__all__ = ["directory", "unpacked"]
UNIVERSAL = f"{TAG}_universal"
CASES = pytest.mark.parametrize("directory", ["zero1_fp32", "zero2_fp16", "zero3_bf16"], indirect=True)
BF16 = pytest.mark.parametrize("directory", ["zero2_bf16_round_robin"], indirect=True)


def read(place: Path) -> ForeignListing:
    files = hub_snapshot.opened(place)
    assert choose(files, None, KINDS) is KIND
    return KIND.read(files, ReadOptions())


def values(place: Path, listing: ForeignListing) -> dict[TensorKey, bytes]:
    files = hub_snapshot.opened(place)
    return {key: reading.fetched(files, tensor).tobytes() for key, tensor in listing.tensors.items()}


def converted(source: Path, target: Path) -> Path:
    """The universal checkpoint of an ordinary one, below `target`."""
    listing, files, flat = (
        read(source),
        hub_snapshot.opened(source),
        "zero3" in str(next(source.rglob("zero_pp*model*"), "")),
    )
    flat = any("zero_pp_rank" in path.name for path in (source / TAG).glob("*model_states.pt"))
    tag = target / UNIVERSAL
    (tag / "zero").mkdir(parents=True)
    for path in (source / TAG).glob("*model_states.pt"):
        shutil.copy(path, tag / path.name)
    held = {
        key: torch.from_numpy(reading.fetched(files, one).copy())
        for key, one in listing.tensors.items()
        if one.spec.dtype == "F32"
    }
    steps = {}
    for key, tensor in held.items():
        name, _, kind = key.name.rpartition("/")
        if key.group != "optim":
            continue
        if kind == "step":
            steps[name] = tensor
            continue
        _save(tag / "zero" / name / f"{kind}.pt", tensor, flat)
    for name, step in steps.items():
        master = held.get(TensorKey("master", name), held.get(TensorKey("model", name)))
        _save(tag / "zero" / name / "fp32.pt", master, flat)
        if not flat:
            torch.save(step, tag / "zero" / name / "step.pt")
    document = listing.documents["optim"]["optimizer"]["groups"]
    groups: list[dict[str, Any]] = [{"lr": one.get("lr", 0.5), "params": [n]} for n, one in enumerate(document.values())]
    inner = {"state": {0: {"step": next(iter(steps.values()))}}, "param_groups": groups}
    state = {"param_groups": groups, "zero_stage": 3 if flat else 1, "ds_version": "0.19.8"}
    torch.save({**state, **({"optimizer_state_dict": inner} if flat else {})}, tag / "zero" / "optimizer_state.pt")
    (target / "latest_universal").write_text(UNIVERSAL)
    return target


def _save(path: Path, tensor: torch.Tensor, flat: bool) -> None:
    path.parent.mkdir(exist_ok=True)
    torch.save(tensor.reshape(-1).clone() if flat else {"param": tensor, "cat_dim": 0}, path)


@CASES
def test_the_same_training(directory: Path, tmp_path: Path) -> None:
    """Weights, masters, moments, steps, values: out of the directory above, and out of the checkpoint's own."""
    wanted = read(directory)
    top = converted(directory, tmp_path / "universal")
    for place in (top, top / UNIVERSAL):
        found = read(place)
        assert values(place, found) == values(directory, wanted)
        assert found.step == wanted.step and found.documents["extra"].keys() == wanted.documents["extra"].keys()
        named = [one["params"] for one in found.documents["optim"]["optimizer"]["groups"].values()]
        ordinary = [one["params"] for one in wanted.documents["optim"]["optimizer"]["groups"].values()]
        assert [name for group in named for name in group] == [name for group in ordinary for name in group]
    names = {str(path.relative_to(top)) for path in top.rglob("*") if path.is_file()}
    assert {use.file for use in read(top).files} == names


@CASES
def test_beside_the_ordinary_one(directory: Path) -> None:
    """As DeepSpeed's own conversion leaves it: the ordinary one is read, and this is said of the other."""
    converted(directory, directory.parent / "other")
    shutil.move(directory.parent / "other" / UNIVERSAL, directory / UNIVERSAL)
    uses = {use.file: use for use in read(directory).files}
    assert uses[UNIVERSAL].use == "unused" and "separate checkpoint" in uses[UNIVERSAL].reason


@BF16
def test_parallel_models(directory: Path, tmp_path: Path) -> None:
    """The model states have parts of the weights: the whole ones are the masters, rounded, and this is said."""
    wanted = read(directory)
    top = converted(directory, tmp_path / "universal")
    path = top / UNIVERSAL / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=False)
    torch.save({**model, "mp_world_size": 2, "module": {}}, path)
    found = read(top)
    assert any("rounded to BF16" in note for note in found.notes)
    held, ordinary = values(top, found), values(directory, wanted)
    assert held.keys() <= ordinary.keys() and all(ordinary[key] == one for key, one in held.items())
    assert {key.name for key in held if key.group == "model"} == {key.name for key in held if key.group == "master"}


def _no_parameter(tag: Path) -> None:
    shutil.rmtree(next(path for path in (tag / "zero").iterdir() if path.is_dir()))


def _no_master(tag: Path) -> None:
    next((tag / "zero").rglob("fp32.pt")).unlink()


def _no_states(tag: Path) -> None:
    (tag / "mp_rank_00_model_states.pt").unlink()


def _another_shape(tag: Path) -> None:
    torch.save({"param": torch.zeros(3)}, next((tag / "zero").rglob("exp_avg.pt")))


def _another_key(tag: Path) -> None:
    torch.save({"param": torch.zeros(3), "affine": 1}, next((tag / "zero").rglob("exp_avg.pt")))


def _no_tensor(tag: Path) -> None:
    torch.save({"param": 3}, next((tag / "zero").rglob("exp_avg.pt")))


def _odd_step(tag: Path) -> None:
    torch.save(torch.zeros(3), next((tag / "zero").rglob("step.pt")))


def _another_file(tag: Path) -> None:
    (tag / "notes.pt").write_bytes(b"")


def _file_of_a_parameter(tag: Path) -> None:
    (next(path for path in (tag / "zero").iterdir() if path.is_dir()) / "notes.txt").write_bytes(b"")


def _cut(tag: Path) -> None:
    path = next((tag / "zero").rglob("exp_avg.pt"))
    path.write_bytes(path.read_bytes()[:-100])


@BF16
@pytest.mark.parametrize(
    ("spoil", "says", "error"),
    [
        (_no_parameter, "is missing, although the model", StateMismatch),
        (_no_master, "fp32.pt is missing", StateMismatch),
        (_no_states, "no file of model states", StateMismatch),
        (_another_shape, r"shape \[3\]", StateMismatch),
        (_another_key, "'affine'", StateMismatch),
        (_no_tensor, "has no tensor", StateMismatch),
        (_odd_step, "no number of steps", StateMismatch),
        (_another_file, r"notes\.pt does not belong", StateMismatch),
        (_file_of_a_parameter, r"notes\.txt does not belong", StateMismatch),
        (_cut, "exp_avg.pt", CorruptManifest),
    ],
)
def test_refused(
    directory: Path, tmp_path: Path, spoil: Callable[[Path], None], says: str, error: type[CheckpointError]
) -> None:
    """By file and key."""
    top = converted(directory, tmp_path / "universal")
    spoil(top / UNIVERSAL)
    with pytest.raises(error, match=says) as refused:
        read(top)
    assert refused.value.hint

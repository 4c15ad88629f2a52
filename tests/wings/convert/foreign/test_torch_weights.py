"""Models in torch files: a Hugging Face directory with pytorch_model.bin, and a single file with a state dict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from holdfast_formats import dtypes
from holdfast_formats.errors import CheckpointError, CorruptManifest, StateMismatch
from holdfast_formats.mapping import reading
from holdfast_formats.mapping.listing import ForeignListing, TensorKey
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert.foreign.kinds import ForeignKind, choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.foreign.torch_weights import DIRECTORY_KIND, FILE_KIND


def _state() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    weight = torch.randn(6, 4, generator=chance)
    return {"embed.weight": weight.bfloat16(), "turned.weight": weight.t(), "tied.weight": weight, "n": torch.tensor(3)}


def check(directory: Path, kind: ForeignKind, wanted: dict[str, torch.Tensor]) -> ForeignListing:
    """The directory is of this kind, every file of it has a use, and the tensors are these, bit for bit."""
    files = hub_snapshot.opened(directory)
    assert choose(files, None, KINDS) is kind
    listing = kind.read(files, ReadOptions())
    assert sorted(use.file for use in listing.files) == files.list("")
    assert all(use.reason for use in listing.files if use.use == "unused")
    assert set(listing.tensors) == {TensorKey("model", name) for name in wanted}
    for key, tensor in listing.tensors.items():
        held = wanted[key.name].contiguous()
        assert tensor.spec.shape == tuple(held.shape)
        assert reading.fetched(files, tensor).tobytes() == held.reshape(-1).view(torch.uint8).numpy().tobytes()
    return listing


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_one_file(directory: Path) -> None:
    """pytorch_model.bin alone, in both forms of torch.save."""
    for zipped in (True, False):
        torch.save(_state(), directory / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        listing = check(directory, DIRECTORY_KIND, _state())
        assert listing.assets == ("config.json", "tokenizer.json")


def test_numbered_files(directory: Path) -> None:
    """With an index and without; what is missing, twice, or elsewhere than the index says is refused by name."""
    state = _state()
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    parts = [{name: state[name]} for name in list(state)[:1]] + [{name: state[name] for name in list(state)[1:]}]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, directory / name)
    check(directory, DIRECTORY_KIND, state)
    index = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    check(directory, DIRECTORY_KIND, state)
    read = lambda: DIRECTORY_KIND.read(hub_snapshot.opened(directory), ReadOptions())  # noqa: E731
    wrong = {**index, "n": names[0]}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(StateMismatch, match="disagree about tensor 'n'"):
        read()
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {**index, "m": "../x.bin"}}))
    with pytest.raises(StateMismatch, match=r"lists '../x.bin', which is missing"):
        read()
    (directory / "pytorch_model.bin.index.json").unlink()
    torch.save(state, directory / names[0])
    with pytest.raises(StateMismatch, match=r"has 'turned.weight', which pytorch_model-00001-of-00002.bin has too"):
        read()
    (directory / names[1]).unlink()
    with pytest.raises(StateMismatch, match="are an incomplete set"):
        read()


@pytest.mark.parametrize("ending", ["pt", "pth", "bin", "ckpt"])
def test_a_state_dict_alone(directory: Path, ending: str) -> None:
    """A file of any name; a state dict inside of another, with plain values beside it, which become documents."""
    file = directory / f"mine.{ending}"
    torch.save(_state(), file)
    assert not check(directory, FILE_KIND, _state()).documents
    torch.save({"epoch": 3, "args": {"lr": 0.1, "betas": (0.9, 0.95)}, "state_dict": _state()}, file)
    listing = check(directory, FILE_KIND, _state())
    assert listing.documents["extra"]["epoch"] == 3
    assert listing.notes == (f"args, epoch of mine.{ending} are stored as documents in group extra",)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"w": torch.ones(2), "step": 3}, "step"),
        ({"w": torch.ones(2), 5.5: torch.ones(2)}, "5.5"),
        ({"state_dict": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}, "optimizer"),
        ({"state_dict": {"w": torch.ones(2)}, "model": {"w": torch.ones(2)}}, "model"),
        ([torch.ones(2)], ""),
    ],
    ids=["number", "name", "optimizer", "two", "list"],
)
def test_what_is_no_weight(directory: Path, value: Any, key: str) -> None:
    """Anything but tensors is refused by file and key."""
    torch.save(value, directory / "a.pt")
    with pytest.raises(StateMismatch) as refused:
        FILE_KIND.read(hub_snapshot.opened(directory), ReadOptions())
    assert refused.value.members["file"] == "a.pt" and refused.value.members.get("tensor", "").startswith(key)


def test_training_state_beside_it(directory: Path) -> None:
    """Two torch files, or a trainer's files beside pytorch_model.bin, are not left out without a word."""
    torch.save(_state(), directory / "pytorch_model.bin")
    torch.save({}, directory / "optimizer.pt")
    with pytest.raises(StateMismatch, match=r"optimizer.pt is training state"):
        DIRECTORY_KIND.read(hub_snapshot.opened(directory), ReadOptions())
    (directory / "pytorch_model.bin").rename(directory / "a.pt")
    with pytest.raises(StateMismatch, match=r"several torch files: a.pt, optimizer.pt") as refused:
        FILE_KIND.read(hub_snapshot.opened(directory), ReadOptions())
    one = "`holdfast import SRC/a.pt RUN@STEP`"
    assert refused.value.hint == f"import one of them: {one}; or go on without: --leave-out optimizer.pt"
    with pytest.raises(StateMismatch, match=r"no file of torch\.save"):
        FILE_KIND.read(hub_snapshot.opened(directory), ReadOptions(leave_out=("*.pt",)))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_numpy_arrays(tmp_path: Path, protocol: int) -> None:
    """Arrays of any content are weights, and values beside them: protocol 2, torch's own, has their bytes as text."""
    chance = np.random.default_rng(1)
    bits = chance.integers(0, 256, (4, 48), np.uint8)
    model: dict[str, Any] = {
        f"{code}.w": bits.view(code) for code in ("u1", "i1", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "c8")
    }
    model |= {"turned.w": np.asfortranarray(bits.view("f8")), "bf16.w": bits.view(ml_dtypes.bfloat16)}
    model |= {"one.w": np.array(np.float32(-1e-3)), "empty.w": np.zeros((0, 3), np.float32)}
    beside = {"mean": bits[0].view("f4"), "list": [bits.view("i8").T, np.float32(-0.1)], "state": b"\xff\x00"}
    saved = {"model": {**model, "tensor.w": torch.ones(2)}, **beside}
    torch.save(saved, tmp_path / "m.pt", pickle_protocol=protocol)
    files = hub_snapshot.opened(tmp_path)
    listing = FILE_KIND.read(files, ReadOptions())
    wanted = {TensorKey("model", name): array for name, array in model.items()}
    wanted |= {TensorKey("extra", "mean"): beside["mean"], TensorKey("extra", "list/0"): beside["list"][0]}
    assert listing.tensors.keys() - wanted.keys() == {TensorKey("model", "tensor.w")}
    for key, array in wanted.items():
        assert dtypes.to_numpy(listing.tensors[key].spec.dtype) == array.dtype, key
        assert reading.fetched(files, listing.tensors[key]).tobytes() == array.tobytes(), key
    extra = listing.documents["extra"]
    assert extra["list"] == [{"$array": "list/0"}, float(np.float32(-0.1))] and extra["mean"] == {"$array": "mean"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.array([1j]), "a numpy array, of which the pickle has values of dtype 'c16'"),
        (np.arange(3, dtype=">f4"), "a numpy array, of which the pickle has values in the byte order '>'"),
        (np.longdouble(1), "a numpy scalar, of which the pickle has values of dtype"),
        (np.dtype("c16"), "a numpy dtype"),
        (bytes(2**20 + 1), "has 1048577 bytes, over the limit"),
    ],
    ids=lambda part: "",
)
def test_what_no_checkpoint_holds_is_named(tmp_path: Path, value: Any, said: str) -> None:
    """By its key, and by a name that its user knows; the import goes on without it."""
    for saved in ({"w.w": torch.ones(1), "bad": value}, {"model": {"w.w": torch.ones(1)}, "bad": value}):
        torch.save(saved, tmp_path / "m.pt")
        with pytest.raises(StateMismatch) as error:
            FILE_KIND.read(hub_snapshot.opened(tmp_path), ReadOptions())
        assert "'bad'" in error.value.detail and "--leave-out bad" in error.value.hint
        assert said in error.value.detail or ("model" not in saved and "a bytes object" in error.value.detail)
        assert FILE_KIND.read(hub_snapshot.opened(tmp_path), ReadOptions(leave_out=("bad",))).tensors


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("pattern", ["b.w", "b*", "*-00002-of-00002.*"])
def test_all_tensors_of_a_file_left_out(tmp_path: Path, pattern: str, ending: str, index: bool) -> None:
    """By their names or by the file's: the rest of the model is imported, and the file has its use."""
    stem = "model" if ending == "safetensors" else "pytorch_model"
    weight_map = {name: f"{stem}-{n:05}-of-00002.{ending}" for n, name in enumerate(("a.w", "b.w"), 1)}
    for name, file in weight_map.items():
        tensors = {name: torch.ones(2)}
        save_file(tensors, tmp_path / file) if ending == "safetensors" else torch.save(tensors, tmp_path / file)
    if index:
        (tmp_path / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    files, options = hub_snapshot.opened(tmp_path), ReadOptions(leave_out=(pattern,))
    listing = choose(files, None, KINDS, options.leave_out).read(files, options)
    assert set(listing.tensors) == {TensorKey("model", "a.w")} and len(listing.left_out) == 1
    assert {use.file: use.use for use in listing.files}[weight_map["b.w"]] == "unused"
    (tmp_path / weight_map["b.w"]).unlink()
    with pytest.raises(CheckpointError, match=r"missing|incomplete"):
        choose(files, None, KINDS).read(files, ReadOptions())


def test_a_file_that_is_cut_off(directory: Path) -> None:
    """A download that stopped is refused by name."""
    torch.save(_state(), directory / "pytorch_model.bin")
    data = (directory / "pytorch_model.bin").read_bytes()
    (directory / "pytorch_model.bin").write_bytes(data[:-100])
    with pytest.raises(CorruptManifest, match=r"pytorch_model.bin: the zip file is cut off"):
        DIRECTORY_KIND.read(hub_snapshot.opened(directory), ReadOptions())


def test_what_a_training_kept_beside_its_model(tmp_path: Path) -> None:
    """Lightning's file: its one optimizer, tensors and plain values beside it; objects of classes are refused by name."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 3}],
        "global_step": 5,
        "callbacks": {"best": {"score": torch.tensor(0.5)}},
        "rng_state": torch.get_rng_state(),
    }
    torch.save(saved, tmp_path / "last.ckpt")
    listing = FILE_KIND.read(hub_snapshot.opened(tmp_path), ReadOptions())
    assert listing.step == 5
    assert {key.name for key in listing.tensors if key.group == "optim"} == {
        f"{name}/{kind}" for name in ("weight", "bias") for kind in ("exp_avg", "exp_avg_sq", "step")
    }
    assert {key.name for key in listing.tensors if key.group == "extra"} == {"callbacks/best/score", "rng_state"}
    assert listing.documents["extra"]["lr_schedulers"] == [{"last_epoch": 3}]
    saved["optimizer_states"] = [optimizer.state_dict()] * 2
    torch.save(saved, tmp_path / "last.ckpt")
    with pytest.raises(
        StateMismatch, match=r"the optimizer 'optimizer_states\[1\]', which has state 'weight/\w+', as another"
    ):
        FILE_KIND.read(hub_snapshot.opened(tmp_path), ReadOptions())

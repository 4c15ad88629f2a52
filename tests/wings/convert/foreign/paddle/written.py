"""Writes directories as Paddle does, for a small model whose values follow from the tensors' names.

The values are those of the golden directories, which Paddle itself wrote: `tests/golden/foreign/paddle`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from holdfast_formats.mapping.listing import ForeignListing, ForeignTensor, TensorKey
from holdfast_formats.mapping.reading import fetched
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign import pickle_writer
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from tests.wings.convert.foreign.directories import OnDisk

GOLDEN = Path(__file__).parents[4] / "golden" / "foreign" / "paddle"
BETAS = {"beta1_pow_acc_0": 0.9, "beta2_pow_acc_0": 0.999}
STEP = 2
HIDDEN, INNER, WORDS = 6, 10, 8
# In Paddle's layout.
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (WORDS, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": (HIDDEN, 4),
    "model.layers.0.self_attn.o_proj.weight": (4, HIDDEN),
    "model.layers.0.mlp.gate_proj.weight": (HIDDEN, INNER),
    "model.layers.0.mlp.down_proj.weight": (INNER, HIDDEN),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "lm_head.weight": (WORDS, HIDDEN),
}


def made(name: str, shape: tuple[int, ...], scale: float) -> NDArray[np.float32]:
    """Values that follow from a name, as Paddle's golden directories have them."""
    seed = int.from_bytes(sha256(name.encode()).digest()[:4], "little")
    return np.random.RandomState(seed).standard_normal(shape).astype("f4") * np.float32(scale)


def master(name: str, shape: tuple[int, ...] | None = None) -> NDArray[np.float32]:
    return made(name, shape or SHAPES[name], 0.05)


def moment(name: str, kind: int, shape: tuple[int, ...] | None = None) -> NDArray[np.float32]:
    found = made(f"{name}/moment{kind}_0", shape or SHAPES[name], (1e-3, 1e-6)[kind - 1])
    return np.abs(found) if kind == 2 else found


def weight(name: str, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
    """In bfloat16."""
    return master(name, shape).astype(ml_dtypes.bfloat16)


def is_linear(name: str) -> bool:
    return "_proj.weight" in name


def turned(name: str, values: NDArray[Any]) -> NDArray[Any]:
    """In Hugging Face's layout."""
    return np.ascontiguousarray(values.T) if is_linear(name) and values.ndim == 2 else values


def power(kind: str, step: int = STEP) -> NDArray[np.float32]:
    """As Paddle multiplies it up."""
    beta = np.float32(BETAS[kind])
    return np.multiply.accumulate(np.full(step + 1, beta))[-1:]


def optimizer(names: Mapping[str, Any] | None = None, separator: str = "/") -> dict[str, NDArray[Any]]:
    """All of an optimizer's arrays by key."""
    held: dict[str, NDArray[Any]] = {}
    for name in names or SHAPES:
        held |= {f"{name}{separator}moment{kind}_0": moment(name, kind) for kind in (1, 2)}
        held |= {f"{name}{separator}{kind}": power(kind) for kind in BETAS}
    return held


def trainer_state(folder: Path, step: int = STEP) -> None:
    """The trainer's and the scheduler's state."""
    kind = pickle_writer.NamedGlobal("paddleformers.trainer.trainer_callback.TrainerState")
    state = pickle_writer.MadeObject(kind, {"global_step": step, "log_history": [{"loss": float("nan")}]})
    (folder / "trainer_state.bin").write_bytes(pickle_writer.dumps(state))
    (folder / "scheduler.pdparams").write_bytes(pickle_writer.dumps({"last_epoch": step, "last_lr": 0.25}))


def config(folder: Path, **members: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16", **members}))


def file_of_set(folder: Path, name: str, held: Mapping[str, NDArray[Any]], form: str | None = "np") -> None:
    """A safetensors file as Paddle writes it."""
    arrays = {key: np.array(value, order="C") for key, value in held.items()}
    save_file(arrays, str(folder / name), metadata=None if form is None else {"format": form})


def write_set(folder: Path, stem: str, parts: list[dict[str, NDArray[Any]]], form: str = "np", **stated: Any) -> None:
    """A set with its index; a part that is empty has no file."""
    placed: dict[str, str] = {}
    for number, held in enumerate(parts):
        file = f"{stem}-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        if held:
            file_of_set(folder, file, held, form)
        placed |= {key: file for key in held if "@" not in key}
    index = {"metadata": {"total_size": 1}, "weight_map": placed, **stated}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def halves(held: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
    """The arrays of a set in two files."""
    keys = list(held)
    return [{key: held[key] for key in keys[: len(keys) // 2]}, {key: held[key] for key in keys[len(keys) // 2 :]}]


def unified(folder: Path) -> Path:
    """A unified checkpoint, merged: weights in Hugging Face's layout, masters, an optimizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config(folder)
    trainer_state(folder)
    write_set(folder, "model", halves({name: turned(name, weight(name)) for name in SHAPES}), "pt")
    write_set(folder, "master_weights", halves({name: master(name) for name in SHAPES}))
    write_set(folder, "optimizer", halves(optimizer()), master_weights=True)
    return folder


def read(kind: ForeignKind, folder: Path, *, as_is: bool = False, assemble_flat: bool = False) -> ForeignListing:
    """The listing of a directory, which must be of this kind."""
    files = OnDisk(folder)
    assert kind.recognises(files)
    listing = kind.read(files, ReadOptions(as_is=as_is, assemble_flat=assemble_flat))
    assert listing.kind == kind.name
    mentioned = {use.file for use in listing.files}
    assert len(mentioned) == len(listing.files)
    assert {name for name in files.list("") if files.size(name) is not None} <= mentioned
    return listing


def values(folder: Path, listing: ForeignListing, group: str, name: str) -> NDArray[Any]:
    """A tensor's values. Its copies must have the same ones."""
    tensor, files = listing.tensors[TensorKey(group, name)], OnDisk(folder)
    found = fetched(files, tensor)
    for copy in tensor.copies:
        again = fetched(files, ForeignTensor(tensor.spec, (copy,)), copy.box)
        assert again.tobytes() == np.ascontiguousarray(found[copy.box.slices]).tobytes()
    return found


def check_state(folder: Path, listing: ForeignListing, groups: tuple[str, ...] = ("model", "master", "optim")) -> None:
    """Everything of the small model is there, bit for bit, and nothing else."""
    wanted: dict[TensorKey, NDArray[Any]] = {}
    for name in SHAPES:
        wanted[TensorKey("model", name)] = turned(name, weight(name))
        wanted[TensorKey("master", name)] = turned(name, master(name))
        wanted[TensorKey("optim", f"{name}/exp_avg")] = turned(name, moment(name, 1))
        wanted[TensorKey("optim", f"{name}/exp_avg_sq")] = turned(name, moment(name, 2))
        wanted[TensorKey("optim", f"{name}/step")] = np.array(STEP, "f4")
    wanted = {key: value for key, value in wanted.items() if key.group in groups}
    assert set(listing.tensors) == set(wanted)
    for key, value in wanted.items():
        found = values(folder, listing, *key)
        assert (found.dtype, found.shape) == (value.dtype, value.shape), key
        assert np.ascontiguousarray(found).tobytes() == value.tobytes(), key


def check_golden(name: str, kind: ForeignKind, groups: tuple[str, ...]) -> ForeignListing:
    """A directory that Paddle wrote has the values that Paddle held."""
    folder = GOLDEN / name / "checkpoint-2"
    listing = read(kind, folder)
    assert listing.step == STEP
    assert {key.group for key in listing.tensors} == set(groups)
    for key in listing.tensors:
        owner, _, state = key.name.partition("/")
        name = owner.removeprefix("base_model.").removesuffix(".weight" if "lora" in owner else "")
        found = values(folder, listing, *key)
        stored = found.T if is_linear(name) or "lora" in name else found
        if state == "step":
            assert found == STEP
            continue
        if state:
            wanted: NDArray[Any] = moment(name, {"exp_avg": 1, "exp_avg_sq": 2}[state], stored.shape)
        else:
            wanted = (master if key.group == "master" else weight)(name, stored.shape)
        assert stored.dtype == wanted.dtype
        assert np.ascontiguousarray(stored).tobytes() == wanted.tobytes(), key
    return listing

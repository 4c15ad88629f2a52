"""A FlexCheckpoint of Paddle: pickles of arrays, their metadata, everything in Paddle's layout."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.box_moves import same
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import PosixTier
from holdfast_service.wings.convert.exports.paddle import flex as paddle_flex
from holdfast_service.wings.convert.exports.plan import ExportOptions, ExportPlan
from holdfast_service.wings.convert.foreign.paddle import flex
from tests.wings.convert.exports.paddle.test_unified import check_equal
from tests.wings.convert.exports.sources import LLAMA, llama, made, trained, values_of, write

ASSETS = {"config.json": json.dumps(LLAMA).encode()}
WEIGHTS = llama()
GROUPS = trained(WEIGHTS, step=2)
Q = "model.layers.0.self_attn.q_proj.weight"


class Record:
    """Stands for a class of Paddle's: it has what its pickle sets."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}{vars(self)}"


class Unpickler(pickle.Unpickler):
    """Reads pickles that the tests made themselves."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("paddle"):
            return Record
        return super().find_class(module, name)


def load_pickle(path: Path) -> Any:
    """The value of a pickle that the tests made themselves."""
    with path.open("rb") as file:
        return Unpickler(file).load()


def _exported(tmp_path: Path) -> Path:
    source = made(tmp_path / "step", GROUPS, assets=ASSETS, ranks=values_of(list(WEIGHTS)), step=2).source
    return write(source, paddle_flex.plan(source, ExportOptions()), tmp_path / "out")


def test_imported_again_it_is_the_checkpoint(tmp_path: Path) -> None:
    """Model, masters, moments and steps, bit for bit; every file of it has a use."""
    out = _exported(tmp_path)
    tier = PosixTier(out)
    assert flex.KIND.recognises(tier)
    listing = flex.KIND.read(tier, ReadOptions())
    check_equal(out, listing, {group: GROUPS[group] for group in ("model", "master", "optim")})
    assert listing.step == 2


def test_numpy_reads_the_arrays_and_the_metadata_says_where_they_are(tmp_path: Path) -> None:
    """By Python's own unpickler: names, shapes, dtypes, files."""
    out = _exported(tmp_path)
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"model_state", "optimizer_state", "master_weight"}
    for directory in ("model_state", "optimizer_state", "master_weight"):
        arrays = load_pickle(out / directory / "0_0.distcp")
        metadata = load_pickle(out / directory / "0.metadata")
        assert arrays.keys() == metadata.state_dict_metadata.keys() == metadata.flat_mapping.keys()
        for index, file in metadata.storage_metadata.items():
            (local,) = metadata.state_dict_metadata[index.tensor_key]
            array = arrays[index.tensor_key]
            assert file == "0_0.distcp" and array.shape == index.local_shape == local.local_shape == local.global_shape
            assert index.global_offset == local.global_offset == (0,) * array.ndim and not local.is_flattened
            assert {"bfloat16": "uint16"}.get(local.dtype, local.dtype) == array.dtype.name
    model = load_pickle(out / "model_state" / "0_0.distcp")
    assert model[Q].view(ml_dtypes.bfloat16).tobytes() == np.ascontiguousarray(WEIGHTS[Q].T).tobytes()
    moments = load_pickle(out / "optimizer_state" / "0_0.distcp")
    assert np.array_equal(moments[f"{Q}.moment2_0"], GROUPS["optim"][f"{Q}/exp_avg_sq"].T)
    assert moments[f"{Q}.beta2_pow_acc_0"].shape == (1,)
    assert np.array_equal(load_pickle(out / "master_weight" / "0_0.distcp")[f"{Q}.w_0"], GROUPS["master"][Q].T)
    state = load_pickle(out / "trainer_state.bin")
    assert vars(state)["global_step"] == 2 and load_pickle(out / "scheduler.pdparams") == {"last_epoch": 2, "last_lr": 1e-3}
    assert (out / "saved_signal_0").read_bytes() == b"1"


def test_arrays_in_several_files(tmp_path: Path) -> None:
    """Each file is a dict of its own, and the metadata names it; one that is longer than the limit has a file alone."""
    arrays = {
        f"w{n}": np.arange(n * n).astype(dtype).reshape(n, n)
        for n, dtype in enumerate((np.int64, np.float16, np.int8, bool, np.float64, np.int32, np.uint8, np.int16), 1)
    }
    source = made(tmp_path / "step", {"model": arrays}).source
    files = paddle_flex.array_files("a", [same(tensor) for tensor in source.group("model").values()], 700)
    out = write(source, ExportPlan(tuple(files)), tmp_path / "out")
    found = {path.name: load_pickle(path) for path in sorted((out / "a").glob("*.distcp"))}
    assert len(found) > 1 and all(found.values())
    joined = {name: array for held in found.values() for name, array in held.items()}
    assert joined.keys() == arrays.keys()
    for name, array in arrays.items():
        assert joined[name].dtype == array.dtype and np.array_equal(joined[name], array)
    stored = load_pickle(out / "a" / "0.metadata").storage_metadata
    assert all(index.tensor_key in found[file] for index, file in stored.items()) and len(stored) == len(arrays)


def test_a_set_without_arrays(tmp_path: Path) -> None:
    """Paddle asks for the metadata of all three sets, masters of an FP32 run included."""
    source = made(tmp_path / "step", {"model": {}}).source
    out = write(source, ExportPlan(tuple(paddle_flex.array_files("a", []))), tmp_path / "out")
    assert load_pickle(out / "a" / "0_0.distcp") == {} and load_pickle(out / "a" / "0.metadata").storage_metadata == {}


def test_a_dtype_that_paddle_lacks(tmp_path: Path) -> None:
    """It is refused by name."""
    arrays = {"codes": np.arange(4).astype(ml_dtypes.float8_e4m3fn)}
    source = made(tmp_path / "step", {"model": arrays}, assets=ASSETS).source
    with pytest.raises(StateMismatch, match="'codes' is F8_E4M3"):
        paddle_flex.plan(source, ExportOptions())

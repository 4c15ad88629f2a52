"""FlexCheckpoints come out bit for bit; metadata that do not fit the files are refused by name."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.mapping.listing import TensorKey
from holdfast_service.wings.convert.foreign import pickle_writer
from holdfast_service.wings.convert.foreign.paddle import flex
from tests.wings.convert.foreign.paddle import written
from tests.wings.convert.foreign.paddle.written import SHAPES, check_golden, check_state, read

KIND = flex.KIND
HOME = "paddle.distributed.flex_checkpoint.dcp.metadata"
DOWN, EMBED = "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"
_DTYPES = {"u2": "bfloat16", "f4": "float32"}


def test_what_paddle_wrote_is_exact() -> None:
    """Two ranks of sharding stage 1 v2: flattened ranges, without a config.json."""
    listing = check_golden("flex_sd2v2", KIND, ("model", "master", "optim"))
    assert len(listing.tensors) == 21 * 5
    assert {use.file: use.use for use in listing.files}["model_state/0.metadata"] == "tensors"


def _object(kind: str, **state: Any) -> pickle_writer.MadeObject:
    return pickle_writer.MadeObject(pickle_writer.NamedGlobal(f"{HOME}.{kind}"), state)


def _parts(
    values: NDArray[Any], name: str
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, int] | None]]:
    """Rank, offset, local shape and flat range of each part: columns and rows of two ranks, one of them cut flat again."""
    n = values.shape
    if name == DOWN:
        yield 0, (0, 0), (n[0] // 2, n[1]), (0, 13)
        yield 1, (0, 0), (n[0] // 2, n[1]), (13, n[0] // 2 * n[1])
        yield 2, (n[0] // 2, 0), (n[0] // 2, n[1]), None
    elif name == EMBED:
        yield 0, (0, 0), (n[0], 3), None
        yield 1, (0, 3), (n[0], n[1] - 3), (0, n[0] * (n[1] - 3))
    else:
        yield 1, (0,) * values.ndim, n, None


def _write(folder: Path, state: str, held: dict[str, NDArray[Any]], *, old: bool = False) -> None:
    """A directory of three ranks. `old` metadata lack the last fields, so that nothing in them is flat."""
    (folder / state).mkdir(parents=True, exist_ok=True)
    files: list[dict[str, Any]] = [{"StructuredToParameterName@@": {}} for _ in range(3)]
    described: dict[str, list[Any]] = {}
    placed: list[tuple[Any, str]] = []
    for key, values in held.items():
        name = key if key in SHAPES else key.rpartition(".")[0]
        parts = list(_parts(values, name)) if values.size > 1 and not old else [(1, (0,) * values.ndim, values.shape, None)]
        for rank, offset, local, flat in parts:
            box = values[tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))]
            files[rank][key] = box if flat is None else np.ascontiguousarray(box).reshape(-1)[flat[0] : flat[1]]
            dtype = _DTYPES[values.dtype.str[1:]]
            where = {"global_offset": offset, "local_shape": local}
            more = {} if old else {"is_flattened": flat is not None, "flattened_range": flat}
            whole = {} if old else {"global_shape": values.shape}
            described.setdefault(key, []).append(_object("LocalTensorMetadata", **where, dtype=dtype, **whole, **more))
            index = {"tensor_key": key, **where, **more} if not old else {"tensor_key": key, "global_offset": offset}
            placed.append((_object("LocalTensorIndex", **index), f"{rank}_0.distcp"))
    for rank, arrays in enumerate(files):
        owned = {
            key: np.array(value, order="C") if isinstance(value, np.ndarray) else value for key, value in arrays.items()
        }
        (folder / state / f"{rank}_0.distcp").write_bytes(pickle.dumps(owned, 4))
    metadata = {"state_dict_metadata": described, "storage_metadata": pickle_writer.ObjectKeys(placed)}
    (folder / state / "0.metadata").write_bytes(pickle_writer.dumps(_object("Metadata", **metadata)))


def _checkpoint(folder: Path, *, old: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    written.trainer_state(folder)
    _write(folder, "model_state", {name: written.weight(name).view("u2") for name in SHAPES}, old=old)
    _write(folder, "master_weight", {f"{name}.w_0": written.master(name) for name in SHAPES}, old=old)
    _write(folder, "optimizer_state", written.optimizer(separator="."), old=old)
    return folder


@pytest.mark.parametrize("old", [False, True])
def test_parts_of_ranks(tmp_path: Path, old: bool) -> None:
    """Boxes of tensor parallelism, flat ranges of these, and metadata of older versions."""
    folder = _checkpoint(tmp_path, old=old)
    check_state(folder, read(KIND, folder))
    as_is = read(KIND, folder, as_is=True)
    np.testing.assert_array_equal(written.values(folder, as_is, "master", f"{DOWN}.w_0"), written.master(DOWN))
    assert TensorKey("optim", f"{DOWN}.beta1_pow_acc_0") in as_is.tensors


def test_averages(tmp_path: Path) -> None:
    """Group `ema`: averaged masters, and parameters that are F32 anyway, with a word about how it began."""
    folder = _checkpoint(tmp_path)
    norm = "model.layers.0.input_layernorm.weight"
    held = {f"{name}.w_0" if name != norm else name: written.made(f"ema {name}", SHAPES[name], 1.0) for name in SHAPES}
    _write(folder, "ema_state", held)
    listing = read(KIND, folder)
    for name in SHAPES:
        wanted = written.turned(name, written.made(f"ema {name}", SHAPES[name], 1.0))
        np.testing.assert_array_equal(written.values(folder, listing, "ema", name), wanted)
    assert any("starts at zero" in note for note in listing.notes)


def test_tied_embeddings_without_config(tmp_path: Path) -> None:
    """One name has no state of its own, and the weights are the same: what there is stands under both names."""
    folder = _checkpoint(tmp_path)
    head = "lm_head.weight"
    held = {name: written.weight(EMBED if name == head else name).view("u2") for name in SHAPES}
    for tied in (True, False):
        held[head] = written.weight(EMBED if tied else head).view("u2")
        _write(folder, "model_state", held)
        _write(folder, "master_weight", {f"{name}.w_0": written.master(name) for name in SHAPES if name != head})
        _write(folder, "optimizer_state", written.optimizer({n: 0 for n in SHAPES if n != head}, separator="."))
        listing = read(KIND, folder)
        for key in (TensorKey("master", head), TensorKey("optim", f"{head}/exp_avg"), TensorKey("optim", f"{head}/step")):
            assert (key in listing.tensors) == tied
    assert not any("tied" in note for note in listing.notes)


def _changed(state: str, values: dict[str, NDArray[Any]]) -> Callable[[Path], None]:
    """Save again, and keep the metadata of before, as Paddle does."""

    def change(folder: Path) -> None:
        old = (folder / state / "0.metadata").read_bytes()
        _write(folder, state, values)
        (folder / state / "0.metadata").write_bytes(old)

    return change


def _removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


_OTHER = {f"{name}.w_0": written.master(name) for name in SHAPES if name != DOWN}
_LARGER = {f"{name}.w_0": written.made(name, (12, 6) if name == DOWN else SHAPES[name], 1.0) for name in SHAPES}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_changed("master_weight", _OTHER), StateMismatch, r"down_proj\.weight\.w_0' has nothing in 0_0\.distcp"),
        (_changed("master_weight", _LARGER), StateMismatch, r"down_proj\.weight\.w_0' has F32 of shape \[23\] in 1_0"),
        (_changed("master_weight", {**_LARGER, **_OTHER, "new.w_0": written.made("n", (3,), 1.0)}), StateMismatch, "w_0'"),
        (_removed("optimizer_state/2_0.distcp"), CorruptManifest, r"optimizer_state/2_0\.distcp is missing"),
        (_removed("model_state/0.metadata"), CorruptManifest, r"model_state/0\.metadata is missing"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    """Stale metadata, and files that are missing, by name."""
    folder = _checkpoint(tmp_path)
    change(folder)
    with pytest.raises(error, match=message):
        read(KIND, folder)


def test_arrays_that_nothing_places(tmp_path: Path) -> None:
    """An array beside those that the metadata know is refused, not left out."""
    folder = _checkpoint(tmp_path)
    known = {f"{name}.w_0": written.master(name) for name in SHAPES}
    _changed("master_weight", {**known, "new.w_0": written.made("n", (3,), 1.0)})(folder)
    with pytest.raises(StateMismatch, match=r"master_weight/1_0\.distcp has 'new\.w_0', which master_weight/0\.metadata"):
        read(KIND, folder)


def test_signals_of_some_ranks(tmp_path: Path) -> None:
    """Three ranks wrote, and two said that they are complete."""
    folder = _checkpoint(tmp_path)
    for rank in range(2):
        (folder / f"saved_signal_{rank}").write_text("1")
    with pytest.raises(StateMismatch, match="saved_signal_2 is missing"):
        read(KIND, folder)
    (folder / "saved_signal_2").write_text("1")
    check_state(folder, read(KIND, folder))


def test_a_router_without_config_is_refused(tmp_path: Path) -> None:
    """It is transposed in some models and not in others; the model's config.json decides."""
    folder = _checkpoint(tmp_path)
    router = "model.layers.0.mlp.gate.weight"
    shutil.rmtree(folder / "model_state")
    held = {name: written.weight(name) for name in SHAPES} | {router: written.weight(router, (6, 4))}
    _write(folder, "model_state", {name: values.view("u2") for name, values in held.items()})
    with pytest.raises(StateMismatch, match=r"a model without config\.json"):
        read(KIND, folder)
    written.config(folder, model_type="qwen3_moe")
    found = written.values(folder, read(KIND, folder), "model", router)
    np.testing.assert_array_equal(found, written.weight(router, (6, 4)).T)

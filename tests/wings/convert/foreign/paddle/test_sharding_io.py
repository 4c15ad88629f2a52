"""Checkpoints of `sharding_io`, zero-cost ones and older ones come out bit for bit, whatever the parallelism."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.mapping.listing import TensorKey
from holdfast_service.wings.convert.foreign.paddle import sharding_io
from tests.wings.convert.foreign.paddle import written
from tests.wings.convert.foreign.paddle.written import SHAPES, check_golden, check_state, read

KIND = sharding_io.KIND
STATIC = {name: f"{'linear' if '_proj' in name else 'other_w_0'}_{number}.w_0" for number, name in enumerate(SHAPES)}
DOWN, NORM = "model.layers.0.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"
SLOT = 32  # elements


def test_what_paddle_wrote_is_exact() -> None:
    """Two ranks of sharding stage 1 v2: flat and padded slices, and no weights but their masters."""
    listing = check_golden("sharding_io_sd2v2", KIND, ("model", "master", "optim"))
    assert len(listing.tensors) == 21 * 5
    assert any("from their master copies to BF16" in note for note in listing.notes)


def _meta(folder: Path, shapes: Mapping[str, tuple[int, ...]], places: list[str], **stated: Any) -> None:
    described = {name: [list(shape), 10 if name == NORM else 16, len(shape) == 2, False] for name, shape in shapes.items()}
    one = {"structure_name_mapping": STATIC, "param_meta": described, **stated}
    (folder / "model_meta.json").write_text(json.dumps({"sharding_metas": dict.fromkeys(places, one)}))


def _optimizer(
    folder: Path, suffix: str, arrays: Mapping[str, Mapping[str, NDArray[Any]]], *, file: str = "optimizer"
) -> None:
    """A rank's pickle: arrays by parameter and type, of which '' is the master."""
    made: dict[str, Any] = {"master_weights": {}, "LR_Scheduler": {"last_epoch": 2, "last_lr": 0.25}}
    for name, states in arrays.items():
        for kind, values in states.items():
            key = f"{STATIC[name]}_fp32_master_0" + (f"_{kind}" if kind else "")
            (made if kind else made["master_weights"])[key if kind else STATIC[name]] = (key, np.array(values, order="C"))
    (folder / f"{file}{suffix}.pdopt").write_bytes(pickle.dumps(made, 4))


def _states(name: str) -> dict[str, NDArray[Any]]:
    held = {"": written.master(name), "moment1_0": written.moment(name, 1), "moment2_0": written.moment(name, 2)}
    return {**held, **{kind: written.power(kind) for kind in written.BETAS}}


def _weights(folder: Path, suffix: str, held: Mapping[str, NDArray[Any]]) -> None:
    arrays: dict[str, Any] = {name: np.array(values, order="C") for name, values in held.items()}
    names = {name: STATIC[name] for name in held if name in STATIC}
    (folder / f"model_state{suffix}.pdparams").write_bytes(pickle.dumps({**arrays, "StructuredToParameterName@@": names}, 4))


def _begin(folder: Path) -> Path:
    written.trainer_state(folder)
    written.config(folder)
    return folder


def _check_zero_cost(folder: Path) -> None:
    """Everything is there, and the norm's weight stays F32, since its master is its weight."""
    listing = read(KIND, folder)
    norm = written.values(folder, listing, "model", NORM)
    np.testing.assert_array_equal(norm, written.master(NORM))
    del listing.tensors[TensorKey("model", NORM)]  # type: ignore[attr-defined]
    rest = {key for key in listing.tensors if key.group == "model"}
    assert rest == {TensorKey("model", name) for name in SHAPES if name != NORM}
    for _, name in rest:
        np.testing.assert_array_equal(
            written.values(folder, listing, "model", name), written.turned(name, written.weight(name))
        )
    check_state(
        folder, listing._replace(tensors={k: v for k, v in listing.tensors.items() if k not in rest}), ("master", "optim")
    )


def test_first_version(tmp_path: Path) -> None:
    """Stage 1 v1: each parameter whole, with one rank."""
    folder = _begin(tmp_path)
    _meta(folder, SHAPES, ["tp00_pp00"], param2rank={}, sharding_strategy="ShardingV1")
    for rank in range(2):
        _weights(folder, f".shard{rank:02d}", {})
        _optimizer(folder, f".shard{rank:02d}", {name: _states(name) for n, name in enumerate(SHAPES) if n % 2 == rank})
    _check_zero_cost(folder)
    # Weights of both ranks, and the optimizer of one: the other's parameters would seem never to have been trained.
    for rank in range(2):
        _weights(folder, f".shard{rank:02d}", {name: written.weight(name) for name in SHAPES})
    read(KIND, folder)
    (folder / "optimizer.shard01.pdopt").unlink()
    with pytest.raises(CorruptManifest, match=r"no file of rank shard 1 beside optimizer\.shard00"):
        read(KIND, folder)


def _slices(values: NDArray[Any], ranks: int, cut: bool) -> list[NDArray[Any]]:
    flat = values.reshape(-1)
    flat = np.concatenate([flat, np.zeros(-flat.size % SLOT, "f4")])
    return np.split(flat, ranks) if cut else [flat]


def _tp(values: NDArray[Any], name: str, rank: int) -> NDArray[Any]:
    if values.ndim == 1:
        return values
    columns = name.endswith(("q_proj.weight", "gate_proj.weight"))
    return np.split(values, 2, 1 if columns else 0)[rank]


def test_second_version_with_tensor_and_pipeline_parallelism(tmp_path: Path) -> None:
    """Padded slices of every rank; parts of tensor-parallel ranks; a stage has some parameters, and one that both have."""
    folder = _begin(tmp_path)
    local = {name: _tp(written.master(name), name, 0).shape for name in SHAPES}
    places = [f"tp{tp:02d}_pp{pp:02d}" for tp in range(2) for pp in range(2)]
    names = list(SHAPES)
    stages = [names[:4], [names[0], *names[4:]]]
    for place in places:
        (tp, pp) = (int(place[2:4]), int(place[7:9]))
        held: list[dict[str, dict[str, NDArray[Any]]]] = [{}, {}]
        for number, name in enumerate(stages[pp]):
            for kind, values in _states(name).items():
                power = kind in written.BETAS
                cut = number == 2 and not power
                found = [values] if power else _slices(_tp(values, name, tp), 2, cut)
                for at, part in enumerate(found):
                    held[at if cut else number % 2].setdefault(name, {})[kind] = part
        for shard in range(2):
            _optimizer(folder, f".{place}_shard{shard:02d}", held[shard])
            _weights(folder, f".{place}_shard{shard:02d}", {})
    _meta(folder, local, places, sharding_strategy="ShardingV2")
    document = json.loads((folder / "model_meta.json").read_text())
    for place in places:
        kept = {name: STATIC[name] for name in stages[int(place[7:9])]}
        document["sharding_metas"][place] = {**document["sharding_metas"][place], "structure_name_mapping": kept}
    (folder / "model_meta.json").write_text(json.dumps(document))
    _check_zero_cost(folder)
    (folder / "optimizer.tp01_pp00_shard01.pdopt").unlink()
    with pytest.raises(CorruptManifest, match=r"no file of rank tp 1, pp 0, shard 1 beside optimizer\.tp01"):
        read(KIND, folder)


def test_averages(tmp_path: Path) -> None:
    """Group `ema`: averaged masters in flat slices, and whole parameters that are F32 anyway."""
    folder = _begin(tmp_path)
    _meta(folder, SHAPES, ["tp00_pp00"], sharding_strategy="ShardingV2")
    ema = {name: written.made(f"ema {name}", shape, 1.0) for name, shape in SHAPES.items()}
    for rank in range(2):
        _optimizer(
            folder,
            f".shard{rank:02d}",
            {n: {k: _slices(v, 2, True)[rank] if v.size > 1 else v for k, v in _states(n).items()} for n in SHAPES},
        )
        _weights(folder, f".shard{rank:02d}", {})
        masters = {STATIC[n]: _slices(ema[n], 2, True)[rank] for n in SHAPES if n != NORM}
        held = {"master_weights": masters, **({NORM: ema[NORM]} if rank else {})}
        (folder / f"ema.shard{rank:02d}.pdopt").write_bytes(pickle.dumps(held, 4))
    listing = read(KIND, folder)
    for name in SHAPES:
        np.testing.assert_array_equal(written.values(folder, listing, "ema", name), written.turned(name, ema[name]))


@pytest.mark.parametrize("protocol", [2, 4])
def test_older_ones(tmp_path: Path, protocol: int) -> None:
    """Without `model_meta.json`: names come with the weights. Protocol 2 has the arrays' bytes as text."""
    folder = _begin(tmp_path)
    held: dict[str, Any] = {name: written.weight(name).view("u2") for name in SHAPES}
    weights = {**held, "StructuredToParameterName@@": STATIC}
    (folder / "model_state.pdparams").write_bytes(pickle.dumps(weights, protocol))
    made: dict[str, Any] = {"master_weights": {STATIC[name]: written.master(name) for name in SHAPES}}
    for name in SHAPES:
        made |= {f"{STATIC[name]}_fp32_master_0_{kind}": value for kind, value in _states(name).items() if kind}
    large = f"{STATIC[DOWN]}_fp32_master_0_moment1_0"
    flat = made.pop(large).reshape(-1)
    made |= {f"{large}@@.0": flat[:37], f"{large}@@.1": flat[37:]}
    made["UnpackBigParamInfor@@"] = {large: {"OriginShape": SHAPES[DOWN], "slices": [f"{large}@@.0", f"{large}@@.1"]}}
    (folder / "optimizer.pdopt").write_bytes(pickle.dumps(made, protocol))
    check_state(folder, read(KIND, folder))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Unknown parameters and values, a rank without a file, a parameter without weight and master, cuts of unknown kind."""
    folder = _begin(tmp_path)
    _meta(folder, {**SHAPES, "more.weight": (2,)}, ["tp00_pp00"])
    _optimizer(folder, "", {name: _states(name) for name in SHAPES})
    _weights(folder, "", {})
    document = json.loads((folder / "model_meta.json").read_text())
    document["sharding_metas"]["tp00_pp00"]["structure_name_mapping"]["more.weight"] = "more_0.w_0"
    (folder / "model_meta.json").write_text(json.dumps(document))
    with pytest.raises(StateMismatch, match=r"'more\.weight' of tensor-parallel rank 0, stage 0 is in no file"):
        read(KIND, folder)
    del document["sharding_metas"]["tp00_pp00"]["structure_name_mapping"][DOWN]
    (folder / "model_meta.json").write_text(json.dumps(document))
    with pytest.raises(StateMismatch, match=r"optimizer\.pdopt: 'linear_\d\.w_0_fp32_master_0_.*' belongs to no parameter"):
        read(KIND, folder)
    _meta(folder, SHAPES, ["tp00_pp00"])
    _weights(folder, "", {"odd": np.zeros(2, "f4")})
    state = pickle.loads((folder / "model_state.pdparams").read_bytes()) | {"note": "text"}
    (folder / "model_state.pdparams").write_bytes(pickle.dumps(state, 4))
    with pytest.raises(StateMismatch, match=r"model_state\.pdparams: 'note' is neither a tensor"):
        read(KIND, folder)
    (folder / "model_meta.json").write_text('{"sharding_metas": {"tp00_pp00": {}}}')
    with pytest.raises(CorruptManifest, match="tp00_pp00 has no structure_name_mapping"):
        read(KIND, folder)


def test_tied_embeddings(tmp_path: Path) -> None:
    """Two names of one static one: the weight, the master and the optimizer state stand under both."""
    folder = _begin(tmp_path)
    written.config(folder, tie_word_embeddings=True)
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    _meta(folder, SHAPES, ["tp00_pp00"])
    text = (folder / "model_meta.json").read_text()
    (folder / "model_meta.json").write_text(text.replace(f'"{STATIC[head]}"', f'"{STATIC[embed]}"'))
    _weights(folder, "", {})
    _optimizer(folder, "", {name: _states(name) for name in SHAPES if name != head})
    listing = read(KIND, folder)
    for name in (embed, head):
        np.testing.assert_array_equal(written.values(folder, listing, "model", name), written.weight(embed))
        np.testing.assert_array_equal(written.values(folder, listing, "master", name), written.master(embed))
        np.testing.assert_array_equal(written.values(folder, listing, "optim", f"{name}/exp_avg"), written.moment(embed, 1))


def test_whole_weights_beside_masters(tmp_path: Path) -> None:
    """Weights that were saved are taken as they are; every sharding rank has a copy of them."""
    folder = _begin(tmp_path)
    _meta(folder, SHAPES, ["tp00_pp00"], sharding_strategy="ShardingV1")
    held = {name: written.weight(name).view("u2") for name in SHAPES}
    for rank in range(2):
        _weights(folder, f".shard{rank:02d}", held)
        _optimizer(folder, f".shard{rank:02d}", {n: _states(n) for i, n in enumerate(SHAPES) if i % 2 == rank})
    listing = read(KIND, folder)
    check_state(folder, listing)
    tensor = listing.tensors[TensorKey("model", DOWN)]
    assert [piece.file for piece in tensor.copies] == ["model_state.shard01.pdparams"]
    assert written.values(folder, listing, "model", DOWN).dtype == ml_dtypes.bfloat16

"""A unified checkpoint for PaddleFormers: read back it is the checkpoint, and it is as Paddle's own are.

tests/integrations/paddle loads it in PaddleFormers itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchResource, StateMismatch
from holdfast_formats.mapping.listing import ForeignListing, TensorKey
from holdfast_formats.mapping.reading import fetched
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import PosixTier
from holdfast_service.wings.convert.exports.paddle import unified as paddle_unified
from holdfast_service.wings.convert.exports.plan import ExportOptions
from holdfast_service.wings.convert.foreign.paddle import unified
from tests.checkpoints import Arrays
from tests.wings.convert.exports.sources import BETAS, LLAMA, llama, made, trained, values_of, write

ASSETS = {"config.json": json.dumps(LLAMA).encode(), "tokenizer.json": b"{}"}
WEIGHTS = llama()
GROUPS = trained(WEIGHTS, step=2)
VALUES = values_of(list(WEIGHTS), ranks=2)
Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
ALIASES = {"model": {"lm_head.weight": "model.embed_tokens.weight"}}


def _exported(tmp_path: Path, groups: Arrays = GROUPS, options: ExportOptions | None = None, **how: object) -> Path:
    source = made(tmp_path / "step", groups, **{"assets": ASSETS, "ranks": VALUES, "step": 2, **how}).source
    return write(source, paddle_unified.plan(source, options or ExportOptions()), tmp_path / "out")


def check_equal(directory: Path, listing: ForeignListing, groups: Arrays) -> None:
    """Every tensor of a listing is the checkpoint's, bit for bit, and none is missing."""
    expected = {TensorKey(group, name): array for group, held in groups.items() for name, array in held.items()}
    assert listing.tensors.keys() == expected.keys()
    for key, array in expected.items():
        found = fetched(PosixTier(directory), listing.tensors[key])
        assert found.dtype == array.dtype and found.shape == array.shape and found.tobytes() == array.tobytes(), key


def test_imported_again_it_is_the_checkpoint(tmp_path: Path) -> None:
    """Model, masters, moments and steps, the betas and the learning rate; every file of it has a use."""
    out = _exported(tmp_path)
    tier = PosixTier(out)
    assert unified.KIND.recognises(tier)
    listing = unified.KIND.read(tier, ReadOptions())
    check_equal(out, listing, {group: GROUPS[group] for group in ("model", "master", "optim")})
    assert listing.step == 2 and {use.use for use in listing.files} == {"tensors", "state", "asset", "signal"}
    (group,) = (g for g in listing.documents["optim"]["optimizer"]["groups"].values() if isinstance(g, dict))
    assert (group["betas"], group["lr"]) == ({"$tuple": list(BETAS)}, 1e-3)


def test_it_is_as_paddles_own_are(tmp_path: Path) -> None:
    """Names, layouts, metadata and indexes; sizes are counted."""
    out = _exported(tmp_path)
    for stem, form in (("model", "pt"), ("optimizer", "np"), ("master_weights", "np")):
        index = json.loads((out / f"{stem}.safetensors.index.json").read_text())
        (file,) = set(index["weight_map"].values())
        assert file == f"{stem}-00001-of-00001.safetensors"
        with safe_open(out / file, "np") as opened:
            assert opened.metadata() == {"format": form}
        held = load_file(out / file)
        assert index["weight_map"].keys() == held.keys()
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in held.values())
    assert json.loads((out / "optimizer.safetensors.index.json").read_text())["master_weights"] is True
    held = load_file(out / "optimizer-00001-of-00001.safetensors")
    kinds = ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")
    assert held.keys() == {f"{name}/{kind}" for name in WEIGHTS for kind in kinds}
    masters = load_file(out / "master_weights-00001-of-00001.safetensors")
    for name in (Q, DOWN):
        assert np.array_equal(held[f"{name}/moment1_0"], GROUPS["optim"][f"{name}/exp_avg"].T)
        assert np.array_equal(held[f"{name}/moment2_0"], GROUPS["optim"][f"{name}/exp_avg_sq"].T)
        assert np.array_equal(masters[name], GROUPS["master"][name].T)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert np.array_equal(masters[name], GROUPS["master"][name])
    assert np.array_equal(load_file(out / "model-00001-of-00001.safetensors")[Q], WEIGHTS[Q])
    power = held[f"{Q}/beta1_pow_acc_0"]
    assert power.shape == (1,) and power[0] == np.float32(0.9) * np.float32(0.9) * np.float32(0.9)


def test_tied_weights_are_there_under_both_names(tmp_path: Path) -> None:
    """As Paddle's own state has them, for masters and moments as well."""
    weights = {name: array for name, array in WEIGHTS.items() if name != "lm_head.weight"}
    groups = trained(weights)
    out = _exported(tmp_path, groups, ranks=values_of(list(weights)), aliases=ALIASES)
    for file in ("model", "master_weights"):
        held = load_file(out / f"{file}-00001-of-00001.safetensors")
        assert held["lm_head.weight"].tobytes() == held["model.embed_tokens.weight"].tobytes()
    held = load_file(out / "optimizer-00001-of-00001.safetensors")
    assert np.array_equal(held["lm_head.weight/moment2_0"], groups["optim"]["model.embed_tokens.weight/exp_avg_sq"])
    listing = unified.KIND.read(PosixTier(out), ReadOptions())
    assert TensorKey("optim", "lm_head.weight/step") in listing.tensors


def test_without_masters_and_without_an_optimizer(tmp_path: Path) -> None:
    """What is not there is not made up: the index says that there are no masters, and nothing promises a resume."""
    groups = {**GROUPS, "master": {}}
    out = _exported(tmp_path / "a", groups)
    assert json.loads((out / "optimizer.safetensors.index.json").read_text())["master_weights"] is False
    check_equal(out, unified.KIND.read(PosixTier(out), ReadOptions()), {g: GROUPS[g] for g in ("model", "optim")})
    source = made(tmp_path / "b", {"model": WEIGHTS}, assets=ASSETS).source
    plan = paddle_unified.plan(source, ExportOptions())
    names = {file.name for file in plan.files}
    assert "trainer_state.bin" not in names and not any(name.startswith("optimizer") for name in names)
    assert any("not resume" in note for note in plan.notes)


def test_narrow_moments_are_widened(tmp_path: Path) -> None:
    """Paddle keeps them in F32, which holds every bfloat16."""
    name = f"{Q}/exp_avg"
    narrow = GROUPS["optim"][name].astype(ml_dtypes.bfloat16)
    out = _exported(tmp_path, {**GROUPS, "optim": {**GROUPS["optim"], name: narrow}})
    held = load_file(out / "optimizer-00001-of-00001.safetensors")
    assert np.array_equal(held[f"{Q}/moment1_0"], narrow.astype(np.float32).T)


def test_what_stays_behind_is_said(tmp_path: Path) -> None:
    """Averages, and values of ranks and of the training."""
    source = made(tmp_path / "step", GROUPS, assets=ASSETS, ranks=VALUES).source
    left = {one.what for one in paddle_unified.plan(source, ExportOptions()).left_out}
    assert left == {f"group ema ({len(WEIGHTS)} tensors)", "values extra/loader"}


OTHER = {**GROUPS["optim"], f"{Q}/max_exp_avg_sq": GROUPS["optim"][f"{Q}/exp_avg"]}
PARTLY = {name: array for name, array in GROUPS["optim"].items() if name != f"{Q}/exp_avg_sq"}


@pytest.mark.parametrize(
    ("groups", "how", "error", "says"),
    [
        ({"optim": OTHER}, {}, StateMismatch, "cannot store .*max_exp_avg_sq"),
        ({"optim": PARTLY}, {}, StateMismatch, "lacks 'exp_avg_sq'"),
        (
            {"optim": {**GROUPS["optim"], f"{Q}/step": np.array(1.5, np.float32)}},
            {},
            StateMismatch,
            "not a valid step count",
        ),
        ({"optim": {**GROUPS["optim"], "x/exp_avg": np.zeros(2, np.float32)}}, {}, StateMismatch, "'x'"),
        ({"master": {**GROUPS["master"], Q: GROUPS["master"][Q].astype(np.float64)}}, {}, StateMismatch, "F64"),
        (
            {"master": {**GROUPS["master"], "x": np.zeros(2, np.float32)}},
            {},
            StateMismatch,
            "group master has state for 'x'",
        ),
        ({"optim": {**GROUPS["optim"], f"{Q}/exp_avg": np.zeros((2, 2), np.float32)}}, {}, StateMismatch, "its weight"),
        ({}, {"ranks": {}}, StateMismatch, "betas"),
        ({}, {"ranks": values_of(list(WEIGHTS)[1:])}, StateMismatch, "betas for 'model.embed_tokens.weight'"),
        ({}, {"assets": {}}, NoSuchResource, "config.json"),
        ({}, {"assets": {"config.json": b"[]"}}, NoSuchResource, "config.json"),
        ({}, {"assets": {"config.json": b'{"model_type": "mamba"}'}}, StateMismatch, "'mamba'"),
        ({}, {"options": ExportOptions(weights="ema")}, InvalidRequest, "--weights"),
        ({}, {"options": ExportOptions(layout="tp2")}, InvalidRequest, "--layout"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, groups: Arrays, how: dict[str, object], error: type[CheckpointError], says: str
) -> None:
    """By name and with a way out, before anything is written."""
    with pytest.raises(error, match=says) as caught:
        _exported(tmp_path, {**GROUPS, **groups}, **how)  # type: ignore[arg-type]
    assert caught.value.hint and not (tmp_path / "out").exists()

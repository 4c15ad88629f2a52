"""Unified checkpoints of Paddle come out bit for bit, in every variant; what does not fit is refused by key and file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.mapping.listing import TensorKey
from holdfast_service.wings.convert.foreign.paddle import unified
from tests.wings.convert.foreign.directories import OnDisk
from tests.wings.convert.foreign.paddle import written
from tests.wings.convert.foreign.paddle.written import (
    SHAPES,
    check_golden,
    check_state,
    file_of_set,
    halves,
    read,
    write_set,
)

KIND = unified.KIND
ALL = ("model", "master", "optim")
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize("name", ["uc_tp2_async", "uc_tp2_ignore_merge"])
def test_what_paddle_wrote_is_exact(name: str) -> None:
    """Two tensor-parallel ranks: merged, with bfloat16 as U16; and not merged, in parts of ranks and shards."""
    listing = check_golden(name, KIND, ALL)
    assert len(listing.tensors) == 21 * 5
    uses = {use.file: use.use for use in listing.files}
    assert uses["config.json"] == "asset"
    assert uses["trainer_state.bin"] == uses["scheduler.pdparams"] == "state"
    assert json.loads(listing.made_assets["paddle_trainer_state.json"])["global_step"] == 2
    assert json.loads(listing.made_assets["paddle_scheduler.json"])["last_lr"] == 0.001
    assert listing.documents["extra"] == {}  # a trainer asks for the group, and would refuse what it has no use for
    ((_, group),) = [held for held in listing.documents["optim"]["optimizer"]["groups"].items() if held[0] != "$keys"]
    assert group["betas"] == {"$tuple": [0.9, 0.999]}
    assert group["lr"] == 0.001
    if name == "uc_tp2_async":
        assert uses[".model_weight.done.1"] == "signal"
        assert any("U16" in note for note in listing.notes)


def test_merged_in_two_files(tmp_path: Path) -> None:
    """The plain case, with a gap in the numbers, a file of no state, a directory and a model's own code beside it."""
    folder = written.unified(tmp_path)
    write_set(folder, "master_weights", [*halves({name: written.master(name) for name in SHAPES}), {}])
    for name in ("rng_state_0.pth", "training_args.bin", "modeling_own.py", "events.out"):
        (folder / name).write_bytes(b"x")
    (folder / "checkpoint-1").mkdir()
    listing = read(KIND, folder)
    check_state(folder, listing)
    uses = {use.file: (use.use, use.reason) for use in listing.files}
    assert "torch cannot load" in uses["rng_state_0.pth"][1]
    assert uses["training_args.bin"][0] == uses["events.out"][0] == uses["checkpoint-1"][0] == "unused"
    assert listing.assets == ("config.json", "modeling_own.py")
    (folder / "old.pdopt").write_bytes(b"x")
    with pytest.raises(StateMismatch, match=r"old\.pdopt is not known in this kind"):
        read(KIND, folder)


def test_layouts_and_precisions(tmp_path: Path) -> None:
    """Weights in Paddle's layout; as U16; of a training in F32, which has no masters and keeps F32 weights."""
    folder = written.unified(tmp_path)
    bits = {name: written.weight(name).view("u2") for name in SHAPES}
    write_set(folder, "model", halves(bits))
    check_state(folder, read(KIND, folder))
    for file in folder.glob("master_weights*"):
        file.unlink()
    check_state(folder, read(KIND, folder), ("model", "optim"))
    write_set(folder, "model", [{name: written.turned(name, written.master(name)) for name in SHAPES}], "pt")
    written.file_of_set(folder, "model-00002-of-00002.safetensors", {}, "pt")
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "model-00001-of-00002.safetensors").unlink()
    write_set(folder, "optimizer", halves(written.optimizer()), master_weights=False)
    written.config(folder, torch_dtype="float32")
    listing = read(KIND, folder)
    found = written.values(folder, listing, "model", DOWN)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.T, written.master(DOWN))


def test_masters_in_place_of_the_model(tmp_path: Path) -> None:
    """`skip_save_model_weight`: the model is its masters, rounded to the nearest even; not so if the training was in F32."""
    folder = written.unified(tmp_path)
    for file in (*folder.glob("model*"), *folder.glob("master*")):
        file.unlink()
    write_set(folder, "model", halves({name: written.master(name) for name in SHAPES}))
    listing = read(KIND, folder)
    check_state(folder, listing)
    assert any("skip_save_model_weight" in note for note in listing.notes)
    write_set(folder, "optimizer", halves(written.optimizer()), master_weights=False)
    assert {key.group for key in read(KIND, folder).tensors} == {"model", "optim"}


def _split(name: str, values: NDArray[Any], rank: int) -> NDArray[Any]:
    """A rank's part of two, as tensor parallelism cuts it."""
    if name.endswith(("gate_up_proj.weight", "up_gate_proj.weight", "up_gate_proj.bias")):
        gate, up = np.split(values, 2, -1)
        return np.concatenate([np.split(gate, 2, -1)[rank], np.split(up, 2, -1)[rank]], -1)
    if name.endswith("qkv_proj.weight"):
        parts = [values[:, :8], values[:, 8:12], values[:, 12:]]
        return np.concatenate([np.split(part, 2, -1)[rank] for part in parts], -1)
    if name.endswith(("q_proj.weight", "gate_proj.weight")):
        return np.split(values, 2, -1)[rank]
    if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
        return np.split(values, 2, 0)[rank]
    return values


FUSED = {
    "model.layers.0.mlp.up_gate_proj.weight": (6, 12),
    "model.layers.0.mlp.up_gate_proj.bias": (12,),
    "model.layers.0.self_attn.qkv_proj.weight": (6, 16),  # 4 heads and 2 groups of 2
    "model.layers.0.mlp.down_proj.weight": (6, 6),
    "model.embed_tokens.weight": (8, 6),
}


def test_parts_of_ranks_with_fused_layers(tmp_path: Path) -> None:
    """Each rank has its part of the gate and of the up projection, of q, k and v; a third pipeline stage has the rest."""
    written.trainer_state(tmp_path)
    written.config(tmp_path, model_type="phi3", num_attention_heads=4, num_key_value_heads=2)
    turn = {name for name in FUSED if name.endswith(("qkv_proj.weight", "down_proj.weight"))}
    model = {name: written.weight(name, shape) for name, shape in FUSED.items()}
    write_set(tmp_path, "model", [{k: v.T if k in turn else v for k, v in model.items()}], "pt")
    stages = [[name for name in FUSED if ("up_gate" in name) == (stage == 1)] for stage in range(2)]
    for stage, names in enumerate(stages):
        for rank in range(2):
            suffix = f"tp{rank:02d}_pp{stage:02d}.safetensors"
            held = {name: _split(name, written.master(name, FUSED[name]), rank) for name in names}
            file_of_set(tmp_path, f"master_weights.{suffix}", held)
            held = {f"{n}/moment{k}_0": _split(n, written.moment(n, k, FUSED[n]), rank) for n in names for k in (1, 2)}
            held |= {f"{n}/{kind}": written.power(kind) for n in names for kind in written.BETAS}
            file_of_set(tmp_path, f"optimizer.{suffix}", held)
    (tmp_path / "optimizer.safetensors.index.json").write_text(json.dumps({"optim_shard_num": 1}))
    listing = read(KIND, tmp_path)
    for name, shape in FUSED.items():
        states = {("master", name): written.master(name, shape)}
        states |= {("optim", f"{name}/{s}"): written.moment(name, k, shape) for k, s in ((1, "exp_avg"), (2, "exp_avg_sq"))}
        for key, wanted in states.items():
            found = written.values(tmp_path, listing, *key)
            np.testing.assert_array_equal(found.T if name in turn else found, wanted)
    (tmp_path / "optimizer.tp01_pp01.safetensors").rename(tmp_path / "away")
    with pytest.raises(CorruptManifest, match=r"optimizer\.tp01_pp01\.safetensors is missing"):
        read(KIND, tmp_path)


def test_a_missing_part_of_a_shard(tmp_path: Path) -> None:
    """The index says how many there are of each rank."""
    folder = tmp_path / "c"
    source = written.GOLDEN / "uc_tp2_ignore_merge" / "checkpoint-2"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "optimizer.tp01.safetensors_shard_0002").unlink()
    with pytest.raises(CorruptManifest, match=r"optimizer\.tp01\.safetensors_shard_0002 is missing"):
        read(KIND, folder)
    (folder / "optimizer.safetensors.index.json").write_text(json.dumps({"optim_shard_num": 2**70}))
    with pytest.raises(CorruptManifest, match=r"optimizer\.tp00\.safetensors_shard_0003 is missing"):
        read(KIND, folder)
    (folder / "optimizer.tp01.safetensors_shard_0001").rename(folder / "optimizer.tp99999999999.safetensors_shard_0001")
    with pytest.raises(CorruptManifest, match="is missing"):
        read(KIND, folder)


def test_beta_powers_in_two_files(tmp_path: Path) -> None:
    """Stage 1 v2, gathered: whole tensors, while the powers of a parameter that was cut stand twice; they must agree."""
    folder = written.unified(tmp_path)
    parts = halves(written.optimizer())
    parts[0] |= {f"{DOWN}/{kind}": written.power(kind) for kind in written.BETAS}
    parts[1] |= {f"{DOWN}/{kind}": written.power(kind) for kind in written.BETAS}
    write_set(folder, "optimizer", parts)
    listing = read(KIND, folder)
    check_state(folder, listing)
    as_is = read(KIND, folder, as_is=True)
    assert len(as_is.tensors[TensorKey("optim", f"{DOWN}/beta1_pow_acc_0")].copies) == 1
    parts[0][f"{DOWN}/beta1_pow_acc_0"] = written.power("beta1_pow_acc_0", 3)
    write_set(folder, "optimizer", parts)
    with pytest.raises(StateMismatch, match=r"optimizer-00001-of-00002\.safetensors: '.*down_proj\.weight/beta1_pow_acc_0'"):
        read(KIND, folder)


def _slices(values: NDArray[Any], where: int | None) -> list[NDArray[Any]]:
    """The padded flat slot of a parameter, perhaps cut in two."""
    flat = np.concatenate([values.reshape(-1), np.zeros(-values.size % 64, values.dtype)])
    return [flat] if where is None else [flat[:where], flat[where:]]


def _broken(folder: Path) -> None:
    """Stage 1 v2, not gathered: slices under one key in two files. The second parameter's cut is in its padding."""
    cuts = {EMBED: 32, NORM: 64 - 32}
    masters: list[dict[str, NDArray[Any]]] = [{}, {}]
    moments: list[dict[str, NDArray[Any]]] = [{}, {}]
    for number, name in enumerate(SHAPES):
        rank = int(number > 3)
        for held, key, values in (
            (masters, name, written.master(name)),
            (moments, f"{name}/moment1_0", written.moment(name, 1)),
            (moments, f"{name}/moment2_0", written.moment(name, 2)),
        ):
            found = _slices(values, cuts.get(name))
            for at, part in enumerate(found):
                held[rank if len(found) == 1 else at][key] = part
        for kind in written.BETAS:
            for at in (0, 1) if name in cuts else (rank,):
                moments[at][f"{name}/{kind}"] = written.power(kind)
    write_set(folder, "master_weights", masters)
    write_set(folder, "optimizer", moments)


def test_broken_flat_directories(tmp_path: Path) -> None:
    """Refused by key and both files; put together on request."""
    folder = written.unified(tmp_path)
    _broken(folder)
    with pytest.raises(
        StateMismatch, match=r"is flat, with 32 .* master_weights-00001-of-00002.* and 32 .*-00002"
    ) as caught:
        read(KIND, folder)
    assert caught.value.members["tensor"] == EMBED
    assert caught.value.members["files"] == [f"master_weights-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert "--assemble-flat" in caught.value.hint
    listing = read(KIND, folder, assemble_flat=True)
    check_state(folder, listing)
    assert any("flat slices" in note for note in listing.notes)
    held = _slices(written.moment(DOWN, 1), None)[0][:-8]
    (folder / "optimizer-00002-of-00002.safetensors").unlink()
    write_set(folder, "optimizer", [{f"{DOWN}/moment1_0": held[:32], f"{DOWN}/moment2_0": held}, {}])
    with pytest.raises(StateMismatch, match=r"has 32 elements in 1 slices, but shape .* needs 60"):
        read(KIND, folder, assemble_flat=True)


def test_flat_slices_of_ranks(tmp_path: Path) -> None:
    """`ignore_merge_optimizer` with stage 1 v2: slices of each rank, in the order of their names; Paddle loads these."""
    folder = written.unified(tmp_path)
    for file in (*folder.glob("master*"), *folder.glob("optimizer*")):
        file.unlink()
    cut = 3  # of 128 ranks: the last ones hold the end of everything, the others nothing but one slice of the embedding
    ranks: list[dict[str, dict[str, NDArray[Any]]]] = [{"master_weights": {}, "optimizer": {}} for _ in range(102)]
    for name in SHAPES:
        arrays = {("master_weights", name): written.master(name)}
        arrays |= {("optimizer", f"{name}/moment{k}_0"): written.moment(name, k) for k in (1, 2)}
        for (stem, key), values in arrays.items():
            slot = _slices(values, None)[0]
            bounds = [0, cut, slot.size // 2, slot.size]
            for rank, low, high in zip((99, 100, 101), bounds, bounds[1:], strict=False):
                ranks[rank][stem][key] = slot[low:high]
        for kind in written.BETAS:
            ranks[101]["optimizer"][f"{name}/{kind}"] = written.power(kind)
    for rank, sets in enumerate(ranks):
        for stem, held in sets.items():
            file_of_set(folder, f"{stem}.shard{rank:02d}.safetensors", held)
    check_state(folder, read(KIND, folder))


def test_a_slice_as_long_as_the_whole(tmp_path: Path) -> None:
    """Its other slice is padding, not a copy."""
    folder = written.unified(tmp_path)
    _broken(folder)
    parts = []
    for number in (1, 2):
        path = folder / f"master_weights-0000{number}-of-00002.safetensors"
        parts.append(dict(load_file(path)))
    parts[0][NORM], parts[1][NORM] = written.master(NORM), np.zeros(6, "f4")
    write_set(folder, "master_weights", parts)
    check_state(folder, read(KIND, folder, assemble_flat=True))


def test_flat_without_a_model_is_refused(tmp_path: Path) -> None:
    """Nothing says what shape it had, so neither way reads it."""
    folder = written.unified(tmp_path)
    _broken(folder)
    for file in folder.glob("model*"):
        file.unlink()
    for assemble in (False, True):
        with pytest.raises(StateMismatch, match=r"its original shape is not recorded|of shape"):
            read(KIND, folder, assemble_flat=assemble)


def test_tied_embeddings(tmp_path: Path) -> None:
    """The model has both names, the masters and the optimizer one; both get them, so that a torch trainer finds its own."""
    folder = written.unified(tmp_path)
    written.config(folder, tie_word_embeddings=True)
    untied = {name: 0 for name in SHAPES if name != EMBED}
    write_set(folder, "master_weights", [{name: written.master(name) for name in untied}])
    for file in (*folder.glob("master_weights-*-of-00002*"), *folder.glob("optimizer-*-of-00002*")):
        file.unlink()
    write_set(folder, "optimizer", [written.optimizer(untied)])
    listing = read(KIND, folder)
    for name in (EMBED, "lm_head.weight"):
        np.testing.assert_array_equal(written.values(folder, listing, "master", name), written.master("lm_head.weight"))
        found = written.values(folder, listing, "optim", f"{name}/exp_avg")
        np.testing.assert_array_equal(found, written.moment("lm_head.weight", 1))
        assert written.values(folder, listing, "optim", f"{name}/step") == 2


def test_torn_directories(tmp_path: Path) -> None:
    """A signal of some writers and not of others is refused by its name; none at all says nothing."""
    folder = written.unified(tmp_path)
    for kind in ("model", "master", "optimizer"):
        for rank in range(2):
            (folder / f".{kind}_weight.done.{rank}").write_bytes(b"\x80\x04K\x00.")
    check_state(folder, read(KIND, folder))
    for missing in (".optimizer_weight.done.1", ".master_weight.done.0"):
        (folder / missing).rename(tmp_path / "kept")
        with pytest.raises(StateMismatch, match=f"{missing} is missing"):
            read(KIND, folder)
        (tmp_path / "kept").rename(folder / missing)
    for rank in range(2):
        (folder / f".master_weight.done.{rank}").unlink()
    with pytest.raises(StateMismatch, match=r"\.master_weight\.done\.0 is missing"):
        read(KIND, folder)


def test_as_it_is(tmp_path: Path) -> None:
    """Names and layouts of Paddle, of a model class that is not known too; without steps."""
    folder = written.unified(tmp_path)
    written.config(folder, model_type="own")
    with pytest.raises(StateMismatch, match="does not know which weights of 'own' that layout") as caught:
        read(KIND, folder)
    assert "--as-is" in caught.value.hint
    listing = read(KIND, folder, as_is=True)
    assert len(listing.tensors) == len(SHAPES) * 6
    np.testing.assert_array_equal(written.values(folder, listing, "master", DOWN), written.master(DOWN))
    np.testing.assert_array_equal(written.values(folder, listing, "optim", f"{DOWN}/moment2_0"), written.moment(DOWN, 2))
    assert "optim" not in listing.documents


def test_indexes_that_do_not_fit(tmp_path: Path) -> None:
    """A file or key that is missing, a key that the index does not name, a shape that is not the model's."""
    folder = written.unified(tmp_path)
    index = json.loads((folder / "master_weights.safetensors.index.json").read_text())

    def stated(**changes: str) -> None:
        held = {**index["weight_map"], **changes}
        (folder / "master_weights.safetensors.index.json").write_text(json.dumps({"weight_map": held}))

    stated(other="master_weights-00003-of-00003.safetensors")
    with pytest.raises(CorruptManifest, match=r"master_weights-00003-of-00003.safetensors is missing"):
        read(KIND, folder)
    stated(other="master_weights-00001-of-00002.safetensors")
    with pytest.raises(CorruptManifest, match="has no 'other'"):
        read(KIND, folder)
    stated()
    held = {name: written.master(name) for name in SHAPES}
    file_of_set(folder, "master_weights-00002-of-00002.safetensors", {**halves(held)[1], "extra.weight": held[NORM]})
    with pytest.raises(StateMismatch, match=r"has 'extra\.weight', which .* does not list"):
        read(KIND, folder)
    file_of_set(folder, "master_weights-00002-of-00002.safetensors", {**halves(held)[1], DOWN: held[DOWN].T})
    with pytest.raises(StateMismatch, match=r"down_proj\.weight' is F32 of shape \[6, 10\]: the model's weight has .*10, 6"):
        read(KIND, folder)
    (folder / "master_weights.safetensors.index.json").unlink()
    with pytest.raises(CorruptManifest, match=r"master_weights\.safetensors\.index\.json is missing"):
        read(KIND, folder)


def test_optimizers_that_are_not_understood(tmp_path: Path) -> None:
    """No step, another step, a state of another optimizer, a moment that is missing: each by key and file."""
    folder = written.unified(tmp_path)
    (folder / "trainer_state.bin").rename(tmp_path / "kept")
    with pytest.raises(StateMismatch, match=r"has optimizer state, but trainer_state.bin"):
        read(KIND, folder)
    written.trainer_state(folder, 3)
    with pytest.raises(StateMismatch, match=r"which is not β\^\(t\+1\) for any usual β after t = 3 steps"):
        read(KIND, folder)
    written.trainer_state(folder)
    held = written.optimizer()
    write_set(folder, "optimizer", halves({**held, f"{DOWN}/velocity_0": held[f"{DOWN}/moment1_0"]}))
    with pytest.raises(StateMismatch, match=r"velocity_0 of .* is not Adam state"):
        read(KIND, folder)
    del held[f"{DOWN}/moment1_0"]
    write_set(folder, "optimizer", halves(held))
    with pytest.raises(StateMismatch, match=r"down_proj\.weight/moment2_0' is F32 .* codes must be I8"):
        read(KIND, folder)
    write_set(folder, "optimizer", halves(written.optimizer()), ckpt_quant_stage="O9")
    with pytest.raises(StateMismatch, match="unknown quantisation 'O9'"):
        read(KIND, folder)


def test_a_model_alone(tmp_path: Path) -> None:
    """It is Paddle's if it is transposed, or has U16 beside Paddle's configuration; else it is a Hugging Face model."""
    written.config(tmp_path, paddleformers_version="1.2.0")
    held = {name: written.weight(name) for name in SHAPES}
    for form, arrays, is_paddle in (
        ("np", held, True),
        ("pt", {name: written.turned(name, value).view("u2") for name, value in held.items()}, True),
        ("pt", {name: written.turned(name, value) for name, value in held.items()}, False),
        (None, {name: written.turned(name, value) for name, value in held.items()}, False),
    ):
        file_of_set(tmp_path, "model.safetensors", arrays, form)
        assert KIND.recognises(OnDisk(tmp_path)) == is_paddle
        listing = KIND.read(OnDisk(tmp_path), unified.ReadOptions())
        check_state(tmp_path, listing, ("model",))
    assert ml_dtypes.bfloat16 == written.values(tmp_path, listing, "model", DOWN).dtype

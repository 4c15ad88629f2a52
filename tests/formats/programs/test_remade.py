"""Shards of what programs make: every rank gets what the program makes of that rank's own stored tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast_formats.errors import InvalidRequest, NoSuchResource, StateMismatch
from holdfast_formats.layout import language, padding, parts
from holdfast_formats.layout.rank_tensors import of_manifest
from holdfast_formats.programs import compile_program, inverted, load, read_program
from holdfast_formats.programs.document import Program
from holdfast_formats.programs.remade import remade_holdings
from tests.checkpoints import Built, build
from tests.formats.programs.arrays import applied, key, specs
from tests.layouts import models
from tests.local_tensors import fill

Named = dict[str, NDArray[Any]]
LLAMA = models.llama(layers=2, vocabulary=32)
MOE = models.moe(layers=2)
DENSE_PROGRAMS = ["hf-megatron", "hf-megatron-stacked", "hf-paddle", "hf-titan", "hf-titan-legacy"]
MOE_PROGRAMS = ["hf-megatron-moe", "hf-megatron-stacked-moe", "hf-paddle-qwen-moe", "hf-titan-qwen3", "hf-stacked"]
PAIRS = [(name, LLAMA) for name in DENSE_PROGRAMS] + [(name, MOE) for name in MOE_PROGRAMS]
EACH = pytest.mark.parametrize(("name", "model"), PAIRS, ids=[name for name, _ in PAIRS])


def stored(path: Path, model: models.Model, arrays: Named | None = None) -> Built:
    """A checkpoint of the model with optimizer state."""
    whole = model.arrays() if arrays is None else arrays
    optim = {f"{name}/exp_avg": array * 2 for name, array in whole.items()}
    steps = {f"{name}/step": np.array(7, np.float32) for name in whole}
    return build(path, {"model": whole, "optim": optim | steps, "extra": {}}, config=json.dumps(model.config).encode())


def shard(built: Built, program: Program | None, layout: str, rank: int = 0, group: str = "model") -> Named:
    """A rank's tensors, as their parts say."""
    config, wanted = json.loads((built.path / "config.json").read_bytes()), language.parse(layout)
    if program is None:
        held = of_manifest(built.manifest, group, wanted, config).of(rank)
    else:
        holdings = remade_holdings(built.manifest, group, wanted, config, None, program)
        held = holdings.of(rank)
        size = holdings.share(rank)
        assert (size.tensors, size.bytes) == (len(held.tensors), sum(local.volume * 4 for local in held.tensors))
    return {local.name: fill(local, built.arrays[group]) for local in held.tensors}


def remade(program: Program, arrays: Named, config: dict[str, Any]) -> Named:
    """What the program makes of these tensors."""
    named = {key(name): array for name, array in arrays.items()}
    return {each.name: array for each, array in applied(compile_program(program, specs(named), config), named).items()}


def divided(config: dict[str, Any], tp: int) -> dict[str, Any]:
    """The config of one tensor-parallel rank, as if its part were a model of its own."""
    sizes = ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size", "moe_intermediate_size")
    return config | {size: config[size] // tp for size in sizes if size in config}


def assert_same(found: Named, wanted: Named) -> None:
    assert sorted(found) == sorted(wanted)
    for name, array in wanted.items():
        assert found[name].shape == array.shape, name
        np.testing.assert_array_equal(found[name], array, name)


@EACH
def test_one_rank_holds_what_the_program_makes_and_the_way_back(name: str, model: models.Model, tmp_path: Path) -> None:
    """Without parallelism; the inverse, out of a checkpoint of the other side, gives the first one's tensors."""
    program, built = load(name), stored(tmp_path / "there", model)
    whole = remade(program, model.arrays(), model.config)
    assert_same(shard(built, program, ""), whole)
    assert_same(
        shard(built, program, "", group="optim"),
        {
            **{f"{of}/exp_avg": array * 2 for of, array in whole.items()},
            **{f"{of}/step": np.array(7, np.float32) for of in whole},
        },
    )
    assert_same(shard(stored(tmp_path / "back", model, whole), inverted(program), "rules=none"), model.arrays())


@EACH
def test_a_rank_holds_what_the_program_makes_of_its_part(name: str, model: models.Model, tmp_path: Path) -> None:
    """Tensor parallelism: fused tensors have the rank's part of each, as if each rank's part were a model of its own."""
    program, built = load(name), stored(tmp_path / "there", model)
    for rank in range(2):
        local = shard(built, None, "tp=2", rank)
        assert_same(shard(built, program, "tp=2", rank), remade(program, local, divided(model.config, 2)))


@EACH
def test_stages_hold_their_layers(name: str, model: models.Model, tmp_path: Path) -> None:
    """Pipeline stages have each tensor once; where layers are stacked, each has its own."""
    program, built = load(name), stored(tmp_path / "there", model)
    wanted = shard(built, program, "tp=2", 1)
    first, second = shard(built, program, "tp=2,pp=2", 1), shard(built, program, "tp=2,pp=2", 3)
    both = {**first, **second}
    for twice in first.keys() & second.keys():
        assert "stacked" in name and first[twice].shape[0] == second[twice].shape[0] == 1, twice
        both[twice] = np.concatenate([first[twice], second[twice]])
    assert_same(both, wanted)


def test_experts_are_divided(tmp_path: Path) -> None:
    """Of stacked experts, an expert-parallel rank holds its own."""
    built, program = stored(tmp_path / "there", MOE), load("hf-stacked")
    wanted = shard(built, program, "")
    for rank in range(2):
        found = shard(built, program, "ep=2,dp=2", rank)
        half = {name: np.split(array, 2)[rank] if ".experts." in name else array for name, array in wanted.items()}
        assert_same(found, half)


@pytest.mark.parametrize("name", ["hf-paddle", "hf-titan-legacy", "hf-megatron"])
def test_ranks_that_share_an_optimizer_share_what_is_made(name: str, tmp_path: Path) -> None:
    """Flat shards and rows are cut out of the made tensors, turned ones too: together they are these tensors again."""
    built, program = stored(tmp_path / "there", LLAMA), load(name)
    wanted = shard(built, program, "tp=2", 1, "optim")
    for method in ("stage1:flat", "stage3:dim0"):
        ranks = [shard(built, program, f"tp=2,sharding=3:{method}", 1 + 2 * rank, "optim") for rank in range(3)]
        for of, array in wanted.items():
            pieces = [rank[of].reshape(-1) for rank in ranks if of in rank]
            joined = pieces[0] if not array.shape else np.concatenate(pieces)
            np.testing.assert_array_equal(joined, array.reshape(-1), of)


def test_a_turned_part_is_cut_along_its_positions() -> None:
    """Any range of positions of a transposed tensor is that range of its elements, and padding is what is left."""
    whole = np.arange(30, dtype=np.float32).reshape(5, 6)
    part = parts.Part("a", parts.Box((0, 1), (5, 4)), 0, (1, 5))
    assert part.turned and not part._replace(strides=(6, 1)).turned
    local = parts.LocalTensor("a", "F32", (4, 5), (part,))
    wanted = whole[:, 1:5].T.reshape(-1)
    for start in range(21):
        for stop in range(start, 21):
            np.testing.assert_array_equal(fill(parts.flat(local, start, stop), {"a": whole}), wanted[start:stop])
    wide = parts.LocalTensor("a", "F32", (4, 7), (part._replace(strides=(1, 7)),))
    assert padding.gaps(wide) == [(5, 7), (12, 14), (19, 21), (26, 28)]
    square = parts.LocalTensor("a", "F32", (5, 5), (parts.Part("a", parts.Box((0, 0), (5, 5)), 0, (1, 5)),))
    np.testing.assert_array_equal(fill(parts.rows(square, 1, 3), {"a": whole}), whole[:, :5].T[1:3])


def test_a_padded_vocabulary(tmp_path: Path) -> None:
    """The layout pads a renamed vocabulary; the program's own padding is whole on one rank, and refused in parts."""
    model = models.llama(layers=1, vocabulary=30)
    built, program = stored(tmp_path / "there", model), load("hf-megatron")
    table = np.pad(model.arrays()["model.embed_tokens.weight"], ((0, 2), (0, 0)))
    for rank in range(2):
        found = shard(built, program, "tp=2,vocab=16", rank)
        np.testing.assert_array_equal(found["embedding.word_embeddings.weight"], np.split(table, 2)[rank])
    padding = json.dumps(model.config | {"padded_vocab_size": 32}).encode()
    own = build(tmp_path / "own", {"model": model.arrays(), "extra": {}}, config=padding)
    np.testing.assert_array_equal(shard(own, program, "")["embedding.word_embeddings.weight"], table)
    with pytest.raises(StateMismatch, match=r"pads 'embedding.word_embeddings.weight'.*no rank would own the padding"):
        shard(own, program, "tp=2")


def written(statements: str) -> Program:
    return read_program(f"name = 'mine'\nfrom = 'a'\nto = 'b'\nstatements = '''\n{statements}\n'''\n")


def test_what_is_refused(tmp_path: Path) -> None:
    """Fused forms, unknown groups, casts, and tensors that a program needs to be equal, or zeros, and that are not."""
    whole = {"a": np.ones((2, 2), np.float32), "b": np.zeros((2, 2), np.float32), "c": np.ones((2, 2), np.float32)}
    built = build(tmp_path / "there", {"model": whole, "extra": {}}, config=b"{}")
    with pytest.raises(InvalidRequest, match="qkv=groups cannot be combined"):
        shard(built, written("* -> *"), "qkv=groups")
    with pytest.raises(NoSuchResource, match="no group 'optim'"):
        shard(built, written("* -> *"), "", group="optim")
    with pytest.raises(StateMismatch, match="casts 'd' from F32 to BF16, which shards do not support"):
        shard(built, written("a -> d, dtype=bfloat16\n* -> *"), "")
    with pytest.raises(StateMismatch, match=r"(?s)'a' and 'b' of group model are equal, but they differ.*another program"):
        shard(built, written("a, b -> d, same\n* -> *"), "")
    with pytest.raises(StateMismatch, match=r"(?s)'a' of group model is all zeros, but it is not.*another program"):
        shard(built, written("a -> _, zeros\n* -> *"), "")
    with pytest.raises(StateMismatch, match="program 'mine'"):
        shard(built, written("z -> d\n* -> *"), "")
    assert_same(
        shard(built, written("a, c -> d, same\nb -> _, zeros\n_ -> e, shape=[3], dtype=float32"), ""),
        {"d": whole["a"], "e": np.zeros(3, np.float32)},
    )

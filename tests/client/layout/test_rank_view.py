"""Live tensors of another system's names, restored through a mapping program from a checkpoint of Hugging Face's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import Checkpointer, ParallelLayout
from holdfast.launch import Launch
from holdfast.layout.declared import declare
from holdfast.state.train_state import TrainState
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.layout import language
from holdfast_formats.programs import load
from tests.client import llama
from tests.client.checkpoint_in_memory import Checkpoint
from tests.client.layout.test_declared import check, moved, tensors, training
from tests.formats.programs.test_remade import remade

PROGRAMS = ["hf-megatron", "hf-paddle", "hf-titan", "hf-titan-legacy"]


def rank_state(state: dict[str, Any], layout: str, rank: int, program: object) -> TrainState:
    world = language.parse(layout).mesh.world
    declared = declare(ParallelLayout(layout, config=llama.CONFIG, program=program), Launch(rank, world, "l", world), {})
    return TrainState(state, rank, world, declared)


def local(program: str, tp: int = 1, rank: int = 0) -> llama.Arrays:
    """What a tensor-parallel rank holds: what the program makes of its part, as if that were a model of its own."""
    sizes = ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size")
    config = llama.CONFIG | {size: llama.CONFIG[size] // tp for size in sizes}
    return remade(load(program), llama.cut(llama.arrays(), tp, rank), config)


@pytest.fixture(scope="module")
def saved() -> Checkpoint:
    return Checkpoint(TrainState(training(llama.arrays(), True), 0, 1).snapshot())


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("layout", ["", "tp=2"])
def test_live_tensors_are_filled_through_a_program(saved: Checkpoint, program: str, layout: str) -> None:
    """In place, turned and fused ones too; each rank has its part."""
    tp = language.parse(layout).mesh.tp
    for rank in range(tp):
        wanted = local(program, tp, rank)
        live: dict[str, Any] = {"model": tensors(moved(wanted))}
        restoration = rank_state(live, layout, rank, program).prepare(saved.stored(rank), groups=["model"])
        saved.fill(restoration)
        restoration.apply()
        for name, parameter in live["model"].items():
            np.testing.assert_array_equal(parameter.detach().numpy(), wanted[name], err_msg=name)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_optimizer_follows(program: str) -> None:
    """Moments, steps and learning rates are the stored parameters', under the live names."""
    state = training(llama.arrays(), True)
    model = state["model"]
    state["optim"].param_groups[:] = [{**state["optim"].param_groups[0], "params": list(model.values()), "lr": 0.25}]
    checkpoint = Checkpoint(TrainState(state, 0, 1).snapshot())
    wanted = local(program)
    live = tensors(moved(wanted))
    fresh = {"model": live, "optim": torch.optim.AdamW(live.values(), lr=9.0), "epoch": 0}
    restoration = rank_state(fresh, "", 0, program).prepare(checkpoint.stored(0))
    checkpoint.fill(restoration)
    restoration.apply()
    check(fresh, wanted)
    assert [group["lr"] for group in fresh["optim"].param_groups] == [0.25]
    assert {float(kept["step"]) for kept in fresh["optim"].state.values()} == {1.0} and fresh["epoch"] == 7


def test_masters_follow() -> None:
    """Masters of the same names are filled with the stored masters."""
    twice = {name: array * 2 for name, array in llama.arrays().items()}
    state = {"model": tensors(llama.arrays()), "master": tensors(twice)}
    checkpoint = Checkpoint(TrainState(state, 0, 1).snapshot())
    wanted = local("hf-paddle")
    fresh = {"model": tensors(moved(wanted)), "master": tensors(moved(wanted))}
    restoration = rank_state(fresh, "", 0, "hf-paddle").prepare(checkpoint.stored(0))
    checkpoint.fill(restoration)
    restoration.apply()
    for name, array in wanted.items():
        np.testing.assert_array_equal(fresh["model"][name].detach().numpy(), array, err_msg=name)
        np.testing.assert_array_equal(fresh["master"][name].detach().numpy(), array * 2, err_msg=name)


def test_names_that_only_one_side_has(saved: Checkpoint) -> None:
    """Strictly, what is not made is missing; shapes are those of what is made."""
    wanted = local("hf-megatron")
    more = tensors({**wanted, "decoder.extra": np.zeros(2, np.float32)})
    with pytest.raises(StateMismatch, match=r"decoder\.extra"):
        rank_state({"model": more}, "", 0, "hf-megatron").prepare(saved.stored(0), groups=["model"])
    at = "decoder.final_layernorm.weight"
    with pytest.raises(StateMismatch, match=at):
        state = {"model": tensors({**wanted, at: np.zeros(3, np.float32)})}
        rank_state(state, "", 0, "hf-megatron").prepare(saved.stored(0), groups=["model"])


def test_what_a_program_does_not_do() -> None:
    """Fused forms are refused by name."""
    wanted = local("hf-megatron")
    with pytest.raises(InvalidRequest, match="qkv=groups cannot be combined with a program"):
        rank_state({"model": tensors(wanted)}, "qkv=groups", 0, "hf-megatron")


def test_a_checkpointer_restores_through_a_program(tmp_path: Path) -> None:
    """From end to end, over a daemon: saved with Hugging Face's names, restored into Paddle's; and what is to be equal is
    proven so.
    """
    root = tmp_path / "root"
    with Checkpointer.alone("hf", {"model": tensors(llama.arrays())}, at=root) as checkpointer:
        checkpointer.save(3, wait="durable")
    wanted = local("hf-paddle")
    live = tensors(moved(wanted))
    layout = ParallelLayout("", config=llama.CONFIG, program="hf-paddle")
    with Checkpointer.alone("hf", {"model": live}, at=root, layout=layout) as checkpointer:
        assert checkpointer.restore() == 3
        for name, parameter in live.items():
            np.testing.assert_array_equal(parameter.detach().numpy(), wanted[name], err_msg=name)
        checkpointer.save(4, wait="durable")
    plain = {name: tensor * 0 for name, tensor in tensors(llama.arrays()).items()}
    with Checkpointer.alone("hf", {"model": plain}, at=root) as checkpointer:
        assert checkpointer.restore() == 4
        for name, array in llama.arrays().items():
            np.testing.assert_array_equal(plain[name].detach().numpy(), array, err_msg=name)
    optimizer = torch.optim.SGD(live.values(), lr=1.0)
    with Checkpointer.alone("hf", {"model": live, "optim": optimizer}, at=root, layout=layout) as checkpointer:
        checkpointer.restore(groups=["model"])
        for parameter in live.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        norm = live["model.norm.weight"].detach().numpy()
        np.testing.assert_array_equal(norm, wanted["model.norm.weight"] - 1)
        assert checkpointer.notices == ()
    text = "name = 'mine'\nfrom = 'a'\nto = 'b'\nstatements = '''\n"
    text += "model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight -> up, same\n* -> *\n'''\n"
    mine = {"up": live["model.layers.0.mlp.up_proj.weight"].detach().T.contiguous()}
    mine |= {name: tensor for name, tensor in tensors(llama.arrays()).items() if "up_proj" not in name}
    with Checkpointer.alone("hf", {"model": mine}, at=root, layout=layout._replace(program=text)) as checkpointer:
        before = mine["up"].clone()
        with pytest.raises(StateMismatch, match="are equal, but they differ"):
            checkpointer.restore()
        assert torch.equal(mine["up"], before)

"""Training in another system's names, saved through a mapping program by a daemon: every checkpoint is Hugging Face's."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import holdfast
from holdfast import Checkpointer, ParallelLayout
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, StateMismatch
from tests.client import llama
from tests.client.layout.test_declared import check, moved, tensors, training
from tests.client.layout.test_rank_view import local
from tests.daemons import RunningDaemon
from tests.formats.programs.reference_models import Megatron, logits
from tests.formats.programs.test_remade import LLAMA
from tests.kit.ranks import World
from tests.torchruns import launch

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


class Trainer:
    """Megatron-core's names, shapes and forward pass, with AdamW; `seed` decides about weights, not about batches."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        hidden, fused, inter = CONFIG.hidden_size, CONFIG.hidden_size * 2, CONFIG.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (CONFIG.vocab_size, hidden)}
        for layer in range(CONFIG.num_hidden_layers):
            at = f"decoder.layers.{layer}"
            shapes |= {
                f"{at}.self_attention.linear_qkv.layer_norm_weight": (hidden,),
                f"{at}.self_attention.linear_qkv.weight": (fused, hidden),
                f"{at}.self_attention.linear_proj.weight": (hidden, hidden),
                f"{at}.mlp.linear_fc1.layer_norm_weight": (hidden,),
                f"{at}.mlp.linear_fc1.weight": (2 * inter, hidden),
                f"{at}.mlp.linear_fc2.weight": (hidden, inter),
            }
        shapes |= {"decoder.final_layernorm.weight": (hidden,), "output_layer.weight": (CONFIG.vocab_size, hidden)}
        self.model = {name: nn.Parameter(torch.randn(shape) * 0.3 + ("norm" in name)) for name, shape in shapes.items()}
        self.optim = torch.optim.AdamW(self.model.values(), lr=0.01)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim}

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return logits(Megatron(self.model, CONFIG, stacked=False), CONFIG, tokens)

    def step(self, number: int) -> None:
        batch = torch.randint(0, CONFIG.vocab_size, (2, 9), generator=torch.Generator().manual_seed(number))
        cross_entropy(self.logits(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        self.optim.step()
        self.optim.zero_grad()


def layout() -> ParallelLayout:
    return ParallelLayout("", program="hf-megatron")


def test_transformers_computes_the_logits_of_what_was_trained(daemon: RunningDaemon) -> None:
    """Trained in Megatron's fused tensors from scratch; the directory is a Hugging Face checkpoint, and training goes on
    from it bit for bit.
    """
    trainer = Trainer(0)
    options: dict[str, Any] = {"at": daemon.socket, "assets": [CONFIG], "layout": layout()}
    with Checkpointer.alone("programs-mcore", trainer.state, **options) as checkpointer:
        for number in range(3):
            trainer.step(number)
            checkpointer.save(number, wait="durable" if number == 2 else None)
        tokens = torch.randint(0, CONFIG.vocab_size, (2, 7))
        with torch.no_grad():
            expected = trainer.logits(tokens)
        for number in range(3, 5):
            trainer.step(number)
    directory = daemon.root / naming.checkpoint_path("programs-mcore", 2)
    loaded, problems = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert isinstance(loaded, LlamaForCausalLM) and not any(problems.values())
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    assert "program hf-megatron" in (directory / naming.MANIFEST).read_text()
    fresh = Trainer(1)
    with Checkpointer.alone("programs-mcore", fresh.state, **options) as checkpointer:
        assert checkpointer.restore() == 2
        for number in range(3, 5):
            fresh.step(number)
        for name, parameter in trainer.model.items():
            assert torch.equal(fresh.model[name], parameter), name
            for key, kept in trainer.optim.state[parameter].items():
                assert torch.equal(fresh.optim.state[fresh.model[name]][key], kept), (name, key)


def test_a_fine_tuned_model_keeps_its_names(daemon: RunningDaemon) -> None:
    """What transformers saved is trained in Megatron's tensors, and saved as transformers had it."""
    torch.manual_seed(5)
    source = LlamaForCausalLM(CONFIG)
    with Checkpointer.alone("hf-tuned", {"model": source}, at=daemon.socket, assets=[CONFIG]) as checkpointer:
        checkpointer.save(0, wait="durable")
    trainer = Trainer(7)
    with Checkpointer.alone("hf-tuned", trainer.state, at=daemon.socket, assets=[CONFIG], layout=layout()) as checkpointer:
        checkpointer.restore(0, groups=["model"])
        trainer.step(0)
        checkpointer.save(1, wait="durable", every={"optim": 5}, exclude=[])
        trainer.step(1)
        ticket = checkpointer.save(2, wait="durable", every={"optim": 5})
        assert "optim" not in ticket.groups
    for step in (1, 2):
        directory = daemon.root / naming.checkpoint_path("hf-tuned", step)
        again, problems = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        assert not any(problems.values()) and set(again.state_dict()) == set(source.state_dict())
    optim = torch.optim.AdamW(source.parameters(), lr=0.01)
    with Checkpointer.alone("hf-tuned", {"model": source, "optim": optim}, at=daemon.socket) as checkpointer:
        assert checkpointer.restore(1) == 1
    q = source.model.layers[0].self_attn.q_proj.weight
    fused = trainer.model["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert optim.state[q]["step"].item() == 1 and fused.shape == (64, 32)
    for index in json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]:
        assert index.startswith(("model.", "lm_head."))


def test_ranks_save_and_other_ranks_restore(daemon: RunningDaemon) -> None:
    """Tensor- and data-parallel ranks; the daemon compares replicas, and a world of another mesh goes on, as does one rank
    with the checkpoint's own names. Its groups are cut elsewhere, so each keeps its own learning rate.
    """
    whole, program = llama.arrays(), "hf-megatron"
    for mesh, other, step in [("tp=2,dp=2", "", 1), ("", "tp=2", 2)]:
        sizes = {"tp=2,dp=2": (2, 4), "tp=2": (2, 2), "": (1, 1)}
        tp, ranks = sizes[mesh]
        states = [training(local(program, tp, rank % tp), True) for rank in range(ranks)]
        options = {"layout": ParallelLayout(mesh, config=llama.CONFIG, program=program)}
        world = World(daemon, "programs-ranks", states, launch=f"from-{step}", **options)
        for rank in world.ranks if step > 1 else ():
            rank.goes_on_from(step - 1)
        assert world.save(step) == [None] * ranks
        world.close()
        plain = training(moved(whole), False)
        world = World(daemon, "programs-ranks", [plain], launch=f"plain-{step}")
        assert world.restore(keep=("optim/lr",)) == [step]
        check(plain, whole)
        world.close()
        tp, ranks = sizes[other]
        states = [training(moved(local(program, tp, rank)), False) for rank in range(ranks)]
        options = {"layout": ParallelLayout(other, config=llama.CONFIG, program=program)}
        world = World(daemon, "programs-ranks", states, launch=f"to-{step}", **options)
        assert world.restore(keep=("optim/lr",)) == [step] * ranks
        for rank, state in enumerate(states):
            check(state, local(program, tp, rank))
        world.close()


def test_what_cannot_be_saved_stages_nothing(daemon: RunningDaemon) -> None:
    """Refused at the first save, by statement and tensor: the run has no step of it."""
    text = "name = 'mine'\nfrom = 'a'\nto = 'b'\nstatements = 'a -> b, slice=[0:2]'\n"
    held = {"b": tensors({"b": np.ones(2, np.float32)})["b"]}
    cut = ParallelLayout("", program=text, config={})
    with Checkpointer.alone("programs-cut", {"model": held}, at=daemon.socket, layout=cut) as checkpointer:
        with pytest.raises(InvalidRequest, match=r"line 1, `a -> b, slice=\[0:2\]`: the elements outside a slice are lost"):
            checkpointer.save(1)
        assert checkpointer.restore() == 0


class Apart:
    """Query, key and value of one shape, which a checkpoint has as one tensor, with AdamW after a step."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "qkv"})
        self.optim = torch.optim.AdamW(self.model.parameters())
        self.model["q"](self.model["k"](self.model["v"](torch.randn(2, 4)))).sum().backward()
        self.optim.step()

    def checkpointer(self, daemon: RunningDaemon, run: str, statements: str) -> Checkpointer:
        state = {"model": self.model, "optim": self.optim}
        return Checkpointer.alone(run, state, at=daemon.socket, layout=ParallelLayout("", program=apart(statements)))


def apart(statements: str) -> str:
    return f"name = 'mine'\nfrom = 'fused'\nto = 'apart'\nstatements = '''\n{statements}\n'''"


@pytest.mark.parametrize("group", ["model", "optim"])
def test_another_order_of_equal_parts_is_refused(daemon: RunningDaemon, group: str) -> None:
    """Before anything changes, by a restore and by a shard; the error names the tensor and both orders."""
    first, second, run = Apart(1), Apart(2), f"apart-{group}"
    with first.checkpointer(daemon, run, "qkv.weight -> q.weight, k.weight, v.weight") as checkpointer:
        checkpointer.save(1, wait="durable")
    kept = [tensor.clone() for tensor in second.model.state_dict().values()]
    other = "qkv.weight -> k.weight, q.weight, v.weight"
    with (
        second.checkpointer(daemon, run, other) as checkpointer,
        pytest.raises(StateMismatch, match="qkv") as refused,
    ):
        checkpointer.restore(groups=(group,))
    assert "was saved as q.weight + k.weight + v.weight #" in refused.value.detail
    assert "would restore it as k.weight + q.weight + v.weight #" in refused.value.detail
    assert all(map(torch.equal, second.model.state_dict().values(), kept))
    with holdfast.open(f"{run}@1", root=daemon.root) as checkpoint:
        with pytest.raises(StateMismatch, match=r"as k\.weight \+ q\.weight"):
            checkpoint.shard("", rank=0, group=group, program=apart(other))
        assert checkpoint.shard("", rank=0, group=group, program=apart(other).replace("apart", "others"))
    alike = "qkv.weight -> rest, v.weight, sizes=[8,4]\nrest -> q.weight, k.weight"
    with second.checkpointer(daemon, run, alike) as checkpointer:
        assert checkpointer.restore() == 1
    for one, two in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, two) and torch.equal(first.optim.state[one]["exp_avg"], second.optim.state[two]["exp_avg"])


def test_fully_sharded_ranks(daemon: RunningDaemon) -> None:
    """torchtitan's names under FSDP2, by real ranks: the files have Hugging Face's tensors, and a fresh model goes on."""
    launch(2, "tests.client.program_fsdp", str(daemon.socket))
    directory = daemon.root / naming.checkpoint_path("fsdp", 1)
    found = {name: array for path in directory.glob("model*.safetensors") for name, array in load_file(path).items()}
    assert found.keys() == LLAMA.tensors.keys()
    for name, array in LLAMA.arrays().items():
        np.testing.assert_array_equal(found[name], array, name)


class Experts:
    """A small Mixtral with the names that transformers 5 has in memory, or those of the hub."""

    def __init__(self, fused: bool, seed: int) -> None:
        torch.manual_seed(seed)
        layer = "model.layers.0"
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (9, 4), "lm_head.weight": (9, 4)}
        if fused:
            shapes |= {f"{layer}.mlp.gate.weight": (2, 4), f"{layer}.mlp.experts.gate_up_proj": (2, 12, 4)}
            shapes |= {f"{layer}.mlp.experts.down_proj": (2, 4, 6)}
        else:
            moe = f"{layer}.block_sparse_moe"
            shapes |= {f"{moe}.gate.weight": (2, 4)}
            shapes |= {f"{moe}.experts.{one}.{part}.weight": (6, 4) for one in range(2) for part in ("w1", "w3")}
            shapes |= {f"{moe}.experts.{one}.w2.weight": (4, 6) for one in range(2)}
        self.model = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
        self.optim = torch.optim.AdamW(self.model.values(), lr=0.01)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim}

    def step(self) -> None:
        sum((value * (value + 1)).sum() for value in self.model.values()).backward()  # type: ignore[union-attr]
        self.optim.step()
        self.optim.zero_grad()


MIXTRAL = {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 2, "tie_word_embeddings": False}
MIXTRAL |= {"hidden_size": 4, "intermediate_size": 6, "vocab_size": 9, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize("fused", [True, False])
def test_experts_in_the_other_form(daemon: RunningDaemon, fused: bool) -> None:
    """A restore names the program; "auto" uses it, and saves go on in the checkpoint's form. Training is as it was."""
    run, first = f"experts-{fused}", Experts(not fused, 1)
    options: dict[str, Any] = {"at": daemon.socket, "assets": {"config.json": json.dumps(MIXTRAL).encode()}}
    with Checkpointer.alone(run, first.state, **options) as checkpointer:
        first.step()
        checkpointer.save(1, wait="durable")
        first.step()
        checkpointer.save(2, wait="durable")
    name = "hf-stacked-mixtral" if fused else "hf-stacked-mixtral-inverse"
    other = Experts(fused, 2)
    with (
        Checkpointer.alone(run, other.state, at=daemon.socket) as checkpointer,
        pytest.raises(StateMismatch, match="missing from the checkpoint") as refused,
    ):
        checkpointer.restore(1)
    assert f"layout=ParallelLayout('dp=1', program='{name}'), or program='auto'" in refused.value.hint
    with Checkpointer.alone(run, other.state, **options, layout=ParallelLayout("dp=1", program="auto")) as checkpointer:
        assert checkpointer.restore(1) == 1
        other.step()
        checkpointer.save(3, wait="durable")
    again = Experts(not fused, 3)
    with Checkpointer.alone(run, again.state, **options, layout=ParallelLayout("dp=1", program="auto")) as checkpointer:
        assert checkpointer.restore(3) == 3  # it has the live names
        checkpointer.save(4, wait="durable")
    for key, parameter in first.model.items():
        assert torch.equal(again.model[key], parameter), key
        assert torch.equal(again.optim.state[again.model[key]]["exp_avg"], first.optim.state[parameter]["exp_avg"])


def test_a_program_that_is_chosen_later(daemon: RunningDaemon) -> None:
    """Before a restore, saves have the live names, and they come back; a checkpoint of no known form is refused."""
    fresh = Experts(True, 1)
    options: dict[str, Any] = {"at": daemon.socket, "layout": ParallelLayout("dp=1", program="auto", config=MIXTRAL)}
    with Checkpointer.alone("experts-fresh", fresh.state, **options) as checkpointer:
        fresh.step()
        checkpointer.save(1, wait="durable")
        kept = {name: value.detach().clone() for name, value in fresh.model.items()}
        fresh.step()
        assert checkpointer.restore() == 1
        assert all(torch.equal(value, kept[name]) for name, value in fresh.model.items())
    renamed = {f"other.{name}": value for name, value in fresh.model.items()}
    with Checkpointer.alone("experts-fresh", {"model": renamed}, **options) as checkpointer:
        with pytest.raises(StateMismatch, match="missing") as refused:
            checkpointer.restore(groups=["model"])
        assert "program" not in refused.value.hint

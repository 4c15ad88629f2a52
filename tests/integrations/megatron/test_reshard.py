"""E2 and E3: what any parallel layout has saved, any other one continues, and `from_pretrained` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import holdfast
from tests.integrations.megatron import training
from tests.integrations.recording import digest
from tests.integrations.resuming import completed

SCRIPT = "tests.integrations.megatron.reshard"


class Layout(NamedTuple):
    """How many ranks, and the arguments that place them."""

    ranks: int
    arguments: tuple[str, ...] = ()


ONE, TP, PP, DP = Layout(1), Layout(2, ("--tp", "2")), Layout(2, ("--pp", "2")), Layout(2)
INTERLEAVED = Layout(2, ("--pp", "2", "--vpp", "2"))
EXPERTS = Layout(2, ("--ep", "2"))


def told(work: Path, layout: Layout, *more: str) -> dict[str, Any]:
    """What the script says that it did in this layout."""
    work.mkdir(parents=True)
    completed(SCRIPT, ["--dropout", "0", *layout.arguments, *more], work, layout.ranks)
    return dict(json.loads((work / "told.json").read_text()))


def contents(work: Path, run: str) -> dict[str, str]:
    """Digests of all whole tensors that train, as they are stored."""
    with holdfast.open(run, root=work) as checkpoint:
        return {
            f"{group}/{name}": digest(checkpoint.read(name, group=group, framework="torch"))
            for group, tensors in checkpoint.tensors.items()
            for name in tensors
            if group != "extra"
        }


def parallel(run: Path) -> dict[str, int]:
    """The layout that a run's checkpoint names; streams are restored into the same one only."""
    state = json.loads((run / "checkpoints" / "step-00000002" / "state.json").read_text())
    return dict(state["groups"]["extra"]["megatron"]["all"]["parallel"])


@pytest.mark.parametrize(
    ("saved", "loaded", "how"),
    [
        (TP, (ONE, PP), ()),
        (ONE, (TP,), ("--bias", "--qk-norm")),
        (DP, (ONE, TP), ("--distributed", "--bf16")),
        (PP, (ONE,), ("--distributed",)),
        (PP, (ONE,), ("--tied", "--bf16")),
        (INTERLEAVED, (Layout(1, ("--layers", "4")),), ("--distributed",)),
        (EXPERTS, (ONE,), ("--experts", "4", "--distributed")),
        (TP, (ONE,), ("--distributed", "--family", "llama")),
        (PP, (TP,), ("--family", "qwen3", "--qk-norm")),
    ],
    ids=str,
)
def test_another_layout_continues(saved: Layout, loaded: tuple[Layout, ...], how: tuple[str, ...], tmp_path: Path) -> None:
    """Whole tensors, full-precision copies and moments are bit-equal, and the next step has the same loss."""
    before = told(tmp_path / "first", saved, *how, "--steps", "2", "--save", str(tmp_path / "run"))
    stored = contents(tmp_path, "run")
    assert {name.split("/")[0] for name in stored} == {"model", "optim"} | ({"master"} if "--bf16" in how else set())
    for number, layout in enumerate(loaded):
        again = f"again-{number}"
        more = ("--load", str(tmp_path / "run"), "--save", str(tmp_path / again), "--seed", "99", "--before", str(number))
        after = told(tmp_path / again / "work", layout, *how, *more)
        assert contents(tmp_path, again) == stored
        for name in ("iteration", "operations", "consumed", "steps", "lr"):
            assert after[name] == before[name], name
        assert parallel(tmp_path / again)["world"] == layout.ranks
        assert after["loss"] == pytest.approx(before["loss"], abs=2e-3 if "--bf16" in how else 1e-5)


def test_tied_stages_with_the_distributed_optimizer_are_refused(tmp_path: Path) -> None:
    """The optimizers of the first and last stage cut the same embeddings in different places."""
    arguments = ["--pp", "2", "--tied", "--distributed", "--steps", "1", "--save", str(tmp_path / "run")]
    with pytest.raises(AssertionError, match="the first and the last pipeline stage"):
        completed(SCRIPT, arguments, tmp_path / "work", 4)
    assert not (tmp_path / "run").exists()


def test_stored_tensors_are_those_that_train(tmp_path: Path) -> None:
    """On one rank, where a parameter is what is stored, names and values are those of the live objects.

    Megatron's checkpoints call norms as those that Transformer Engine fuses with the layer behind them.
    """
    said = told(tmp_path / "work", ONE, "--steps", "2", "--save", str(tmp_path / "run"))
    stored = contents(tmp_path, "run")
    live = {_with_fused_norms(name): value for name, value in said["plain"].items()}
    assert {name: value for name, value in stored.items() if not name.endswith("/step")} == live


def _with_fused_norms(name: str) -> str:
    name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    return name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


@pytest.mark.parametrize(
    ("family", "layout", "how"),
    [
        ("llama", TP, ()),
        ("llama", PP, ("--distributed",)),
        ("qwen2", DP, ("--bias", "--distributed")),
        ("qwen3", TP, ("--qk-norm",)),
    ],
)
def test_transformers_loads_it(family: str, layout: Layout, how: tuple[str, ...], tmp_path: Path) -> None:
    """The model that `from_pretrained` makes of the directory has the loss that Megatron has."""
    from transformers import AutoModelForCausalLM

    said = told(tmp_path / "work", layout, *how, "--family", family, "--steps", "2", "--save", str(tmp_path / "run"))
    model, about = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "checkpoints" / "step-00000002", dtype=torch.float32, output_loading_info=True
    )
    assert not any(about[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), about
    data = torch.randint(
        training.VOCABULARY, (training.SAMPLES, training.LENGTH + 1), generator=torch.Generator().manual_seed(5)
    )
    epoch = torch.randperm(training.SAMPLES, generator=torch.Generator().manual_seed(0)).tolist()
    tokens = data[epoch[said["consumed"] : said["consumed"] + 4]]
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss) == pytest.approx(said["loss"], abs=1e-5)

"""Experts fused in memory and apart in files: both forms, by programs, as transformers 5 itself converts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast import Checkpointer, ParallelLayout
from holdfast_formats import naming
from holdfast_formats.programs import find
from tests.daemons import RunningDaemon
from tests.kit.commands import call
from tests.kit.daemons import own_daemon

pytestmark = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="version 4 has experts apart")

daemon = own_daemon(listen="none")

SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 20}
SMALL |= {"intermediate_size": 12, "max_position_embeddings": 32}
SPARSE = SMALL | {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": SMALL | {"num_local_experts": 3},
    "qwen2_moe": SPARSE | {"num_experts": 3, "shared_expert_intermediate_size": 8},
    "qwen3_moe": SPARSE | {"num_experts": 3, "head_dim": 4},
    "deepseek_v3": SPARSE | LATENT | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "glm4_moe": SPARSE | {"n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 4},
    "ernie4_5_moe": SPARSE | {"moe_num_experts": 3, "moe_k": 2, "moe_layer_start_index": 1},
}


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        rows = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways(daemon: RunningDaemon, tmp_path: Path, kind: str) -> None:
    """The hub's files are trained as transformers trains them; what is committed, it loads; an export is its own files."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **KINDS[kind], bos_token_id=None, eos_token_id=None, pad_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hub")
    did("import", tmp_path / "hub", f"{kind}@0", "--root", daemon.root)
    model = AutoModelForCausalLM.from_config(config)
    options = {"at": daemon.socket, "assets": [config], "layout": ParallelLayout("dp=1", program="auto")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Checkpointer.alone(kind, {"model": model, "optim": optimizer}, **options) as checkpointer:
        checkpointer.restore(groups=["model"])
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
        assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in model.state_dict().items())
        reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
        assert trained(model, optimizer, range(3)) == trained(theirs, reference, range(3))
        checkpointer.save(3, wait="durable")
    theirs.save_pretrained(tmp_path / "trained")
    same_model(daemon.root / naming.checkpoint_path(kind, 3), theirs)
    live = f"{kind}-live"
    with Checkpointer.alone(live, {"model": theirs}, at=daemon.socket, assets=[config]) as checkpointer:
        checkpointer.save(3, wait="durable")
    same_model(daemon.root / naming.checkpoint_path(live, 3), theirs)
    back = f"{find('hf', 'hf-stacked', config.to_dict()).name}-inverse"
    did("export", f"{live}@3", tmp_path / "out", "--as", "hf", "--program", back, "--root", daemon.root)
    wanted = load_file(tmp_path / "trained" / "model.safetensors")
    found = {name: value for file in (tmp_path / "out").glob("*.safetensors") for name, value in load_file(file).items()}
    assert found.keys() == wanted.keys() and all(torch.equal(value, found[name]) for name, value in wanted.items())


def did(*command: object) -> None:
    result = call(*command)
    assert result.exit_code == 0, result.output


def same_model(directory: Path, theirs: Any) -> None:
    loaded, problems = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(problems.values())
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in theirs.state_dict().items())

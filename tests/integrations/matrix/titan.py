"""torchtitan's Trainer: with the manager under torchtitan's names, and with `Named` under Hugging Face's.

Queries, keys and values are apart, and the rotary embedding is the one of Transformers: with `ComplexRoPE` the rows of
queries and keys stand in another order, and with `fuse_qkv` in one tensor, which no names express.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from tests.integrations.torchtitan import tiny as titan

# isort: split
import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3StateDictAdapter, _build_llama3_layers
from torchtitan.trainer import Trainer

from holdfast import Checkpointer, Named
from holdfast.integrations.torchtitan import HoldfastCheckpointManager
from tests.integrations.matrix import acts, tiny

OWN = "-in-its-own-names"


def model_config() -> Any:
    """The llama3 of torchtitan with the sizes of the Llama."""
    made = titan.model_config()
    width, heads = tiny.CONFIG["hidden_size"], tiny.CONFIG["num_attention_heads"]
    layers = _build_llama3_layers(
        n_layers=tiny.CONFIG["num_hidden_layers"], dim=width, n_heads=heads,
        n_kv_heads=tiny.CONFIG["num_key_value_heads"], hidden_dim=tiny.CONFIG["intermediate_size"], fuse_qkv=False,
        rope=CosSinRoPE.Config(dim=width // heads, max_seq_len=tiny.LENGTH, theta=tiny.CONFIG["rope_theta"]),
        attn_backend="flex",
    )  # fmt: skip
    for layer in layers:  # flex_attention is to be compiled, which takes too long
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return dataclasses.replace(made, layers=layers)


def huggingface(config: Any) -> dict[str, str]:
    """Hugging Face's name of each tensor of torchtitan's, out of torchtitan's own table."""
    table = Llama3StateDictAdapter(config, None).from_hf_map
    numbers = range(tiny.CONFIG["num_hidden_layers"])
    return {own.format(number): hf.format(number) for hf, own in table.items() if own is not None for number in numbers}


class Titan:
    """A Trainer of torchtitan's, on FSDP2."""

    def __init__(self, system: str, chosen: argparse.Namespace, seed: int) -> None:
        self.chosen, self.seed = chosen, seed
        self.config = model_config()
        self.made: Any = None

    def _build(self, run: str, **more: Any) -> Any:
        options: dict[str, Any] = {"enable": True, "run": run, "at": str(self.chosen.root), "folder": run}
        options |= {"interval": tiny.STEPS, "last_save_model_only": False, **more}
        config = titan.trainer_config(self.chosen.work, tiny.STEPS, HoldfastCheckpointManager.Config(**options))
        config.model_spec = dataclasses.replace(config.model_spec, model=self.config)
        config.debug.seed = self.seed
        made = Trainer(config)
        for module in (module for part in made.model_parts for module in part.modules()):
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo can do no other
        return made

    def _checkpointer(self, run: str) -> Checkpointer:
        model = Named(self.made.model_parts, rename=huggingface(self.config))
        state = {"model": model, "optim": self.made.optimizers}
        return Checkpointer(run, state, at=self.chosen.root, assets={"config.json": tiny.CONFIG})

    def train(self) -> None:
        """A Trainer trains and saves in one call: see `save`."""

    def save(self, run: str) -> None:
        if self.made is None:
            self.made = self._build(run + OWN)
            self.made.train()
            self.made.close()
        with self._checkpointer(run) as checkpointer:
            checkpointer.save(tiny.STEPS, wait="durable")

    def load(self, run: str, saved_by: str) -> None:
        if saved_by == "titan":
            self.made = self._build(run + OWN, load_only=True)
            assert self.made.checkpointer.load() and self.made.step == tiny.STEPS
            self.made.close()
            return
        self.made = self._build("none", enable=False)
        with self._checkpointer(run) as checkpointer:
            assert checkpointer.restore(groups=("model", "optim")) == tiny.STEPS

    def loss(self) -> float:
        tokens = tiny.rows(0)
        with torch.no_grad():
            logits = self.made.model_parts[0](tokens[:, :-1])
            return float(tiny.loss_of(logits.full_tensor() if hasattr(logits, "full_tensor") else logits, tokens))


if __name__ == "__main__":
    acts.main(Titan)

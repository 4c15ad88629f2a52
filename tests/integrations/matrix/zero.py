"""DeepSpeed's engines with the adapter: ZeRO-1 and ZeRO-3."""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaForCausalLM  # noqa: F401 - not first under zero.Init, which replaces constructors

from holdfast.integrations import deepspeed as holdfast_deepspeed
from tests.integrations.deepspeed import engines
from tests.integrations.matrix import acts, tiny

OF_DEEPSPEED = ("zero1", "zero3")


class Zero:
    """Transformers' Llama under an engine."""

    def __init__(self, system: str, chosen: argparse.Namespace, seed: int) -> None:
        self.chosen, self.stage, self.seed = chosen, int(system[-1]), seed
        self.engine = engines.engine(engines.config(self.stage), seed, model=lambda: tiny.llama(seed))

    def train(self) -> None:
        for number in range(1, tiny.STEPS + 1):
            tokens = tiny.rows(number)
            self.engine.backward(tiny.loss_of(self.engine(tokens[:, :-1]).logits, tokens))
            self.engine.step()

    def save(self, run: str) -> None:
        holdfast_deepspeed.attach(self.engine, run, at=self.chosen.root)
        assert self.engine.global_steps == tiny.STEPS
        assert self.engine.save_checkpoint(str(self.chosen.work / "saves" / run))
        self._part()

    def load(self, run: str, saved_by: str) -> None:
        holdfast_deepspeed.attach(self.engine, run, at=self.chosen.root)
        path, _ = self.engine.load_checkpoint(
            str(self.chosen.work / "saves" / run), load_module_strict=saved_by in OF_DEEPSPEED
        )
        assert path is not None and self.engine.global_steps == tiny.STEPS
        self._part()

    def _part(self) -> None:
        """An engine has one run: to go on in another one, as no program does, it forgets that."""
        holdfast_deepspeed.checkpointer_of(self.engine).close()
        delattr(self.engine, holdfast_deepspeed._ATTACHED)

    def loss(self) -> float:
        tokens = tiny.rows(0)
        with torch.no_grad():
            return float(tiny.loss_of(self.engine(tokens[:, :-1]).logits, tokens))


if __name__ == "__main__":
    acts.main(Zero)

"""Megatron with the adapter, which stores the weights under Hugging Face's names: two tensor times two pipeline ranks."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from holdfast.integrations.megatron import close, configure, load_checkpoint, save_checkpoint
from tests.integrations.matrix import acts, tiny
from tests.integrations.megatron import training

_parallel = ExitStack()  # Megatron's process groups, which are made once


class Megatron:
    """Megatron's GPT with the sizes of the Llama."""

    def __init__(self, system: str, chosen: argparse.Namespace, seed: int) -> None:
        words = ["--work", str(chosen.work), "--tp", "2", "--pp", "2", "--layers", str(tiny.CONFIG["num_hidden_layers"])]
        self.args = training.parser().parse_args([*words, "--dropout", "0", "--seed", str(seed), "--distributed"])
        if not torch.distributed.is_initialized():
            _parallel.enter_context(training.parallel(self.args))
        torch.manual_seed(seed)
        self.root = chosen.root
        self.made = training.build(self.args)

    def train(self) -> None:
        for number in range(1, tiny.STEPS + 1):
            training.step(self.made, number)

    def save(self, run: str) -> None:
        self.args.save = str(self.root / run)
        configure(args=self.args, huggingface=tiny.CONFIG)
        save_checkpoint(tiny.STEPS, *self.made[:3], 7.0).result()
        close()

    def load(self, run: str, saved_by: str) -> None:
        self.args.load, self.args.save = str(self.root / run), None
        configure(args=self.args, huggingface=tiny.CONFIG)
        iteration, _ = load_checkpoint(*self.made[:3], strict=saved_by == "megatron")
        assert iteration == tiny.STEPS
        close()

    def loss(self) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward(batches: Any, model: Any, *_: Any) -> tuple[Any, Any]:
            tokens = next(batches)
            positions = torch.arange(tiny.LENGTH).unsqueeze(0)
            mask = torch.ones(1, 1, tiny.LENGTH, tiny.LENGTH, dtype=torch.bool).triu(1)
            output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
            return output, partial(lambda loss: (loss.mean(), {"loss": loss.detach().mean()}))

        found = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(tiny.rows(0).split(1)), model=self.made.model[0],
            num_microbatches=4, seq_length=tiny.LENGTH, micro_batch_size=1, forward_only=True,
        )  # fmt: skip
        told = torch.tensor([sum(float(one["loss"]) for one in found) / 4 if found else 0.0])
        torch.distributed.all_reduce(told)  # the two tensor ranks of the last stage have it
        return float(told) / 2


if __name__ == "__main__":
    acts.main(Megatron)
    _parallel.pop_all()

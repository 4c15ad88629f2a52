"""Saves and restores one state in every kind of engine, in FSDP2 and in one process: the script of E2.

Arguments are actions: `make:KIND:RUN` trains and saves, `read:KIND:RUN` restores into another one of that kind, and compares
all whole tensors with those that `make` left behind. KIND is fsdp2, plain, or a stage and a type, such as 3-bf16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from holdfast import Checkpointer
from holdfast.integrations import deepspeed as holdfast_deepspeed
from tests.integrations.deepspeed import engines
from tests.integrations.recording import digest


class Engine:
    """An engine of DeepSpeed."""

    def __init__(self, kind: str, run: str, work: Path, seed: int) -> None:
        stage, _, dtype = kind.partition("-")
        self.made = engines.engine(engines.config(int(stage), dtype or "fp32"), seed)
        holdfast_deepspeed.attach(self.made, run, at=work / "checkpoints")
        self.saves = work / "saves" / run

    def step(self, rows: torch.Tensor) -> None:
        engines.step(self.made, rows)

    def save(self) -> None:
        assert self.made.save_checkpoint(self.saves, client_state={"word": "said"}) is True
        holdfast_deepspeed.checkpointer_of(self.made).close()

    def restore(self, foreign: bool) -> int:
        path, client_state = self.made.load_checkpoint(self.saves, load_module_strict=not foreign)
        assert path is not None and client_state == ({} if foreign else {"word": "said"})
        return int(self.made.global_steps)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = engines.tensors(self.made)
        return {name: value for name, value in found.items() if not name.endswith("/master") or value is not None}


class Plain:
    """A torch optimizer over whole parameters, or over those of FSDP2."""

    def __init__(self, kind: str, run: str, work: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = engines.Net()
        if kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for part in (self.model.mix, self.model.out):
                fully_shard(part)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(engines.groups(self.model), lr=1e-2, weight_decay=0.01)
        state = {"model": self.model, "optim": self.optimizer}
        self.checkpointer = Checkpointer(run, state, at=work / "checkpoints")

    def step(self, rows: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(rows).backward()
        self.optimizer.step()

    def save(self) -> None:
        self.checkpointer.save(4, wait="durable")
        self.checkpointer.close()

    def restore(self, foreign: bool) -> int:
        return self.checkpointer.restore(groups=("model", "optim"))

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {**self.model.state_dict(), **engines.moments(self.model, self.optimizer)}
        return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


def kind_of(kind: str) -> Any:
    return Plain if kind in ("plain", "fsdp2") else Engine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path)
    parser.add_argument("actions", nargs="+")
    chosen = parser.parse_args()
    engines.engine(engines.config(0))  # initialises torch.distributed
    for action in chosen.actions:
        what, kind, run = action.split(":")
        if kind == "fsdp2" or torch.distributed.get_world_size() == 1 or kind != "plain":
            act(what, kind, run, chosen.work)


def act(what: str, kind: str, run: str, work: Path) -> None:
    one = kind_of(kind)(kind, run, work, seed=0 if what == "make" else 7)
    told = work / f"{run}.json"
    first = torch.distributed.get_rank() == 0
    if what == "make":
        for number in range(4):
            one.step(torch.randint(0, engines.VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(number)))
        one.save()
        digests = {name: digest(value) for name, value in one.tensors().items()}
        if first:
            told.write_text(json.dumps({"kind": kind, "digests": digests}))
        torch.distributed.barrier()
        return
    saved = json.loads(told.read_text())
    assert one.restore(kind_of(saved["kind"]) is not kind_of(kind)) == 4
    digests = {name: digest(value) for name, value in one.tensors().items()}
    common = digests.keys() & saved["digests"].keys()
    assert {"embed.weight", "out.bias/exp_avg_sq", "seen"} <= common, sorted(digests)
    wrong = [name for name in common if digests[name] != saved["digests"][name]]
    assert not wrong, f"{what} {kind} of {saved['kind']}: {wrong}"
    one.step(torch.randint(0, engines.VOCABULARY, (4, 7)))  # which needs all of the optimizer
    if first:
        with (work / "done.txt").open("a") as file:
            file.write(f"{saved['kind']} {torch.distributed.get_world_size()} {kind}\n")


if __name__ == "__main__":
    main()

"""Ranks that train with DeepSpeed for the test of imports: from the beginning with a save of DeepSpeed's own on the way, or
from a run of Holdfast. Each writes its losses, and rank 0 all tensors at the end.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

from holdfast.integrations import deepspeed as holdfast_deepspeed
from tests.integrations.deepspeed import engines

FIRST, STEPS = 6, 26


def rows(step: int) -> torch.Tensor:
    """A batch of this step and rank; its dropout follows from both, too, because DeepSpeed saves no random streams."""
    torch.manual_seed(step * 8 + int(os.environ["RANK"]))
    return torch.randint(engines.VOCABULARY, (4, 6))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--saves", type=Path, required=True)
    parser.add_argument("--root", help="of the run that is gone on from")
    parser.add_argument("--run")
    parser.add_argument("--told", type=Path, required=True)
    chosen = parser.parse_args()
    engine = engines.engine(engines.config(chosen.stage, chosen.kind))
    client_state = None
    if chosen.root:
        holdfast_deepspeed.attach(engine, chosen.run, at=chosen.root)
        _, client_state = engine.load_checkpoint(chosen.saves)
    began, losses = engine.global_steps, []
    while engine.global_steps < STEPS:
        engine.module.seen.zero_()  # a buffer that ranks have of their own, of which DeepSpeed saves that of rank 0
        losses.append(engines.step(engine, rows(engine.global_steps)))
        if engine.global_steps == FIRST and not chosen.root:
            engine.save_checkpoint(chosen.saves, client_state={"epoch": 2})
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    told = {"began": began, "losses": losses, "client_state": client_state, "rates": rates, "samples": engine.global_samples}
    chosen.told.with_name(f"{chosen.told.name}-{engine.global_rank}.json").write_text(json.dumps(told))
    found = engines.tensors(engine)
    if engine.global_rank == 0:
        torch.save(found, chosen.told.with_suffix(".pt"))


if __name__ == "__main__":
    main()

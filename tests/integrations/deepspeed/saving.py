"""Ranks that train with plain DeepSpeed and save, for the tests of imports."""

from __future__ import annotations

import os
import sys

import torch
from deepspeed import comm

from tests.integrations.deepspeed import engines

STEPS = 3


def main(directory: str, stage: str, kind: str) -> None:
    engine = engines.engine(engines.config(int(stage), kind))
    for step in range(STEPS):
        torch.manual_seed(step)
        rows = torch.randint(engines.VOCABULARY, (4, 6), generator=torch.manual_seed(step * 8 + int(os.environ["RANK"])))
        engines.step(engine, rows)
    engine.save_checkpoint(directory, client_state={"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}})
    found = engines.tensors(engine)
    if comm.get_rank() == 0:
        torch.save(found, f"{directory}/../engine.pt")
    comm.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])

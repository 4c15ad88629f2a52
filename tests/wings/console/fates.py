"""A tiny trainer that meets its fate: `python -m tests.wings.console.fates SOCKET RUN FATE`, where the fate is one of

goes-on, until it is ended; finishes, after six saves; hangs, after six saves; nan, in its weights, from the fifth save on.
"""

from __future__ import annotations

import sys
import time

import torch

from holdfast import Checkpointer

STEPS, SAVE_S = 10, 0.8
BEFORE = 6  # saves, then fate strikes
NAN_AT = 5 * STEPS


def main(socket: str, run: str, fate: str) -> None:
    state = {"model": {"layers.0.weight": torch.ones(64, 8), "lm_head.weight": torch.linspace(-1, 1, 512).reshape(8, 64)}}
    with Checkpointer(run, state, at=socket) as checkpointer:
        step = checkpointer.restore()
        while fate != "finishes" or step < BEFORE * STEPS:
            step += STEPS
            state["model"]["layers.0.weight"] += 0.01 * step
            if fate == "nan" and step >= NAN_AT:
                state["model"]["lm_head.weight"][0, :3] = float("nan")
            checkpointer.save(
                step, metrics={"loss": 5.0 / (1 + step / 40) + step % 30 / 100, "accuracy": step / (step + 90)}
            )
            time.sleep(SAVE_S)
            if fate == "hangs" and step >= BEFORE * STEPS:
                time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:4])

"""What a worker of the matrix does: it trains and saves, or loads what others have saved and saves that as it has it.

A worker is a module with a class that follows `System`; it is started as one rank of a world, by `worlds.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from holdfast_formats.errors import CheckpointError

OTHER_SEED = 99  # of a model that loads: nothing that it has by itself is what was saved


class System(Protocol):
    """A model with its optimizer in one system, on this rank."""

    def train(self) -> None:
        """Make two steps."""

    def save(self, run: str) -> None:
        """Save everything as step 2 of a run, and return when it is committed."""

    def load(self, run: str, saved_by: str) -> None:
        """Restore step 2 of a run that a system of this name has saved."""

    def loss(self) -> float:
        """The mean loss of the rows of `tiny.rows(0)`."""


def main(make: Callable[[str, argparse.Namespace, int], System]) -> None:
    """Run the acts of the command line: `save:RUN:SEED`, or `load:RUN:SAVED_BY:AGAIN` as often as wanted.

    Rank 0 writes what became of each act to `told.json`: the loss, or the error that names what is refused.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--system", required=True)
    parser.add_argument("acts", nargs="+")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    for act in chosen.acts:
        what, run, *more = act.split(":")
        one = make(chosen.system, chosen, int(more[0]) if what == "save" else OTHER_SEED)
        try:
            if what == "save":
                one.train()
                one.save(run)
            else:
                one.load(run, more[0])
                one.save(more[1])
            told[act] = one.loss()
        except CheckpointError as error:
            told[act] = f"{type(error).__name__}: {error}"
        (chosen.work / f"told-{rank()}.json").write_text(json.dumps(told))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def rank() -> int:
    """This rank's number."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

"""A rank of the lane of random deaths: a Checkpointer over a module and AdamW, whose numbers follow from launch and step.

    mayhem_rank.py ROOT RUN LAUNCH PLAN

PLAN is JSON: `restore` (`{}`, `{"step": N}` or `{"healthy": true}`), `saves` (how many steps), `partial` (each so many
steps only the model is saved), `nan` (a step, counted from the restored one, with a NaN), `pause_s`, `keep`. Lines:
`restored STEP LAUNCH NAN`, `wrong WHAT`, `saved STEP SECONDS KIND`, `slow STEP SECONDS WHERE`, `committed STEP`,
`failed STEP CODE TEXT`, `refused CODE TEXT`, `done`. WHERE is what the rank waited for: our innermost calls.
"""

from __future__ import annotations

import faulthandler
import json
import re
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from holdfast import Checkpointer
from holdfast.tickets import SaveTicket
from holdfast_formats.errors import CheckpointError

WIDTH, LAYERS = 96, 3
SLOW_S = 0.05  # the bar for save()
SHOWN = 3  # calls of our own, the innermost
_lock = threading.Lock()


def say(*words: object) -> None:
    """One line, whole, from whichever thread."""
    with _lock:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()


def content(launch: int, step: int, name: str, like: torch.Tensor) -> torch.Tensor:
    """What a tensor holds at a step of a launch."""
    seed = zlib.crc32(f"{launch}/{step}/{name}".encode())
    return torch.rand(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


class Training:
    """A module, its optimizer, and which launch and step they are of."""

    def __init__(self) -> None:
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = {"model": self.model, "optim": self.optimizer, "tag": {"launch": 0, "step": 0}}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that trains, by name."""
        found = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                if parameter in self.optimizer.state:
                    found[f"{name}/{key}"] = self.optimizer.state[parameter][key]
        return found

    def step(self, launch: int, step: int) -> None:
        """A step of the optimizer, as training does it."""
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    @torch.no_grad()
    def fill(self, launch: int, step: int, nan: bool) -> None:
        """Give every tensor what it holds at this step."""
        for name, tensor in self.tensors().items():
            tensor.copy_(content(launch, step, name, tensor))
        if nan:
            self.model[0].weight[0, 0] = float("nan")
        self.state["tag"] = {"launch": launch, "step": step, "nan": nan}

    def differing(self) -> list[str]:
        """Names of the tensors that are not of the launch and step that the state claims to be of."""
        tag = dict(self.state["tag"])  # type: ignore[call-overload]
        before = {name: tensor.clone() for name, tensor in self.tensors().items()}
        self.fill(tag["launch"], tag["step"], tag.get("nan", False))
        wrong = [
            name for name, was in before.items() if not torch.equal(was.nan_to_num(9), self.tensors()[name].nan_to_num(9))
        ]
        return wrong + ([] if len(before) == 6 * LAYERS else [f"{len(before)} tensors"])


@contextmanager
def watched(step: int) -> Iterator[None]:
    """A line `slow` if a save takes longer than `SLOW_S`, with where this thread stood then.

    faulthandler writes that without making a Python object: `sys._current_frames` can hang the process on Python 3.10 and
    3.11 (CPython's issue 106883).
    """
    with tempfile.TemporaryFile(buffering=0) as stacks:
        faulthandler.dump_traceback_later(SLOW_S, file=stacks)
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        faulthandler.cancel_dump_traceback_later()
        if seconds > SLOW_S:
            stacks.seek(0)
            say("slow", step, f"{seconds:.3f}", innermost(stacks.read().decode(errors="replace")) or "?")


def innermost(stacks: str) -> str:
    """Our innermost calls in this thread."""
    stack = stacks.rpartition(f"Thread {threading.get_ident():#018x} ")[2].partition("\nThread ")[0]
    calls = re.findall(r'File ".*/holdfast\w*/(?:.*/)?(\w+)\.py", line \d+ in (\w+)', stack)
    return ">".join(f"{module}:{function}" for module, function in reversed(calls[:SHOWN]))


def report(ticket: SaveTicket) -> None:
    try:
        ticket.result()
    except CheckpointError as error:
        say("failed", ticket.step, error.code, error.detail.replace("\n", " "))
    else:
        say("committed", ticket.step)


def train(checkpointer: Checkpointer, training: Training, launch: int, plan: dict) -> None:
    """Restore as the plan says, prove what came, then save step after step."""
    step = checkpointer.restore(**plan["restore"])
    if step:
        wrong = training.differing()
        if wrong:
            say("wrong", step, training.state["tag"], wrong[:3])
    say("restored", step, training.state["tag"]["launch"], int(bool(training.state["tag"].get("nan"))))  # type: ignore[index]
    told: list[threading.Thread] = []
    for number in range(1, plan["saves"] + 1):
        training.step(launch, step + number)
        checkpointer.fence()
        training.fill(launch, step + number, number == plan.get("nan"))
        groups = ("model",) if plan["partial"] and number % plan["partial"] == 0 else None
        began = time.monotonic()
        with watched(step + number):
            ticket = checkpointer.save(step + number, groups=groups)
        say("saved", step + number, f"{time.monotonic() - began:.6f}", "part" if groups else "full")
        told.append(threading.Thread(target=report, args=(ticket,), daemon=True))
        told[-1].start()
        time.sleep(plan["pause_s"])
    for thread in told:
        thread.join()


def main() -> None:
    root, run, launch, plan_text = sys.argv[1:]
    torch.set_num_threads(1)
    training, plan = Training(), json.loads(plan_text)
    training.step(0, 0)  # an optimizer that has its state
    try:
        with Checkpointer(run, training.state, at=Path(root), keep_last=plan["keep"]) as checkpointer:
            train(checkpointer, training, int(launch), plan)
    except CheckpointError as error:
        say("refused", error.code, error.detail.replace("\n", " "))
        sys.exit(3)
    say("done")


if __name__ == "__main__":
    main()

"""How often a restore goes from one module to another: layers that only pass calls on would show here."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import holdfast
import holdfast_files
import holdfast_formats
from holdfast import Checkpointer
from holdfast.restore import fallback
from tests.daemons import running

CROSSINGS_MAX = 1500  # of 8 tensors; it was 1 336, and 1 160 without an optimizer
RETURNS_MAX = 15  # into another folder of the client, a pair of functions counted once
CLIENT, *FORMATS = [f"{Path(package.__path__[0])}/" for package in (holdfast, holdfast_files, holdfast_formats)]


class Calls:
    """Calls from one of our functions into another one, by any thread: both functions' modules, and the functions."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[Any, Any]]] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        module, caller = _module(frame), frame.f_back
        if event != "call" or not module:
            return
        while caller is not None and not _module(caller):
            caller = caller.f_back
        if caller is not None:
            self.calls.append((_module(caller), module, (caller.f_code, frame.f_code)))

    def __enter__(self) -> Calls:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    @property
    def crossings(self) -> int:
        return sum(caller != module for caller, module, _ in self.calls)

    @property
    def returns(self) -> int:
        """Calls into a folder of the client that was left before; a pair of functions counts once."""
        firsts = {pair: (str(Path(a).parent), str(Path(b).parent)) for a, b, pair in reversed(self.calls)}
        between = [
            callee for caller, callee in reversed(firsts.values()) if caller != callee and f"{callee}/".startswith(CLIENT)
        ]
        entries = [folder for before, folder in zip(["", *between], between, strict=False) if folder != before]
        return len(entries) - len(set(entries))


def _module(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    return name if name.startswith((CLIENT, *FORMATS)) else ""


def test_a_small_restore_crosses_few_boundaries(tmp_path: Path, monkeypatch: Any) -> None:
    """8 tensors: a weight, a bias, and two moments and a step of each, from the daemon's memory."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    with (
        running(tmp_path / "root") as daemon,
        Checkpointer("run", {"model": model, "optim": optimizer}, at=daemon.socket) as checkpointer,
    ):
        checkpointer.save(1, wait="durable")
        checkpointer.restore(1)
        with Calls() as whole:
            checkpointer.restore(1)
        load, loading = fallback.load, Calls()

        def observed(*arguments: Any) -> Any:
            with loading:
                return load(*arguments)

        monkeypatch.setattr(fallback, "load", observed)
        checkpointer.restore(1)
    assert 300 < whole.crossings <= CROSSINGS_MAX
    assert 3 < loading.returns <= RETURNS_MAX

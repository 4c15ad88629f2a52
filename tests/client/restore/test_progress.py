"""A restore that takes long shows a progress bar: on a terminal, by rank 0 alone."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from typing import Any

import pytest
import torch

from holdfast import Checkpointer
from holdfast.restore import load
from holdfast.terminal import console
from tests.daemons import RunningDaemon
from tests.kit.ranks import World

HIDES_CURSOR = "\x1b[?25l"  # as each bar does when it begins


class Output(io.StringIO):
    """What stderr gets; `shown` once a restore is named in it."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal, self.shown = terminal, threading.Event()

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        written = super().write(text)
        if "restore" in self.getvalue():
            self.shown.set()
        return written


@pytest.mark.parametrize(("terminal", "after_s"), [(True, 0.0), (True, 600.0), (False, 0.0)])
def test_a_restore_that_takes_long_shows_how_far_it_is(
    daemon: RunningDaemon,
    run: str,
    terminal: bool,
    after_s: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the step and the bytes. One line is logged, with a bar or without."""
    output, fill = Output(terminal), load.fill
    live = {"w": torch.ones(1000)}
    with Checkpointer(run, live, at=daemon.socket) as checkpointer:
        checkpointer.save(7, wait="durable")

        def long(*arguments: Any) -> Any:
            filled = fill(*arguments)
            assert not terminal or after_s or output.shown.wait(180)
            return filled

        monkeypatch.setattr(load, "fill", long)
        monkeypatch.setattr(console, "PROGRESS_AFTER_S", after_s)
        monkeypatch.setattr(sys, "stderr", output)
        monkeypatch.setenv("TERM", "xterm")
        with caplog.at_level(logging.INFO, "holdfast"):
            assert checkpointer.restore() == 7
    if terminal and not after_s:
        assert f"restore {run}@7" in output.getvalue() and re.search(r"([\d.]+)/\1 kB", output.getvalue())
    else:
        assert output.getvalue() == ""
    assert len([one for one in caplog.records if one.message.startswith(f"restored {run}@7")]) == 1


def test_one_rank_shows_it(daemon: RunningDaemon, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that share a terminal, rank 0."""
    output, fill = Output(terminal=True), load.fill
    world = World(daemon, run, [{"w": torch.ones(1000)}, {"w": torch.ones(1000)}])
    world.save(7)

    def long(*arguments: Any) -> Any:
        filled = fill(*arguments)
        assert output.shown.wait(180)
        return filled

    monkeypatch.setattr(load, "fill", long)
    monkeypatch.setattr(console, "PROGRESS_AFTER_S", 0.0)
    monkeypatch.setattr(sys, "stderr", output)
    monkeypatch.setenv("TERM", "xterm")
    assert world.restore() == [7, 7]
    world.close()
    assert output.getvalue().count(HIDES_CURSOR) == 1

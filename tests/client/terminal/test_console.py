"""Progress bars: on a terminal, for what takes long, and nowhere else."""

from __future__ import annotations

import pytest

from holdfast.terminal import console


@pytest.mark.parametrize(("terminal", "after_s", "shown"), [(True, 0.0, True), (True, 60.0, False), (False, 0.0, False)])
def test_a_bar_appears_for_what_takes_long(
    terminal: bool, after_s: float, shown: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And is removed at the end. Into a file or a pipe nothing is written."""
    monkeypatch.setattr(console, "PROGRESS_AFTER_S", after_s)
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    monkeypatch.setenv("TERM", "xterm")
    with console.progress("reading", 10, shown=True) as bar:
        bar.advance(bar.task_ids[0], 10)
        written = capfd.readouterr().err
        while shown and "reading" not in written:
            written += capfd.readouterr().err
    assert ("reading" in written + capfd.readouterr().err) is shown
    assert not bar.live.is_started

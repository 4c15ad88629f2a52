"""Shows how far a run is: a bar in a terminal, elsewhere a line for every checkpoint."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class RunProgress:
    """The progress of one launch of a run; shown while the block lasts."""

    def __init__(self, console: Console, run: str, steps: int, save_every: int) -> None:
        columns = (TextColumn("   {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        left = TextColumn("{task.fields[left]}")
        terminal = console.is_terminal
        self._bar = Progress(*columns, left, console=console, transient=True, disable=not terminal)
        self._task = self._bar.add_task(f"{run}: starting", total=steps, left="")
        self._console, self._run, self._steps, self._save_every = console, run, steps, save_every
        self._printed: int | None = None

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def show(self, step: int, left_s: float | None) -> None:
        """The run has done `step` steps; the whole demo takes `left_s` more, if known."""
        left = "" if left_s is None else f"demo: {left_s:.0f} s left"
        self._bar.update(self._task, description=self._run, completed=step, left=left)
        saved = step - step % self._save_every
        if self._printed is not None and saved > self._printed and not self._console.is_terminal:
            self._console.print(f"   step {saved} of {self._steps}")
        self._printed = saved

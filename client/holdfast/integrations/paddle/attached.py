"""A Paddle training and its `Checkpointer`."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from holdfast.checkpointer import Checkpointer
from holdfast.tickets import SaveTicket


class Attached:
    """Saves and restores a training. `checkpointer` has everything else, `state` the entries."""

    def __init__(self, run: str, state: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.state = state
        self.checkpointer = Checkpointer(run, state, **options)

    def save(self, step: int, **options: Any) -> SaveTicket:
        """Save the training after this step, as `Checkpointer.save` does."""
        return self.checkpointer.save(step, **options)

    def restore(self, step: int | None = None, **options: Any) -> int:
        """Restore the newest step, or this one; returns it, or 0 if there is none, as `Checkpointer.restore` does."""
        return self.checkpointer.restore(step, **options)

    def fence(self) -> None:
        """Return when the last save no longer reads the training, as `Checkpointer.fence` does; steps call it themselves."""
        self.checkpointer.fence()

    def close(self, wait: bool = True) -> None:
        """Wait for the saves, as `Checkpointer.close` does."""
        self.checkpointer.close(wait)

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(wait=error is None)

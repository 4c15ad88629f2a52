"""What a run asks of the library that its Trainer is of."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from holdfast.checkpointer import Checkpointer


class DataPosition(Protocol):
    """An entry of the state: where the data loader stands, with the random streams that matter there."""

    @property
    def reached(self) -> bool:
        """Whether the loader itself has installed all streams."""
        ...

    def epoch_begins(self) -> None: ...
    def forget(self) -> None: ...
    def watch(self, loader: object) -> None: ...
    def as_of(self, step: int) -> AbstractContextManager[None]: ...


class Framework(Protocol):
    """One Trainer, as its library has it. Each method is called on every rank."""

    @property
    def library(self) -> str: ...

    @property
    def own_files(self) -> tuple[str, ...]:
        """Files of which the library's own checkpoints have one."""
        ...

    @property
    def streams(self) -> DataPosition: ...

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` for what is not supported."""
        ...

    def check_repeat(self, step: int) -> None:
        """Raise `InvalidRequest` if the training cannot begin again in this process, from this step."""
        ...

    def live(self) -> dict[str, Any]:
        """The entries of the state: model, optimizer, scheduler, …"""
        ...

    def given(self) -> dict[str, Any]:
        """Options of the `Checkpointer` that follow from the Trainer's arguments."""
        ...

    def assets(self) -> list[Any]:
        """What belongs beside the weights in every checkpoint."""
        ...

    def groups(self) -> tuple[str, ...] | None:
        """The groups to save; None for all."""
        ...

    def before_save(self) -> None: ...

    def state_file(self) -> str:
        """The TrainerState as JSON."""
        ...

    def write_state(self, directory: Path, state: bytes) -> None:
        """Write it as the library reads it when training resumes."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def best_step(self) -> int | None: ...

    def restore_best(self, checkpointer: Checkpointer) -> None:
        """Restore the weights of the best step."""
        ...

    def reads_files(self) -> bool:
        """Whether something reads the checkpoint's directory as soon as it was saved."""
        ...

    def published(self, directory: Path) -> None:
        """The save is committed, if something reads it, and its link is in place."""
        ...

"""A root in a directory of this machine: its runs and checkpoints, by the names of their directories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.read.checkpoint_root import CheckpointRoot
from holdfast_formats import naming
from holdfast_formats.errors import NoSuchRun, StorageFailed
from holdfast_formats.near_names import did_you_mean

if TYPE_CHECKING:
    from holdfast.read.sources import Source


class DirectoryRoot(CheckpointRoot):
    """Reads a root directory directly."""

    parallel = 1

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def label(self) -> str:
        return str(self.path)

    def runs(self) -> list[str]:
        if not self.path.is_dir():
            raise StorageFailed(f"the directory {self.path} does not exist", hint="pass the daemon's directory as --root")
        names = sorted(path.parent.name for path in self.path.glob(f"*/{naming.CHECKPOINTS}") if path.is_dir())
        return [name for name in names if naming.is_run_name(name)]

    def steps(self, run: str) -> list[int]:
        directory = self.path / naming.check_run(run) / naming.CHECKPOINTS
        if not directory.is_dir():
            raise NoSuchRun(
                f"{self.path} has no run {run!r}", hint=did_you_mean(run, self.runs(), "`holdfast ls` lists the runs")
            )
        steps = (naming.parse_step_directory(path.name) for path in directory.iterdir())
        return sorted((step for step in steps if step is not None), reverse=True)

    def committed_steps(self, run: str) -> list[int]:
        return committed_steps(self.path, run)

    def published_steps(self, run: str) -> list[int]:
        return published_steps(self.path, run)

    def has(self, run: str, step: int) -> bool:
        return (self.path / naming.checkpoint_path(run, step)).is_dir()

    def source(self, run: str, step: int) -> Source:
        from holdfast.read.sources import DirectorySource  # with numpy, which completion does not wait for

        return DirectorySource(self.path / naming.checkpoint_path(run, step))

    def close(self) -> None:
        return None  # nothing is open


def committed_steps(root: Path, run: str) -> list[int]:
    """The steps with a committed directory, newest first; empty if the run does not exist."""
    directory = root / naming.check_run(run) / naming.CHECKPOINTS
    if not directory.is_dir():
        return []
    steps = (naming.parse_step_directory(entry.name) for entry in directory.iterdir() if (entry / naming.COMMIT).is_file())
    return sorted((step for step in steps if step is not None), reverse=True)


def published_steps(root: Path, run: str) -> list[int]:
    """Committed steps, and steps whose COMMIT is missing, newest first. Every published directory had a COMMIT (I1), so it
    was removed later, and reading the step reports that.
    """
    directory = root / naming.check_run(run) / naming.CHECKPOINTS
    entries = directory.iterdir() if directory.is_dir() else ()
    steps = (naming.parse_step_directory(entry.name) for entry in entries if (entry / naming.MANIFEST).is_file())
    return sorted({*committed_steps(root, run), *(step for step in steps if step is not None)}, reverse=True)

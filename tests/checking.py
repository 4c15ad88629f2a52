"""A root of small checkpoints with what checks them: the real catalog, control and checker, and no daemon."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from holdfast_formats import naming
from holdfast_formats.errors import Damaged
from holdfast_formats.rest import bodies
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.daemon.checking.checker import Checker
from holdfast_service.storage import PosixTier, stored_in
from tests.checkpoints import Built, build_root
from tests.databases import sqlite_url

RUN = "tiny"


class Checked:
    """The parts, and the checkpoints as they were built."""

    def __init__(self, root: Path, steps: tuple[int, ...]) -> None:
        self.root = root
        self.built: Mapping[tuple[str, int], Built] = build_root(root, {RUN: steps})
        self.tier = PosixTier(root)
        self.catalog = Catalog.open(sqlite_url(root / naming.CATALOG))
        self.control = Control(stored_in(self.tier), self.catalog, None)
        self.control.recovery.recover()
        self.checker = Checker(self.tier, self.control)

    def known(self, step: int) -> bodies.CheckpointInfo:
        return self.catalog.checkpoint(RUN, step)

    def path(self, step: int) -> Path:
        return self.root / naming.checkpoint_path(RUN, step)

    def events(self, kind: str) -> list[int | None]:
        """The steps of what happened of this kind, in order."""
        return [event.step for event in self.control.events.after(0, 1000, kind=kind)]

    def close(self) -> None:
        self.control.close()
        self.catalog.close()


@contextmanager
def checked_root(root: Path, steps: tuple[int, ...] = (1, 2, 3)) -> Iterator[Checked]:
    """Such a root for the length of a block."""
    made = Checked(root, steps)
    try:
        yield made
    finally:
        made.close()


class Copies:
    """Repairs files from copies of them, as a replica would."""

    def __init__(self, checked: Checked) -> None:
        self._paths = {step: checked.path(step) for _, step in checked.built}
        self._copies = {step: {p.name: p.read_bytes() for p in path.iterdir()} for step, path in self._paths.items()}
        self.asked: list[Damaged] = []

    def repair(self, run: str, step: int, error: Damaged) -> str | None:
        """The file that the error names, as it was."""
        self.asked.append(error)
        named = str(error.members["file"])
        pair = (naming.COMMIT, naming.MANIFEST)  # one vouches for the other: either may be the damaged one
        for name in pair if named in pair else (named,):
            made = self._paths[step].with_name(f"mended-{name}")
            made.write_bytes(self._copies[step][name])
            os.replace(made, self._paths[step] / name)
        return "replica copy"

"""A root with committed checkpoints, its catalog, and tiers beside it: what replicas and repairs work on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast_formats import naming
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints.replicas import listed
from holdfast_service.control.control import Control
from holdfast_service.daemon.copying.repair import Repairer
from holdfast_service.daemon.copying.replicas import Replicator, reached
from holdfast_service.daemon.copying.thinner import Thinner
from holdfast_service.storage import PosixTier, RootStorage, Tier, stored_in
from tests.checkpoints import Arrays, build_root
from tests.databases import sqlite_url

RUN = "tiny"


class CopiesWorld:
    """The real parts over real directories; workers are asked to `look` by the tests, and have no thread."""

    def __init__(
        self,
        directory: Path,
        steps: tuple[int, ...] = (5,),
        replicas: tuple[str, ...] = ("far",),
        arrays: Arrays | None = None,
    ) -> None:
        self.root = directory / "root"
        self.built = build_root(self.root, {RUN: steps}, arrays)
        self.tier = PosixTier(self.root)
        self.catalog = Catalog.open(sqlite_url(directory / "catalog.sqlite"))
        self.control = Control(stored_in(self.tier), self.catalog, None)
        self.control.recovery.recover()
        for step in steps:
            self.control.findings.sound(RUN, step)
        self.records = self.control.replicas
        self.replicators: dict[str, Replicator] = {}
        self.repairer = Repairer(self.control, lambda: reached(self.replicators))
        for name in replicas:
            self.add(name, PosixTier(directory / name))

    def add(self, name: str, tier: Tier, is_mine: Callable[[], bool] = lambda: True) -> Replicator:
        """A further directory to copy to."""
        return self.attach(name, stored_in(tier), is_mine)

    def attach(self, name: str, replica: RootStorage, is_mine: Callable[[], bool] = lambda: True) -> Replicator:
        """A further replica of any kind."""
        self.replicators[name] = Replicator(
            name,
            self.tier,
            lambda: replica,
            self.records,
            news=lambda seconds: False,
            mend=self.repairer.replica,
            is_mine=is_mine,
        )
        return self.replicators[name]

    def copy(self, name: str = "far") -> None:
        """Let a worker do all it has to do."""
        while self.replicators[name].run_once():
            pass

    def keep(self, **rules: Any) -> None:
        """Set a policy, and wait until it is applied."""
        self.control.rotation.set_policy(RUN, RetentionPolicy(**rules), "*")
        assert self.control.rotation.wait_until_applied()

    def thinner(self, **parts: Any) -> Thinner:
        return Thinner(self.control.store, self.control.thinning, **parts)

    def leftovers(self) -> list[str]:
        return [name for room in (naming.STAGING, naming.TRASH) for name in self.tier.list(f"{RUN}/{room}")]

    def states(self, step: int) -> dict[str, str]:
        """What is known of a checkpoint's copies, by tier."""
        return {replica.tier: replica.state for replica in listed(self.catalog.database, RUN, step)}

    def path(self, step: int = 5) -> Path:
        return self.root / naming.checkpoint_path(RUN, step)

    def events(self, kind: str) -> list[dict]:
        return [event.detail for event in self.control.events.after(0, 100, kind=kind)]

    def close(self) -> None:
        self.control.close()
        self.catalog.close()


@contextmanager
def copies_world(
    directory: Path,
    steps: tuple[int, ...] = (5,),
    replicas: tuple[str, ...] = ("far",),
    arrays: Arrays | None = None,
) -> Iterator[CopiesWorld]:
    """A world for the length of a block."""
    world = CopiesWorld(directory, steps, replicas, arrays)
    try:
        yield world
    finally:
        world.close()


def copies(steps: tuple[int, ...] = (5,), copied: bool = False, **more: Any) -> Any:
    """The fixture `world` of a module; `copied` when its replicas are to be complete."""

    @pytest.fixture
    def world(tmp_path: Path) -> Iterator[CopiesWorld]:
        with copies_world(tmp_path, steps, **more) as made:
            if copied:
                made.copy()
            yield made

    return world


def contents(directory: Path) -> dict[str, bytes]:
    """All files of a checkpoint."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}

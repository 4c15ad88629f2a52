"""Nodes of one root and one PostgreSQL in this process, each with what does its portions of checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast_formats import naming
from holdfast_formats.rest import bodies
from holdfast_service.daemon.checking.checker import Checker
from holdfast_service.daemon.checking.node_checks import WrittenSpan
from holdfast_service.storage import Tier
from holdfast_service.wings.cluster.distributed_checks import DistributedChecks
from holdfast_service.wings.cluster.shared_checks import SharedChecks
from tests.checkpoints import Built, build
from tests.daemons import wait_until
from tests.regressions.test_daemons_that_share_a_root import Node
from tests.wings.cluster.nodes import Nodes

RUN = "run"
WAIT_S = 180.0


class SpreadNode(Node):
    """A node that checks."""

    def __init__(self, nodes: Nodes, root: Path, name: str, seen: Callable[[Tier], Tier], ready: bool) -> None:
        super().__init__(nodes, root, name)
        self.heed: Callable[[int], None] = lambda size: None
        self.shared = SharedChecks(self.cluster.membership, self.control.findings)
        self.sees = seen(self.tier)
        self.checker = Checker(self.sees, self.control)
        self.spread: DistributedChecks | None = self.begun() if ready else None

    def begun(self) -> DistributedChecks:
        """Its thread, which it has from now on."""
        self.spread = DistributedChecks(self.sees, self.control, self.checker, self.shared, lambda size: self.heed(size))
        return self.spread

    def close(self) -> None:
        if self.spread is not None:
            self.spread.close()
        self.control.close()


class SpreadWorld:
    """The nodes, and checkpoints that the first one has committed."""

    def __init__(self, nodes: Nodes, root: Path) -> None:
        self._nodes, self._root = nodes, root
        self.all: list[SpreadNode] = []
        self.built: dict[int, Built] = {}

    def add(self, name: str, seen: Callable[[Tier], Tier] = lambda tier: tier, ready: bool = True) -> SpreadNode:
        made = SpreadNode(self._nodes, self._root, name, seen, ready)
        self.all.append(made)
        return made

    def path(self, step: int) -> Path:
        return self._root / naming.checkpoint_path(RUN, step)

    def commit(self, step: int, arrays: Mapping[str, np.ndarray[Any, Any]] | None = None) -> Built:
        """A checkpoint of 2 MiB stands there, and is listed."""
        held = {"model": dict(arrays or tensors(step))}
        built = build(self.path(step), held, run=RUN, step=step, extent_bytes=2**15, file_bytes_max=2**20)
        self.built[step] = built
        self.all[0].catalog.record_checkpoint(bodies.describe(built.manifest))
        return built

    def commit_again(self, step: int) -> None:
        """The same bytes, as if they had just been committed: nobody has checked them."""
        self.all[0].catalog.forget_checkpoint(RUN, step)
        self.all[0].catalog.record_checkpoint(bodies.describe(self.built[step].manifest))

    def begin(self, step: int, written: tuple[WrittenSpan, ...] = ()) -> str | None:
        """The first node has it checked by all, who hear of it."""
        assert self.all[0].spread is not None
        begun = self.all[0].spread.begin(RUN, step, written)
        for node in self.all:
            if node.spread is not None:
                node.spread.look()
        return begun

    def known(self, step: int) -> bodies.CheckpointInfo:
        return self.all[0].catalog.checkpoint(RUN, step)

    def ended(self, step: int) -> bodies.CheckpointInfo:
        """What is known of a step once its check has ended."""
        wait_until(lambda: not self.known(step).unchecked, WAIT_S)
        return self.known(step)

    def events(self, kind: str) -> list[int | None]:
        return [event.step for event in self.all[0].control.events.after(0, 1000, RUN, kind)]

    def close(self) -> None:
        for node in self.all:
            node.close()


def tensors(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Some that are one extent, and some that lie on several nodes."""
    chance = np.random.default_rng(step)
    long = {f"long.{n}": chance.standard_normal((300, 500)).astype(np.float32) for n in range(3)}
    return long | {f"short.{n}": chance.standard_normal(999).astype(np.float32) for n in range(60)}

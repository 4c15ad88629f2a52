"""Saves of a frozen base beside what is trained, with second copies, until all is done or it is killed: `ROOT STEPS`."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.read.directory_root import committed_steps
from holdfast_formats.lineage import Intent
from holdfast_service.daemon.checking.checker import Checker
from holdfast_service.daemon.copying.second_copier import SecondCopier
from holdfast_service.storage import PosixTier
from tests.daemon.frozen_training import Training
from tests.daemon.saver_world import RUN, SaverWorld, saver_world


def go_on(world: SaverWorld, root: Path, steps: int) -> Training:
    """Save so many steps after the newest one, each verified and, where that is due, copied."""
    world.control.recovery.recover()
    done = committed_steps(root, RUN) if (root / RUN).exists() else []
    for step in done:
        Checker(world.tier, world.control).check(RUN, step)
    newest = max(done, default=0)
    training, control = Training(world, root), world.control
    copier = SecondCopier(control.store, control.second_copies, control.readers)
    copier.run_once(RUN)
    for step in range(newest + 1, newest + 1 + steps):
        training.save(step, intent=Intent(restored=newest or None))
        copier.run_once(RUN)
    return training


if __name__ == "__main__":
    with saver_world(PosixTier(Path(sys.argv[1]))) as made:
        go_on(made, Path(sys.argv[1]), int(sys.argv[2]))

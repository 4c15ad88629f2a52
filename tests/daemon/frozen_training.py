"""A rank whose state has a frozen group beside what it trains, over a real saver and a directory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from holdfast_formats import naming
from holdfast_formats.lineage import NO_INTENT, Intent
from holdfast_formats.region import whole
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.daemon.checking.verifier import verify
from tests.daemon.saver_world import RUN, Rank, SaverWorld

BASE, ADAPTER = 300_000, 500
BASE_FILE, ADAPTER_FILE = "base.safetensors", "model.safetensors"


def noise(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


BASE_BYTES = noise(0, BASE)


class Training:
    """A rank with a frozen group of its own beside what it trains."""

    def __init__(self, world: SaverWorld, root: Path) -> None:
        self.world, self.root = world, root
        self.rank = self.launched()

    def launched(self) -> Rank:
        return self.world.launch(1, data_bytes=BASE + ADAPTER)[0]

    def save(
        self,
        step: int,
        base: np.ndarray = BASE_BYTES,
        frozen: bool = True,
        read_back: bool = True,
        intent: Intent = NO_INTENT,
    ) -> dict[str, float]:
        """Save a step, wait until it is read back, and return what was measured of it."""
        slot = self.rank.lease(step, intent=intent)
        held = [
            StagedFragment(TensorSpec("base", "w", "U8", (BASE,)), (whole((BASE,)),), 0, frozen=frozen),
            StagedFragment(TensorSpec("model", "a", "U8", (ADAPTER,)), (whole((ADAPTER,)),), BASE),
        ]
        self.rank.seal(step, slot, held, np.concatenate([base, noise(step, ADAPTER)]).data, intent)
        assert self.rank.wait(step).state == "committed"
        if read_back:
            self.world.checked()
        made = next(one for one in self.world.catalog.rounds.page(RUN).items if one.step == step)
        return made.measured or {}

    def path(self, step: int, file: str = BASE_FILE) -> Path:
        return self.root / naming.checkpoint_path(RUN, step) / file

    def inode(self, step: int) -> int:
        return self.path(step).stat().st_ino

    def is_whole(self, step: int, base: np.ndarray = BASE_BYTES) -> bool:
        """Every digest of the checkpoint is right, and its frozen tensor has these bytes."""
        made = verify(self.world.tier, naming.checkpoint_path(RUN, step))
        entry = made.tensors["base"]["w"]
        return self.path(step).read_bytes()[entry.start :] == base.tobytes()


def flip(path: Path, at: int = -1) -> None:
    """Change one bit where the file lies, as a failing disk does: nothing else of it changes."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

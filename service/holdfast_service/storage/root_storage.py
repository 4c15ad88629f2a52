"""The storage of one root, and how it is opened: the only module that knows which kind of storage a root has.

Everything above gets a `RootStorage` and asks `Records` and `Store`; `tier` is for what only a directory can do.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest

from .pacing import Pace
from .posix import PosixTier
from .posix_store import PosixStore
from .records import Records
from .store import Store
from .tier import Tier


class RootStorage(NamedTuple):
    """A root's control files and checkpoints. `records` reads the files of both."""

    records: Records
    store: Store
    tier: Tier | None  # the same root as a directory, if it is one

    def directory(self, why: str) -> Tier:
        """The root as a directory; `InvalidRequest` if it is none, since `why` needs one."""
        if self.tier is None:
            raise InvalidRequest(f"{why} needs a root that is a directory, and {self.records.label} is none")
        return self.tier


def stored_in(tier: Tier) -> RootStorage:
    """A root that is a directory."""
    return RootStorage(tier, PosixStore(tier), tier)


def tier_at(path: Path, pace: Pace | None = None, node: str = "") -> PosixTier:
    """A directory of this machine, which is made if it does not exist; as `PosixTier`."""
    return PosixTier(path, pace, node)

"""The storage of one root, and how a directory is opened as one; `objects/opening.py` opens a bucket.

Everything above gets a `RootStorage` and asks `Records` and `Store`; `tier` is for what only a directory can do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from holdfast_formats.errors import InvalidRequest

from .pacing import Pace
from .posix import PosixTier
from .posix_store import PosixStore
from .records import Records
from .store import Store
from .tier import Tier

if TYPE_CHECKING:
    from holdfast_files.objects.traffic import Traffic

    from .objects.lease import BucketLease

# What lets only one of two commits of a step stand: the rename of a directory, the bucket's conditional puts, or the catalog
# that daemons share; nothing, with --alone.
Arbiter = Literal["directory", "bucket", "catalog", "none"]
LOOK_S = 2.0  # between two looks at a directory


class Looks(NamedTuple):
    """How often a root is looked at for changes by others: after `every_s` of so many runs, in seconds. Without `at_files`
    only commits are compared: a look at files would be a request for each. `late` is whether names that another node has
    made or removed may be seen late, as clients of network file systems remember them.
    """

    every_s: Callable[[int], float]
    at_files: bool
    late: bool


DIRECTORY_LOOKS = Looks(lambda runs: LOOK_S, at_files=True, late=True)


def _nothing() -> None: ...


class RootStorage(NamedTuple):
    """A root's control files and checkpoints. `records` reads the files of both."""

    records: Records
    store: Store
    tier: Tier | None  # the same root as a directory, if it is one
    looks: Looks = DIRECTORY_LOOKS
    close: Callable[[], None] = _nothing
    lease: BucketLease | None = None  # of the only daemon of a bucket
    arbiter: Arbiter = "directory"
    presign: Callable[[str, int], str] | None = None  # of a bucket, by path and seconds
    traffic: Traffic | None = None  # requests to the bucket, also by the checkpoint that they are for

    def shared(self) -> RootStorage:
        """This root, once its mark says that daemons share it: that refuses others, so the lease is given back."""
        if self.lease is not None:
            self.lease.close()
        return self._replace(lease=None)

    def presigned(self, path: str, seconds: int) -> str:
        """A URL that reads a stored file for `seconds` without keys. It contains a signature, so it is never logged.

        `InvalidRequest` for a directory.
        """
        if self.presign is None:
            raise InvalidRequest(
                "files of a directory have no URL of their own", hint="leave out urls: only a root in a bucket has them"
            )
        return self.presign(path, seconds)

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

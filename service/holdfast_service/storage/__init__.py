"""Stored files and checkpoints: the interfaces `Tier` and `Store`, both on POSIX, and the tier in memory for tests."""

from .locking import RootLock, lock_root
from .memory import MemoryTier
from .once import read_once
from .posix import PosixTier
from .posix_store import PosixStore
from .snapshot import HubSnapshot
from .store import CommitContents, Publication, StagedCheckpoint, Store
from .tier import Buffer, FileWriter, Tier

__all__ = [
    "Buffer",
    "CommitContents",
    "FileWriter",
    "HubSnapshot",
    "MemoryTier",
    "PosixStore",
    "PosixTier",
    "Publication",
    "RootLock",
    "StagedCheckpoint",
    "Store",
    "Tier",
    "lock_root",
    "read_once",
]

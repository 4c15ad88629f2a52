"""Stored files and checkpoints: the interfaces `Records`, `Tier` and `Store`, on POSIX, and the tier in memory for tests."""

from .hub_snapshot import HubSnapshot
from .locking import RootLock, lock_root
from .memory import MemoryTier
from .posix import PosixTier
from .posix_store import PosixStore
from .records import Records
from .root_storage import Looks, RootStorage, stored_in, tier_at
from .staged_directory import StagedDirectory
from .store import CommitContents, Publication, StagedCheckpoint, StagedFiles, Store
from .tier import Buffer, FileIdentity, FileWriter, Tier
from .uncached_reads import read_once

__all__ = [
    "Buffer",
    "CommitContents",
    "FileIdentity",
    "FileWriter",
    "HubSnapshot",
    "Looks",
    "MemoryTier",
    "PosixStore",
    "PosixTier",
    "Publication",
    "Records",
    "RootLock",
    "RootStorage",
    "StagedCheckpoint",
    "StagedDirectory",
    "StagedFiles",
    "Store",
    "Tier",
    "lock_root",
    "read_once",
    "stored_in",
    "tier_at",
]

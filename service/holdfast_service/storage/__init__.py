"""Stored files: the Tier interface, the POSIX tier, and the tier in memory for tests."""

from .locking import RootLock, lock_root
from .memory import MemoryTier
from .posix import PosixTier
from .snapshot import HubSnapshot
from .tier import Buffer, FileWriter, Readable, Tier

__all__ = ["Buffer", "FileWriter", "HubSnapshot", "MemoryTier", "PosixTier", "Readable", "RootLock", "Tier", "lock_root"]

"""Where bytes rest: the Tier seam, the POSIX tier, and the tier in memory that tests use."""

from .locking import RootLock, lock_root
from .memory import MemoryTier
from .posix import PosixTier
from .snapshot import HubSnapshot
from .tier import Buffer, FileWriter, Readable, Tier

__all__ = ["Buffer", "FileWriter", "HubSnapshot", "MemoryTier", "PosixTier", "Readable", "RootLock", "Tier", "lock_root"]

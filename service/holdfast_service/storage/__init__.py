"""Where bytes rest: the Tier seam, the POSIX tier, and the tier in memory that tests use."""

from .locking import RootLock
from .memory import MemoryTier
from .posix import PosixTier, lock_root
from .tier import Buffer, FileWriter, Tier

__all__ = ["Buffer", "FileWriter", "MemoryTier", "PosixTier", "RootLock", "Tier", "lock_root"]

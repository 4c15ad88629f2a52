"""A keeper of descriptors without a process of its own."""

from __future__ import annotations

import os


class MemoryKeeper:
    """Keeps descriptors in this process, as long as the object lives."""

    place = "this process"

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def keep(self, name: str, fd: int) -> None:
        self.kept[name] = os.dup(fd)

    def drop(self, name: str) -> None:
        os.close(self.kept.pop(name))

    def take(self) -> list[tuple[str, int]]:
        return [(name, os.dup(fd)) for name, fd in self.kept.items()]

    def close(self) -> None:
        """Nothing: what is kept stays kept."""

"""Files staged in any directory, such as those of an export beside its target."""

from __future__ import annotations

from holdfast_formats.files import Files

from .tier import FileWriter, Tier


class StagedDirectory:
    """`StagedFiles` at `path` of a tier. A file's name may be a path below it."""

    def __init__(self, tier: Tier, path: str) -> None:
        self._tier, self.path = tier, path

    @property
    def files(self) -> Files:
        return self._tier

    def create(self, file: str, size: int) -> FileWriter:
        return self._tier.create(f"{self.path}/{file}", size)

    def put(self, file: str, data: bytes) -> None:
        self._tier.put(f"{self.path}/{file}", data)

    def drop(self, file: str) -> None:
        if self._tier.size(f"{self.path}/{file}") is not None:
            self._tier.remove_file(f"{self.path}/{file}")

    def clear(self) -> None:
        self._tier.remove_tree(self.path)

    def sync(self, file: str) -> None:
        self._tier.sync_directory(f"{self.path}/{file}".rpartition("/")[0])

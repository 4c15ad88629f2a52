"""A tier in memory: the fake of the interface, for tests of the code above it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast_formats.errors import AlreadyCommitted, InUse, InvalidRequest, NoSpace, NoSuchResource, StorageFailed
from holdfast_formats.files import split_leaf, split_path

from .records import has_bytes
from .tier import THE_DIRECTORY, Buffer, FileIdentity, check_range, octets

CAPACITY_BYTES = 2**40
_Path = tuple[str, ...]


class MemoryTier:
    """Files and directories in two tables. `acts` lists durable operations, in order, for tests of order (I3). `alignment`
    is what its files request from writers; nothing depends on it here.
    """

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES, alignment: int = 1) -> None:
        self.alignment = alignment
        self.acts: list[tuple[str, str]] = []
        self._capacity_bytes = capacity_bytes
        self._files: dict[_Path, bytearray] = {}
        self._directories: set[_Path] = {()}
        self._held: set[_Path] = set()
        self._changed = time.monotonic()
        self._lock = threading.RLock()

    @property
    def label(self) -> str:
        return THE_DIRECTORY

    def create(self, path: str, size: int) -> MemoryFile:
        if size < 0:
            raise InvalidRequest(f"{path}: a file of {size} bytes is not possible")
        return MemoryFile(self, path, self._add(path, bytearray(size)))

    def join(self, path: str, size: int) -> MemoryFile:
        if size < 0:
            raise InvalidRequest(f"{path}: a file of {size} bytes is not possible")
        with self._lock:
            data = self._files.get(tuple(split_path(path)))
            if data is None:
                return self.create(path, size)
        if len(data) != size:
            raise StorageFailed(f"{path}: something else exists there", path=path)
        return MemoryFile(self, path, data)

    def put(self, path: str, data: bytes) -> None:
        self._add(path, bytearray(data))
        self.acts.append(("file", path))

    def put_first(self, path: str, data: bytes) -> bool:
        with self._lock:
            if self.size(path) is not None:
                return False
            self.put(path, data)
        return True

    def swap(self, path: str, before: bytes | None, data: bytes) -> bool:
        with self.hold(f"{path}.lock"), self._lock:
            if not has_bytes(self, path, before):
                return False
            self.replace(path, data)
        return True

    def replace(self, path: str, data: bytes) -> None:
        parent, leaf = split_leaf(path)
        with self._lock:
            if (*parent, leaf) in self._directories:
                raise StorageFailed(f"{path} is a directory", path=path)
            self._make_directories(tuple(parent))
            self._check_room(len(data))
            self._files[(*parent, leaf)] = bytearray(data)
            self.note_change()
        self.acts += [("file", path), ("directory", "/".join(parent))]

    def sync_directory(self, path: str) -> None:
        if tuple(split_path(path)) not in self._directories:
            raise NoSuchResource(f"there is no directory {path}", path=path)
        self.acts.append(("directory", path))

    def publish(self, source: str, target: str) -> None:
        (here, leaf), (target_parent, new_leaf) = split_leaf(source), split_leaf(target)
        old, new = (*here, leaf), (*target_parent, new_leaf)
        with self._lock:
            if old in self._files:
                raise StorageFailed(f"{source} is not a directory", path=source)
            if old not in self._directories:
                raise NoSuchResource(f"there is no directory {source}", path=source)
            if new in self._directories or new in self._files:
                raise AlreadyCommitted(f"{target} exists already", path=target)
            self._make_directories(new[:-1])
            self._files = {_moved(path, old, new): data for path, data in self._files.items()}
            self._directories = {_moved(path, old, new) for path in self._directories}
        self.acts += [("rename", target), ("directory", "/".join(target_parent)), ("directory", "/".join(here))]

    def exchange(self, source: str, target: str) -> bool:
        old, new, aside = tuple(split_path(source)), tuple(split_path(target)), ("",)
        with self._lock:
            for path in (old, new):
                if path not in self._directories:
                    raise NoSuchResource(f"there is no directory {'/'.join(path)}", path="/".join(path))
            for here, there in ((old, aside), (new, old), (aside, new)):
                self._files = {_moved(path, here, there): data for path, data in self._files.items()}
                self._directories = {_moved(path, here, there) for path in self._directories}
        self.acts += [("exchange", target), ("directory", "/".join(new[:-1])), ("directory", "/".join(old[:-1]))]
        return True

    def supplant(self, source: str, target: str) -> None:
        (_, _), (parent, leaf) = split_leaf(source), split_leaf(target)
        with self._lock:
            held = self._file(source)
            if (*parent, leaf) in self._directories:
                raise StorageFailed(f"{target} is a directory", path=target)
            self._make_directories(tuple(parent))
            del self._files[tuple(split_path(source))]
            self._files[(*parent, leaf)] = held
        self.acts += [("rename", target), ("directory", "/".join(parent)), ("directory", "/".join(split_path(source)[:-1]))]

    def link(self, source: str, target: str) -> bool:
        held = self._file(source)
        if target == source:
            raise StorageFailed(f"{target} exists already", path=target)
        parent, leaf = split_leaf(target)
        with self._lock:
            if (*parent, leaf) in self._files or (*parent, leaf) in self._directories:
                raise StorageFailed(f"{target} exists already", path=target)
            self._make_directories(tuple(parent))
            self._files[(*parent, leaf)] = held
        return True

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if offset < 0 or (length or 0) < 0:
            raise InvalidRequest(f"{path}: {length} bytes at {offset} cannot be read")
        held = self._file(path)
        return bytes(held[offset:] if length is None else held[offset : offset + length])

    def read_into(self, path: str, offset: int, buffer: Buffer) -> int:
        view = octets(buffer)
        data = self.read(path, offset, view.nbytes)
        view[: len(data)] = data
        return len(data)

    def read_stored(self, path: str, offset: int, buffer: Buffer) -> int:
        return self.read_into(path, offset, buffer)

    def size(self, path: str) -> int | None:
        parent, leaf = split_leaf(path)
        held = self._files.get((*parent, leaf))
        return None if held is None else len(held)

    def list(self, path: str) -> list[str]:
        names = tuple(split_path(path))
        with self._lock:
            below = self._directories.union(self._files)
        return sorted(path[-1] for path in below if path and path[:-1] == names)

    def stamp(self, path: str) -> str:
        held = self._files.get(tuple(split_path(path)))
        return "" if held is None else f"{len(held):x}.{id(held):x}.{hashlib.sha256(held).hexdigest()[:32]}"

    def identities(self, path: str) -> dict[str, FileIdentity]:
        top = tuple(split_path(path))
        with self._lock:
            names = Counter(map(id, self._files.values()))
            return {
                at[-1]: FileIdentity(f"{id(data):x}", names[id(data)], len(data))
                for at, data in self._files.items()
                if at[:-1] == top
            }

    def stamps(self, path: str, names: Sequence[str]) -> dict[str, str]:
        top = tuple(split_path(path))
        texts = {}
        for below in ("", *self.list(path)):
            directory = (*top, below) if below else top
            held = [self._files.get((*directory, name)) for name in names]
            if directory in self._directories and None not in held:
                texts[below] = " ".join(hashlib.sha256(data or b"").hexdigest()[:32] for data in held)
        return texts

    def remove_file(self, path: str) -> None:
        self._file(path)
        with self._lock:
            self._files.pop(tuple(split_path(path)), None)

    def is_empty(self, path: str) -> bool:
        return tuple(split_path(path)) in self._directories and not self.list(path)

    def remove_empty(self, path: str) -> bool:
        parent, leaf = split_leaf(path)
        top = (*parent, leaf)
        with self._lock:
            if top in self._files or self.list(path):
                return False
            self._directories.discard(top)
        return True

    def remove_tree(self, path: str) -> None:
        parent, leaf = split_leaf(path)
        top = (*parent, leaf)
        with self._lock:
            self._files = {path: data for path, data in self._files.items() if path[: len(top)] != top}
            self._directories = {path for path in self._directories if path[: len(top)] != top}

    @contextmanager
    def hold(self, path: str) -> Iterator[None]:
        parent, leaf = split_leaf(path)
        name = (*parent, leaf)
        with self._lock:
            if name in self._held:
                raise InUse(f"another job holds {path}", hint="wait until it is free, or choose another name", path=path)
            self._held.add(name)
        try:
            yield
        finally:
            self._held.discard(name)

    def idle_s(self, path: str) -> float:
        """Seconds since anything in this tier was last written: it stores no times of single files."""
        return max(time.monotonic() - self._changed, 0.0) if self.list(path) else 0.0

    def note_change(self) -> None:
        self._changed = time.monotonic()

    def free_bytes(self) -> int:
        with self._lock:
            return self._capacity_bytes - sum(len(data) for data in self._files.values())

    def _add(self, path: str, data: bytearray) -> bytearray:
        parent, leaf = split_leaf(path)
        with self._lock:
            if (*parent, leaf) in self._files or (*parent, leaf) in self._directories:
                raise StorageFailed(f"{path} exists already", path=path)
            self._make_directories(tuple(parent))
            self._check_room(len(data))
            self._files[(*parent, leaf)] = data
            self.note_change()
        return data

    def _make_directories(self, names: _Path) -> None:
        above = [names[:depth] for depth in range(len(names) + 1)]
        if any(path in self._files for path in above):
            raise StorageFailed(f"a file stands in place of a directory along {'/'.join(names)}")
        self._directories.update(above)

    def _check_room(self, size: int) -> None:
        if size > self.free_bytes():
            raise NoSpace(f"{size} bytes do not fit", hint="free space, or keep fewer checkpoints")

    def _file(self, path: str) -> bytearray:
        parent, leaf = split_leaf(path)
        held = self._files.get((*parent, leaf))
        if held is None:
            raise NoSuchResource(f"there is no file {path}", path=path)
        return held


class MemoryFile:
    """A new file of a `MemoryTier`."""

    def __init__(self, tier: MemoryTier, path: str, data: bytearray) -> None:
        self._tier = tier
        self._path = path
        self._data = data
        self._closed = False

    @property
    def alignment(self) -> int:
        return self._tier.alignment

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        views = [octets(buffer) for buffer in buffers]
        check_range(self._path, offset, sum(view.nbytes for view in views), len(self._data))
        self._check_open()
        for view in views:
            self._data[offset : offset + view.nbytes] = view
            offset += view.nbytes
        self._tier.note_change()

    def finish(self) -> None:
        self._check_open()
        self._closed = True
        self._tier.acts.append(("file", self._path))

    def discard(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StorageFailed(f"{self._path} is closed already", path=self._path)


def _moved(path: _Path, old: _Path, new: _Path) -> _Path:
    return (*new, *path[len(old) :]) if path[: len(old)] == old else path

"""What a power cut may leave: every file operation of storage is recorded, and directories are made of what may survive.

The model, after ALICE (Pillai et al., OSDI 2014), is as harsh as docs/durability.md allows. What was not synced may be on
the disk or not, each piece for itself and in any order: file bytes by blocks of 512, a file's length, every name in every
directory. A rename moves its name at one stroke; it is durable when both directories were synced. An fsync of a file is
about its bytes alone and never about its name.
"""

from __future__ import annotations

import os
import random
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BLOCK_BYTES = 512
_NAMES = frozenset({"mkdir", "open", "rename", "renameat2", "exchange", "link", "unlink", "rmdir"})
RECORDED = _NAMES | {"fsync", "fallocate", "ftruncate", "pwritev"}


class Made(NamedTuple):
    """A new file or directory, `node`, and its name; or a further name of a file."""

    directory: int
    name: str
    node: int
    is_directory: bool


class Renamed(NamedTuple):
    source: int
    old: str
    target: int
    new: str
    node: int


class Exchanged(NamedTuple):
    """Two names changed places, at one stroke; `node` had the name `old`, and `other` the name `new`."""

    source: int
    old: str
    target: int
    new: str
    node: int
    other: int


class Removed(NamedTuple):
    directory: int
    name: str


class Sized(NamedTuple):
    node: int
    size: int


class Written(NamedTuple):
    """A block or less of a file's bytes; longer writes are recorded in several."""

    node: int
    offset: int
    data: bytes


class Synced(NamedTuple):
    node: int


class Told(NamedTuple):
    """Not an operation: the moment from which somebody relies on `what` of a step ("announced", "removing")."""

    what: str
    step: int


Operation = Made | Renamed | Exchanged | Removed | Sized | Written | Synced | Told
Tree = dict[str, bytes | None]  # path -> a file's bytes, None for a directory


class Recorder:
    """Does every call, and notes those that change what is under a root. For `calls.steered`."""

    def __init__(self, root: Path) -> None:
        self.operations: list[Operation] = []
        self._lock = threading.Lock()
        self._nodes = {os.stat(root).st_ino: 0}
        self._next = 1

    def tell(self, what: str, step: int) -> None:
        with self._lock:
            self.operations.append(Told(what, step))

    def __call__(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if name in RECORDED:
            with self._lock:  # so that the order in the log is the order in the kernel
                return getattr(self, f"_{name}")(call, *arguments, **options)
        assert name not in ("pwrite",), "storage writes by a call that is not recorded"
        return call(*arguments, **options)

    def _open(self, call: Any, path: Any, flags: int, *rest: Any, **options: Any) -> int:
        descriptor = int(call(path, flags, *rest, **options))
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL, "a file that may have been there"
            parent = self._node(options["dir_fd"])
            self.operations.append(Made(parent, path, self._name(os.fstat(descriptor).st_ino), False))
        return descriptor

    def _mkdir(self, call: Any, name: str, *, dir_fd: int) -> None:
        call(name, dir_fd=dir_fd)
        node = self._name(os.stat(name, dir_fd=dir_fd).st_ino)
        self.operations.append(Made(self._node(dir_fd), name, node, True))

    def _renameat2(self, call: Any, here: int, old: str, there: int, new: str) -> None:
        node = self._nodes[os.stat(old, dir_fd=here).st_ino]
        call(here, old, there, new)
        self.operations.append(Renamed(self._node(here), old, self._node(there), new, node))

    def _exchange(self, call: Any, here: int, old: str, there: int, new: str) -> None:
        node = self._nodes[os.stat(old, dir_fd=here).st_ino]
        other = self._nodes[os.stat(new, dir_fd=there).st_ino]
        call(here, old, there, new)
        self.operations.append(Exchanged(self._node(here), old, self._node(there), new, node, other))

    def _rename(self, call: Any, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        node = self._nodes[os.stat(old, dir_fd=src_dir_fd).st_ino]
        call(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self.operations.append(Renamed(self._node(src_dir_fd), old, self._node(dst_dir_fd), new, node))

    def _link(self, call: Any, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool) -> None:
        call(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
        node = self._nodes[os.stat(new, dir_fd=dst_dir_fd).st_ino]
        self.operations.append(Made(self._node(dst_dir_fd), new, node, False))

    def _unlink(self, call: Any, name: str, *, dir_fd: int) -> None:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        call(name, dir_fd=dir_fd)
        if found.st_nlink == 1 or not stat.S_ISREG(found.st_mode):
            self._nodes.pop(found.st_ino)
        self.operations.append(Removed(self._node(dir_fd), name))

    _rmdir = _unlink

    def _fallocate(self, call: Any, descriptor: int, size: int) -> None:
        call(descriptor, size)
        self.operations.append(Sized(self._node(descriptor), size))

    _ftruncate = _fallocate

    def _pwritev(self, call: Any, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        written = int(call(descriptor, views, offset))
        data = b"".join(views)[:written]
        node = self._node(descriptor)
        for start in range(0, len(data), BLOCK_BYTES):
            self.operations.append(Written(node, offset + start, data[start : start + BLOCK_BYTES]))
        return written

    def _fsync(self, call: Any, descriptor: int) -> None:
        call(descriptor)
        self.operations.append(Synced(self._node(descriptor)))

    def _name(self, inode: int) -> int:
        node, self._next = self._next, self._next + 1
        self._nodes[inode] = node
        return node

    def _node(self, descriptor: int) -> int:
        return self._nodes[os.fstat(descriptor).st_ino]


def without_syncs(operations: Sequence[Operation], unwanted: Callable[[int], bool]) -> list[Operation]:
    """The log as it would be if the code had never synced what `unwanted` says, by node."""
    return [op for op in operations if not (isinstance(op, Synced) and unwanted(op.node))]


def nodes(operations: Sequence[Operation]) -> dict[int, str]:
    """The name by which every node was made."""
    return {0: ""} | {op.node: op.name for op in operations if isinstance(op, Made)}


def cuts(operations: Sequence[Operation], chance: random.Random, samples: int) -> Iterator[tuple[int, Tree]]:
    """After every operation: the least and the most that may have survived, each single loss, and random subsets.

    Yields how many operations had been made, and the tree.
    """
    for length in range(len(operations) + 1):
        made = operations[:length]
        durable = _durable(made)
        open_ones = [index for index in range(length) if not durable[index]]
        losses: list[set[int]] = [set(), set(open_ones)]
        if open_ones:
            losses += [{index} for index in chance.sample(open_ones, min(samples, len(open_ones)))]
            losses += [set(chance.sample(open_ones, chance.randint(1, len(open_ones)))) for _ in range(samples)]
        for lost in losses:
            yield length, _tree([op for index, op in enumerate(made) if index not in lost])


def _durable(made: Sequence[Operation]) -> list[bool]:
    """Which operations a power cut now cannot undo."""
    synced: set[int] = set()
    durable = [False] * len(made)
    for index in range(len(made) - 1, -1, -1):
        op = made[index]
        if isinstance(op, Synced):
            synced.add(op.node)
        durable[index] = _touched(op) <= synced
    return durable


def _touched(op: Operation) -> set[int]:
    """The nodes that must be synced after an operation for it to last; none for what is no change of the disk."""
    if isinstance(op, Written | Sized):
        return {op.node}
    if isinstance(op, Made | Removed):
        return {op.directory}
    return {op.source, op.target} if isinstance(op, Renamed | Exchanged) else set()


def _tree(survived: Sequence[Operation]) -> Tree:
    """The directory that these operations make, in order; one whose file or name did not survive changes nothing."""
    entries: dict[int, dict[str, tuple[int, bool]]] = {}
    kinds: dict[int, bool] = {}
    contents: dict[int, bytearray] = {}
    for op in survived:
        if isinstance(op, Made):
            entries.setdefault(op.directory, {})[op.name] = (op.node, op.is_directory)
            kinds[op.node] = op.is_directory
        elif isinstance(op, Removed):
            entries.get(op.directory, {}).pop(op.name, None)
        elif isinstance(op, Renamed):
            here = entries.get(op.source, {})
            if here.get(op.old, (None,))[0] == op.node:
                del here[op.old]
            entries.setdefault(op.target, {})[op.new] = (op.node, kinds.get(op.node, op.node in entries))
        elif isinstance(op, Exchanged):
            entries.setdefault(op.source, {})[op.old] = (op.other, True)
            entries.setdefault(op.target, {})[op.new] = (op.node, True)
        elif isinstance(op, Written):
            data = contents.setdefault(op.node, bytearray())
            data.extend(bytes(max(op.offset + len(op.data) - len(data), 0)))
            data[op.offset : op.offset + len(op.data)] = op.data
        elif isinstance(op, Sized):
            data = contents.setdefault(op.node, bytearray())
            data.extend(bytes(max(op.size - len(data), 0)))
            del data[op.size :]
    return dict(_walk(0, "", entries, contents))


def _walk(
    node: int, path: str, entries: dict[int, dict[str, tuple[int, bool]]], contents: dict[int, bytearray]
) -> Iterator[tuple[str, bytes | None]]:
    for name, (below, is_directory) in sorted(entries.get(node, {}).items()):
        yield f"{path}{name}", None if is_directory else bytes(contents.get(below, b""))
        if is_directory:
            yield from _walk(below, f"{path}{name}/", entries, contents)


def build(tree: Tree, root: Path) -> None:
    """Make the directory `root`, which is not there, of a tree."""
    root.mkdir()
    for path, data in tree.items():
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)

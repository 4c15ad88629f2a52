"""A directory of a file system as a tier. The only module that renames and fsyncs.

The system calls on which durability depends are `_fsync`, `_pwritev`, `_preadv`, `_rename` and `_exchange` at the top, so
that a test can make any one of them fail. Large files are written and verified past the page cache where that is possible.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from holdfast_files.direct import ALIGNMENT, REFUSED, PageCacheState, is_aligned, open_direct
from holdfast_files.held_names import held
from holdfast_formats.errors import AlreadyCommitted, CheckpointError, InvalidRequest, NoSuchResource, StorageFailed
from holdfast_formats.files import check_position, split_leaf, split_path

from . import libc
from .directories import DIRECTORY, absent, check_same, identity_of, newest_change, open_directory, remove_empty, remove_tree
from .pacing import Pace
from .records import has_bytes
from .stamps import identities, stamps
from .tier import THE_DIRECTORY, Buffer, FileIdentity, check_range, octets
from .translation import translated
from .writeback import Writeback, drop_from_cache

DIRECT_BYTES_MIN = 2**20  # a smaller file gains nothing from direct access
BUFFERS_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)  # of one pwritev
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_JOINED_FILE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not block its reader
FILE_MODE = 0o666  # minus the umask
ROOT_MODE = 0o700  # of a root that is made here; an admin opens it to others
_NO_SUCH_RENAME = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_NO_SUCH_LINK = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK)

_fsync = os.fsync
_pwritev = os.pwritev
_preadv = os.preadv
_rename = libc.renameat2
_exchange = libc.exchange
_link = os.link
_reserve = libc.fallocate


class PosixTier:
    """The directory `root`, made if it does not exist. Only the path to the root itself may contain a symbolic link."""

    def __init__(self, root: Path, pace: Pace | None = None, node: str = "") -> None:
        """With a `pace`, files from `create` are written no faster than that. `node` tells the daemons of a root apart."""
        self.root, self._pace, self.node = root, pace, node
        self._replacing = threading.Lock()
        make_root(root)
        self._at = identity_of(os.stat(root))

    @property
    def label(self) -> str:
        return THE_DIRECTORY

    def create(self, path: str, size: int) -> PosixFile:
        return self._writable("create", path, size)

    def join(self, path: str, size: int) -> PosixFile:
        return self._writable("join", path, size)  # what others have written into it stays

    def _writable(self, act: Literal["create", "join"], path: str, size: int) -> PosixFile:
        if size < 0:
            raise InvalidRequest(f"{path}: a file of {size} bytes is not possible")
        parent, leaf = split_leaf(path)
        with translated(act, path), self._directory(parent, make=True) as directory:
            descriptor = os.open(leaf, _NEW_FILE if act == "create" else _JOINED_FILE, FILE_MODE, dir_fd=directory)
            try:
                if act == "join":
                    _check_joined(descriptor, size)
                _make_room(descriptor, size)
                direct = open_direct(leaf, os.O_WRONLY, directory) if size >= DIRECT_BYTES_MIN else None
            except OSError:
                os.close(descriptor)
                if act == "create":
                    os.unlink(leaf, dir_fd=directory)
                raise
        return PosixFile(path, descriptor, direct, size, self._pace)

    def put(self, path: str, data: bytes) -> None:
        parent, leaf = split_leaf(path)
        with translated("put", path), self._directory(parent, make=True) as directory:
            _put(directory, leaf, data)

    def replace(self, path: str, data: bytes) -> None:
        parent, leaf = split_leaf(path)
        # A fixed name, so that a crash leaves at most one behind, which the next replace overwrites; one for each node.
        new = f".{leaf}.{self.node}.new" if self.node else f".{leaf}.new"
        with self._replacing, translated("replace", path), self._directory(parent, make=True) as directory:
            with suppress(FileNotFoundError):
                os.unlink(new, dir_fd=directory)
            _put(directory, new, data)
            os.rename(new, leaf, src_dir_fd=directory, dst_dir_fd=directory)
        self.sync_directory("/".join(parent))

    def swap(self, path: str, before: bytes | None, data: bytes) -> bool:
        with self.hold(f"{path}.lock"):
            if not has_bytes(self, path, before):
                return False
            self.replace(path, data)
        return True

    def put_first(self, path: str, data: bytes) -> bool:
        parent, leaf = split_leaf(path)
        new = f".{leaf}.{uuid.uuid4().hex}.new"
        with translated("put", path), self._directory(parent, make=True) as directory:
            _put(directory, new, data)
            try:
                os.link(new, leaf, src_dir_fd=directory, dst_dir_fd=directory)
            except FileExistsError:
                return False
            finally:
                os.unlink(new, dir_fd=directory)
        self.sync_directory("/".join(parent))
        return True

    def sync_directory(self, path: str) -> None:
        names = split_path(path)
        with translated("sync", path):
            for depth in range(len(names), -1, -1):
                with self._directory(names[:depth]) as directory:
                    _fsync(directory)

    def publish(self, source: str, target: str) -> None:
        with translated("publish", source), self._both(source, target, make=True) as (here, leaf, there, new_leaf):
            os.close(os.open(leaf, DIRECTORY, dir_fd=here))  # it must be a directory, and not a link to one
            try:
                _rename_to_free_name(here, leaf, there, new_leaf)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    raise AlreadyCommitted(f"{target} exists already", path=target) from error
                raise
        self._sync_renamed(source, target)

    def exchange(self, source: str, target: str) -> bool:
        with translated("exchange", target), self._both(source, target) as (here, leaf, there, other_leaf):
            for name, parent in ((leaf, here), (other_leaf, there)):
                os.close(os.open(name, DIRECTORY, dir_fd=parent))
            try:
                _exchange(here, leaf, there, other_leaf)
            except OSError as error:
                if error.errno in _NO_SUCH_RENAME:
                    return False
                raise
        self._sync_renamed(source, target)
        return True

    def _sync_renamed(self, source: str, target: str) -> None:
        try:
            self._sync_parents(source, target)
        except CheckpointError as error:
            raise StorageFailed(
                f"{target} was renamed into place, but fsync of its directory failed: {error.detail}",
                hint="check whether it exists; the disk may be failing",
                **{**error.members, "outcome": "unknown"},
            ) from error

    def _sync_parents(self, source: str, target: str) -> None:
        for path in (target, source):
            self.sync_directory("/".join(split_leaf(path)[0]))

    def supplant(self, source: str, target: str) -> None:
        self._check_names(source, target)
        with translated("supplant", target), self._both(source, target) as (here, leaf, there, new_leaf):
            os.rename(leaf, new_leaf, src_dir_fd=here, dst_dir_fd=there)
        self._sync_parents(source, target)

    def link(self, source: str, target: str) -> bool:
        self._check_names(source, target)
        with translated("link", target), self._both(source, target, make=True) as (here, leaf, there, new_leaf):
            try:
                _link(leaf, new_leaf, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_SUCH_LINK:
                    raise
                return False
        return True

    def _check_names(self, source: str, target: str) -> None:
        split_leaf(target)
        if self.size(source) is None:
            raise NoSuchResource(f"there is no file {source}", path=source)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        check_position(path, offset, length or 0)
        with translated("read", path), self._file(path) as (descriptor, size):
            available = max(size - offset, 0)
            data = bytearray(available if length is None else min(length, available))
            return bytes(data[: _read_all(descriptor, offset, memoryview(data))])

    def read_into(self, path: str, offset: int, buffer: Buffer) -> int:
        check_position(path, offset, 0)
        with translated("read", path), self._file(path) as (descriptor, _):
            return _read_all(descriptor, offset, octets(buffer))

    def read_stored(self, path: str, offset: int, buffer: Buffer) -> int:
        check_position(path, offset, 0)
        view = octets(buffer)
        if is_aligned(offset, [view]):
            with translated("read", path), self._file(path, direct=True) as (descriptor, _):
                done = _read_direct(descriptor, offset, view)
            if done is not None:
                return done
        return self.read_into(path, offset, view)

    def is_cached(self, path: str, offset: int, length: int) -> bool:
        """Whether the page cache has at least half of a range of a file, as far as the system tells."""
        check_position(path, offset, length)
        with translated("read", path), self._file(path) as (descriptor, _):
            try:
                return PageCacheState(descriptor).holds(offset, length)
            except (OSError, ValueError):  # nothing can be mapped, or the system does not say
                return False

    def size(self, path: str) -> int | None:
        status = self._status(path)
        return None if status is None else status.st_size

    def list(self, path: str) -> list[str]:
        with self._there(path) as directory:
            return [] if directory is None else sorted(os.listdir(directory))

    def stamp(self, path: str) -> str:
        status = self._status(path)
        return "" if status is None else f"{status.st_size:x}.{status.st_mtime_ns:x}.{status.st_ino:x}"

    def _status(self, path: str) -> os.stat_result | None:
        """Of a regular file; None if there is none."""
        parent, leaf = split_leaf(path)
        with translated("stat", path), absent(), self._directory(parent) as directory:
            status = os.stat(leaf, dir_fd=directory, follow_symlinks=False)
            return status if stat.S_ISREG(status.st_mode) else None
        return None

    def identities(self, path: str) -> dict[str, FileIdentity]:
        with self._there(path) as directory:
            return {} if directory is None else identities(directory)

    def stamps(self, path: str, names: Sequence[str]) -> dict[str, str]:
        with self._there(path) as directory:
            return {} if directory is None else stamps(directory, names)

    def remove_file(self, path: str) -> None:
        parent, leaf = split_leaf(path)
        with translated("remove", path), self._directory(parent) as directory:
            os.unlink(leaf, dir_fd=directory)

    def is_empty(self, path: str) -> bool:
        with self._there(path) as directory:
            return directory is not None and not os.listdir(directory)

    def remove_empty(self, path: str) -> bool:
        parent, leaf = split_leaf(path)
        with translated("remove", path), suppress(FileNotFoundError), self._directory(parent) as directory:
            return remove_empty(directory, leaf)
        return True

    def remove_tree(self, path: str) -> None:
        parent, leaf = split_leaf(path)
        with translated("remove", path), suppress(FileNotFoundError), self._directory(parent) as directory:
            remove_tree(directory, leaf)

    @contextmanager
    def hold(self, path: str) -> Iterator[None]:
        parent, leaf = split_leaf(path)
        with ExitStack() as stack:
            with translated("lock", path):
                directory = stack.enter_context(self._directory(parent, make=True))
                stack.enter_context(held(directory, leaf, path))
            yield

    def idle_s(self, path: str) -> float:
        names = split_path(path)
        with translated("stat", path), absent(), self._directory(names) as directory:
            newest = newest_change(directory)
            return max(self._clock() - newest, 0.0)
        return 0.0

    def _clock(self) -> float:
        """The storage's time, which on a network file system is not this machine's: that of a new file."""
        name = f".holdfast-clock.{uuid.uuid4().hex}"
        with self._directory([]) as directory:
            descriptor = os.open(name, _NEW_FILE, FILE_MODE, dir_fd=directory)
            try:
                return os.fstat(descriptor).st_mtime
            finally:
                os.close(descriptor)
                os.unlink(name, dir_fd=directory)

    def free_bytes(self) -> int:
        with translated("stat", str(self.root)):
            status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    @contextmanager
    def _directory(self, names: Sequence[str], make: bool = False) -> Iterator[int]:
        """A descriptor of a directory below the root, opened name by name without following a link."""
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            check_same(descriptor, self._at, self.root)
            for name in names:
                below = open_directory(descriptor, name, make)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _both(self, source: str, target: str, make: bool = False) -> Iterator[tuple[int, str, int, str]]:
        """The directories of two paths, each with the name in it. With `make` the target's is made."""
        (parent, leaf), (new_parent, new_leaf) = split_leaf(source), split_leaf(target)
        with self._directory(parent) as here, self._directory(new_parent, make=make) as there:
            yield here, leaf, there, new_leaf

    @contextmanager
    def _there(self, path: str) -> Iterator[int | None]:
        """A descriptor of a directory to read, None if there is none."""
        names = split_path(path)
        with translated("list", path), ExitStack() as stack:
            directory = None
            with absent():
                directory = stack.enter_context(self._directory(names))
            yield directory

    @contextmanager
    def _file(self, path: str, direct: bool = False) -> Iterator[tuple[int, int]]:
        parent, leaf = split_leaf(path)
        with self._directory(parent) as directory:
            found = open_direct(leaf, os.O_RDONLY, directory) if direct else None
            descriptor = os.open(leaf, _OLD_FILE, dir_fd=directory) if found is None else found
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise NoSuchResource(f"{path} is not a file", path=path)
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)


class PosixFile:
    """A new file. Threads may be inside `write` while another discards it: the last one out closes the descriptors.

    `direct` is a second descriptor, for the writes that bypass the page cache; None if that is not possible.
    """

    def __init__(self, path: str, descriptor: int, direct: int | None, size: int, pace: Pace | None) -> None:
        self._path = path
        self._descriptor = descriptor
        self._direct = direct
        self._refused = direct is None
        self._size = size
        self._pace = pace
        self._writeback = Writeback()
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    @property
    def alignment(self) -> int:
        return 1 if self._refused else ALIGNMENT

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        views = [octets(buffer) for buffer in buffers]
        length = sum(view.nbytes for view in views)
        check_range(self._path, offset, length, self._size)
        if self._pace is not None:
            self._pace.take(length)
        with translated("write", self._path), self._open() as descriptor:
            if not self._write_direct(offset, views):
                _write_all(descriptor, offset, views)
                self._writeback.wrote(descriptor, offset, length)

    def finish(self) -> None:
        try:
            with translated("fsync", self._path), self._open() as descriptor:
                _fsync(descriptor)  # of the file, so also of writes through the other descriptor; once only (I9)
                if self._size >= DIRECT_BYTES_MIN:
                    drop_from_cache(descriptor)
        finally:
            self.discard()

    def discard(self) -> None:
        with self._lock:
            closing, self._closed = not self._closed and not self._users, True
        if closing:
            self._close()

    def _write_direct(self, offset: int, views: Sequence[memoryview]) -> bool:
        if self._refused or self._direct is None or not is_aligned(offset, views):
            return False
        try:
            _write_all(self._direct, offset, views)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            self._refused = True  # also if a short write left an unaligned rest: all of it is written again, buffered
            return False
        return True

    @contextmanager
    def _open(self) -> Iterator[int]:
        # A descriptor closed under a writer could soon be another file's: counting the users prevents that.
        with self._lock:
            if self._closed:
                raise StorageFailed(f"{self._path} is closed already", path=self._path)
            self._users += 1
        try:
            yield self._descriptor
        finally:
            with self._lock:
                self._users -= 1
                closing = self._closed and not self._users
            if closing:
                self._close()

    def _close(self) -> None:
        # An error of close is not news: finish has fsynced before, and a discarded file is not promised.
        for descriptor in (self._descriptor, self._direct):
            if descriptor is not None:
                with suppress(OSError):
                    os.close(descriptor)


def make_root(root: Path) -> None:
    """Make the directory `root`, for this user alone, and its missing parents, durably. One that exists stays as it is."""
    with translated("make", str(root)):
        missing = [path for path in (root, *root.parents) if not path.exists()]
        root.mkdir(ROOT_MODE, parents=True, exist_ok=True)
        for path in missing:
            descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _fsync(descriptor)
            finally:
                os.close(descriptor)


def set_aside(path: Path, target: Path | None) -> None:
    """Rename a useless file of ours, or delete it if no name is given. A power cut may undo that."""
    with translated("rename", str(path)):
        if target is None:
            path.unlink(missing_ok=True)
        else:
            os.rename(path, target)


def _put(directory: int, leaf: str, data: bytes) -> None:
    descriptor = os.open(leaf, _NEW_FILE, FILE_MODE, dir_fd=directory)
    try:
        _write_all(descriptor, 0, [memoryview(data)])
        _fsync(descriptor)
    except OSError:
        os.unlink(leaf, dir_fd=directory)
        raise
    finally:
        os.close(descriptor)


def _check_joined(descriptor: int, size: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > size:
        raise OSError(errno.EEXIST, "something else exists there")


def _make_room(descriptor: int, size: int) -> None:
    if not size:
        return
    try:
        _reserve(descriptor, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
            raise
        os.ftruncate(descriptor, size)


def _write_all(descriptor: int, offset: int, views: Sequence[memoryview]) -> None:
    pending = [view for view in views if view.nbytes]
    first = 0
    while first < len(pending):
        written = _pwritev(descriptor, pending[first : first + BUFFERS_MAX], offset)
        if written <= 0:
            raise OSError(errno.EIO, "write() wrote no bytes")
        offset += written
        while first < len(pending) and written >= pending[first].nbytes:
            written -= pending[first].nbytes
            first += 1
        if written:
            pending[first] = pending[first][written:]


def _read_direct(descriptor: int, offset: int, view: memoryview) -> int | None:
    """Bytes read, fewer only at the file's end; None if the file cannot be read directly."""
    available = min(max(os.fstat(descriptor).st_size - offset, 0), view.nbytes)
    done = 0
    try:
        while done < available:
            count = _preadv(descriptor, [view[done:]], offset + done)
            done += count
            if not count or count % ALIGNMENT:
                break
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        return None
    return done if done == available else None


def _read_all(descriptor: int, offset: int, view: memoryview) -> int:
    done = 0
    while done < view.nbytes:
        count = _preadv(descriptor, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def _rename_to_free_name(here: int, source: str, target_dir: int, target: str) -> None:
    try:
        _rename(here, source, target_dir, target)
    except OSError as error:
        if error.errno not in _NO_SUCH_RENAME:
            raise
        # A kernel or file system without exclusive rename. A plain one fails on a directory that is not empty, whichever
        # node made it; empty ones are refused here.
        if target in os.listdir(target_dir):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        os.rename(source, target, src_dir_fd=here, dst_dir_fd=target_dir)

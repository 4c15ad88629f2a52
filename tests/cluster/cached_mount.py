"""A program: shows a directory at a mount point, over FUSE, the way a client of a network file system does.

What names there are, and are not, and what a directory lists, is remembered for as long as it is told to, whatever others do
meanwhile. Renames that must
not replace anything, exchanges
of two names, and reservations of space are refused, as NFS does. Started with Debian's own
Python, which has `pyfuse3` (tests/tools.sh): `cached_mount.py DIRECTORY MOUNT SECONDS`.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyfuse3  # type: ignore[import-not-found,unused-ignore]
import trio

_THERE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FLAGS = os.O_ACCMODE | os.O_TRUNC | os.O_APPEND  # of an open file, as far as it is passed on


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise pyfuse3.FUSEError(error.errno) from None


class CachedMount(pyfuse3.Operations):  # type: ignore[misc,unused-ignore]
    """Each inode is held open, so it is found wherever it is renamed to. All calls come from one thread."""

    enable_writeback_cache = False

    def __init__(self, directory: str, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._inodes = {pyfuse3.ROOT_INODE: os.open(directory, _THERE)}
        self._known = {pyfuse3.ROOT_INODE: 1}
        self._lists: dict[int, tuple[float, list[bytes]]] = {}

    def _attributes(self, found: os.stat_result) -> Any:
        entry = pyfuse3.EntryAttributes()
        for name in ("st_ino", "st_mode", "st_nlink", "st_uid", "st_gid", "st_rdev", "st_size"):
            setattr(entry, name, getattr(found, name))
        for name in ("st_atime_ns", "st_mtime_ns", "st_ctime_ns"):
            setattr(entry, name, getattr(found, name))
        entry.st_blksize, entry.st_blocks = 4096, found.st_blocks
        entry.generation, entry.entry_timeout, entry.attr_timeout = 0, self._seconds, 0
        return entry

    def _changes(self, inode: int) -> int:
        """A directory in which something is changed by way of this mount."""
        descriptor = self._inodes[inode]
        self._lists.pop(os.fstat(descriptor).st_ino, None)
        return descriptor

    def _entry(self, directory: int, name: bytes) -> Any:
        descriptor = os.open(name, _THERE, dir_fd=directory)
        found = os.stat(descriptor)
        if found.st_ino in self._inodes:
            os.close(descriptor)
        else:
            self._inodes[found.st_ino] = descriptor
        self._known[found.st_ino] = self._known.get(found.st_ino, 0) + 1
        return self._attributes(found)

    def _path(self, inode: int) -> str:
        return f"/proc/self/fd/{self._inodes[inode]}"

    async def lookup(self, parent_inode: int, name: bytes, ctx: Any = None) -> Any:
        with _refusals():
            try:
                return self._entry(self._inodes[parent_inode], name)
            except FileNotFoundError:
                absent = pyfuse3.EntryAttributes()
                absent.st_ino, absent.entry_timeout = 0, self._seconds
                return absent

    async def forget(self, inode_list: list[tuple[int, int]]) -> None:
        for inode, count in inode_list:
            self._known[inode] -= count
            if not self._known[inode]:
                del self._known[inode]
                os.close(self._inodes.pop(inode))

    async def getattr(self, inode: int, ctx: Any = None) -> Any:
        with _refusals():
            return self._attributes(os.stat(self._inodes[inode]))

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: int | None, ctx: Any) -> Any:
        with _refusals():
            if fields.update_size:
                os.truncate(self._path(inode), attr.st_size)
            if fields.update_mode:
                os.chmod(self._path(inode), stat.S_IMODE(attr.st_mode))
            if fields.update_mtime or fields.update_atime:
                old = os.stat(self._inodes[inode])
                times = (
                    attr.st_atime_ns if fields.update_atime else old.st_atime_ns,
                    attr.st_mtime_ns if fields.update_mtime else old.st_mtime_ns,
                )
                os.utime(self._path(inode), ns=times)
        return await self.getattr(inode)

    async def open(self, inode: int, flags: int, ctx: Any) -> Any:
        with _refusals():
            return pyfuse3.FileInfo(fh=os.open(self._path(inode), flags & _FLAGS | os.O_CLOEXEC))

    async def create(self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
        with _refusals():
            kept = os.O_CREAT | os.O_CLOEXEC | flags & (_FLAGS | os.O_EXCL)
            directory = self._changes(parent_inode)
            descriptor = os.open(name, kept, mode, dir_fd=directory)
            return pyfuse3.FileInfo(fh=descriptor), self._entry(directory, name)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        with _refusals():
            return os.pread(fh, size, off)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        with _refusals():
            return os.pwrite(fh, buf, off)

    async def fsync(self, fh: int, datasync: bool) -> None:
        with _refusals():
            os.fsync(fh)

    async def release(self, fh: int) -> None:
        os.close(fh)

    async def opendir(self, inode: int, ctx: Any) -> int:
        with _refusals():
            return os.open(self._path(inode), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        """As it was when it was last listed, unless that is long ago, or something was changed by way of this mount."""
        with _refusals():
            found = os.fstat(fh).st_ino
            until, names = self._lists.get(found, (0.0, []))
            if until < time.monotonic():
                names = [os.fsencode(name) for name in sorted(os.listdir(fh))]
                self._lists[found] = time.monotonic() + self._seconds, names
        for number, name in enumerate(names, 1):
            if number > start_id and not self._tell(fh, name, number, token):
                return

    def _tell(self, fh: int, name: bytes, number: int, token: Any) -> bool:
        """A name of a directory, which counts as looked up; False where there is no room for it any more."""
        try:
            entry = self._entry(fh, name)
        except FileNotFoundError:
            return True
        told = bool(pyfuse3.readdir_reply(token, name, entry, number))
        if not told:
            self._known[entry.st_ino] -= 1
        return told

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self.fsync(fh, datasync)

    async def releasedir(self, fh: int) -> None:
        os.close(fh)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: Any) -> Any:
        with _refusals():
            directory = self._changes(parent_inode)
            os.mkdir(name, mode, dir_fd=directory)
            return self._entry(directory, name)

    async def unlink(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        with _refusals():
            os.unlink(name, dir_fd=self._changes(parent_inode))

    async def rmdir(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        with _refusals():
            os.rmdir(name, dir_fd=self._changes(parent_inode))

    async def rename(
        self, parent_inode_old: int, name_old: bytes, parent_inode_new: int, name_new: bytes, flags: int, ctx: Any
    ) -> None:
        if flags:
            raise pyfuse3.FUSEError(errno.EINVAL)
        with _refusals():
            here, there = self._changes(parent_inode_old), self._changes(parent_inode_new)
            os.rename(name_old, name_new, src_dir_fd=here, dst_dir_fd=there)

    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: Any) -> Any:
        with _refusals():
            directory = self._changes(new_parent_inode)
            os.link(self._path(inode), new_name, dst_dir_fd=directory, follow_symlinks=True)
            return self._entry(directory, new_name)

    async def statfs(self, ctx: Any) -> Any:
        found, answer = os.statvfs(self._path(pyfuse3.ROOT_INODE)), pyfuse3.StatvfsData()
        for name in (
            "f_bsize",
            "f_frsize",
            "f_blocks",
            "f_bfree",
            "f_bavail",
            "f_files",
            "f_ffree",
            "f_favail",
            "f_namemax",
        ):
            setattr(answer, name, getattr(found, name))
        return answer


def main(directory: str, mount: str, seconds: str) -> None:
    """Serve the mount until it is unmounted."""
    options = {*pyfuse3.default_options, "fsname=cached_mount"} - {"default_permissions"}
    pyfuse3.init(CachedMount(directory, float(seconds)), mount, options)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Sources of a checkpoint's files: a directory, or the service."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol

from holdfast_files import direct
from holdfast_files.direct import PageCacheState
from holdfast_formats import naming
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX
from holdfast_formats.errors import CorruptManifest, InvalidRequest, NoSuchResource, StorageFailed
from holdfast_formats.files import Files

if TYPE_CHECKING:
    from holdfast.rest.api import Api
    from holdfast_files.objects.traffic import RequestCount

READ_AHEAD_BYTES_MIN = 2**20
DIRECT_BYTES_MIN = 2**18  # what aligning a shorter read adds is not worth it
# What is read stays in a core's own cache until it is digested and handed over. Where the disk is waited for, and not read
# past the page cache, 2 MiB at a time take a fifth less time; from memory, half a megabyte is a twentieth faster than that.
FILE_CHUNK_BYTES = 2**19
HTTP_CHUNK_BYTES = EXTENT_BYTES_MAX  # of one request


class Source(Files, Protocol):
    """The files of one checkpoint, by plain name, and what a fast load asks of them. The best read size is `chunk_bytes`."""

    chunk_bytes: int
    origin: Literal["directory", "bucket", "http"] = "directory"  # as a restore's report names it
    gap_bytes: int = 0  # between wanted bytes, which are read along to save a request
    buffers_bytes_max: int = 128 * 2**20  # of all threads that read

    def close(self) -> None: ...

    def read_stored(self, name: str, offset: int, buffer: memoryview) -> int:
        return self.read_into(name, offset, buffer)  # as a load reads it

    def view(self, name: str, start: int, stop: int) -> memoryview | None:
        """Memory that nothing changes; None: read it. Mapping the page cache would cost a fault for every few pages."""
        return None

    def file(self, name: str) -> int | None:
        """The descriptor that is read from; None: files are not what is read."""
        return None

    def waits(self, name: str, offset: int) -> bool:
        """Whether reading there would wait for a disk or a network; a guess."""
        return True

    def past_cache(self) -> direct.Reader | None:
        """How it is read past the page cache, where it can be."""
        return None

    def requests(self) -> Mapping[str, RequestCount]:
        """The requests to object storage for this checkpoint so far, by kind."""
        return {}

    def still_has(self, commit: bytes) -> bool:
        """Whether the checkpoint with this COMMIT still exists there, not another one, or none. True if unknown."""
        return True

    def beside(self, run: str, step: int) -> AbstractContextManager[Source | None]:
        """Another checkpoint of the same root or service; None where this one is in neither."""
        return nullcontext()


class DirectorySource(Source):
    """The files of a checkpoint's directory, read without a service. Links out of the directory are not followed."""

    chunk_bytes = FILE_CHUNK_BYTES

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._open: dict[str, int] = {}
        self._direct: dict[str, int | None] = {}  # None: through the page cache after all
        self._cached: dict[str, PageCacheState] = {}
        self._tells = True  # what is in the page cache: otherwise nothing is read past it
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        return str(self.path)

    def size(self, name: str) -> int | None:
        try:
            with self._translated(name):
                status = os.stat(self._path(name), follow_symlinks=False)
        except NoSuchResource:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise CorruptManifest(
                f"{name} in {self.label} is not a regular file",
                hint="repair the step with `holdfast repair`, or restore another one",
                file=name,
            )
        return status.st_size

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        descriptor = self._open.get(name)
        if descriptor is None:
            descriptor = self._descriptor(name)
        done = 0
        if len(buffer) >= READ_AHEAD_BYTES_MIN:  # the disk gets one request for all of it
            with suppress(OSError):
                os.posix_fadvise(descriptor, offset, len(buffer), os.POSIX_FADV_WILLNEED)
        while done < len(buffer):
            try:
                got = os.preadv(descriptor, (buffer[done:] if done else buffer,), offset + done)
            except OSError as error:
                raise self._failed(name, error) from error
            if got == 0:
                break
            done += got
        return done

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return read_part(self, os.fstat(self._descriptor(name)).st_size, name, offset, length)

    def stamp(self, name: str) -> str:
        with suppress(NoSuchResource), self._translated(name):
            status = os.stat(self._path(name), follow_symlinks=False)
            return f"{status.st_size:x}.{status.st_mtime_ns:x}.{status.st_ino:x}"
        return ""

    def list(self, path: str) -> list[str]:
        with self._translated(path):
            return sorted(os.listdir(self.path)) if not path and self.path.is_dir() else []

    def file(self, name: str) -> int | None:
        return self._descriptor(name)

    def waits(self, name: str, offset: int) -> bool:
        descriptor = self._descriptor(name)
        try:
            with self._lock:
                if name not in self._cached:
                    self._cached[name] = PageCacheState(descriptor)
                return not self._cached[name].holds(offset)
        except OSError:  # an overlay, for one
            self._tells = False
            return True

    def past_cache(self) -> direct.Reader | None:
        return self._read_past_cache if self._tells and direct.possible() else None

    def _read_past_cache(self, name: str, start: int, size: int, memory: memoryview) -> memoryview | None:
        """A `direct.Reader`. The kernel writes out dirty pages first."""
        if not self._tells or size < DIRECT_BYTES_MIN:
            return None
        try:
            descriptor = self._direct[name] if name in self._direct else self._opened_past_cache(name)
            return None if descriptor is None else direct.read(descriptor, start, size, memory)
        except OSError as error:
            if error.errno not in direct.REFUSED:
                raise self._failed(name, error) from error
            self._tells = False
            return None

    def requests(self) -> Mapping[str, RequestCount]:
        """The requests to object storage for this checkpoint so far, by kind."""
        return {}

    def still_has(self, commit: bytes) -> bool:
        try:
            return (self.path / naming.COMMIT).read_bytes() == commit
        except FileNotFoundError:
            return False
        except OSError:  # unknown
            return True

    def beside(self, run: str, step: int) -> AbstractContextManager[Source | None]:
        if self.path.parent.name != naming.CHECKPOINTS:
            return nullcontext()
        return closing(DirectorySource(self.path.resolve().parents[2] / naming.checkpoint_path(run, step)))

    def close(self) -> None:
        """Close every file; the source can still be used and opens them again."""
        with self._lock:
            self._cached.clear()
            for opened in (self._open, self._direct):
                while opened:
                    descriptor = opened.popitem()[1]
                    if descriptor is not None:
                        os.close(descriptor)

    def __enter__(self) -> DirectorySource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _descriptor(self, name: str) -> int:
        with self._lock:
            if name not in self._open:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not hold up its reader
                with self._translated(name):
                    descriptor = os.open(self._path(name), flags)
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.close(descriptor)
                    raise CorruptManifest(
                        f"{name} in {self.label} is not a regular file",
                        hint="repair the step with `holdfast repair`, or restore another one",
                        file=name,
                    )
                self._open[name] = descriptor
            return self._open[name]

    def _opened_past_cache(self, name: str) -> int | None:
        with self._lock:
            if name not in self._direct:
                with self._translated(name):
                    self._direct[name] = direct.open_direct(self._path(name))
            return self._direct[name]

    def _path(self, name: str) -> Path:
        if not naming.is_file_name(name):
            raise InvalidRequest(
                f"{name!r} is not a valid name of a checkpoint file",
                hint="give a path inside the checkpoint as `holdfast show` lists it, without .. or a leading /",
            )
        return self.path / name

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise NoSuchResource(
                f"{self.label} has no file {name!r}", hint="`holdfast show` lists the files of the checkpoint", file=name
            ) from None
        except OSError as error:
            raise self._failed(name, error) from error

    def _failed(self, name: str, error: OSError) -> StorageFailed:
        return StorageFailed(
            f"{self.label}: cannot read {name}: {error.strerror}",
            hint="check the permissions of the directory and the health of its disk",
            file=name,
            errno=error.errno,
        )


class HttpSource(Source):
    """The files of a checkpoint from the service, by Range requests. Closing it closes the `Api`."""

    chunk_bytes = HTTP_CHUNK_BYTES
    origin = "http"

    def __init__(self, api: Api, run: str, step: int) -> None:
        self.api = self._api = api
        self.run = self._run = run
        self.step = self._step = step
        self._sizes: dict[str, int | None] | None = None
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        return f"{self._api.url}/v1/runs/{self._run}/checkpoints/{self._step}"

    def size(self, name: str) -> int | None:
        return self._stored().get(name)

    def stamp(self, name: str) -> str:
        return ""  # a service says nothing of that

    def list(self, path: str) -> list[str]:
        return sorted(name for name, size in self._stored().items() if size is not None and not path)

    def _stored(self) -> dict[str, int | None]:
        with self._lock:
            if self._sizes is None:
                self._sizes = {file.name: file.stored for file in self._api.files(self._run, self._step)}
            return self._sizes

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        return self._api.file_range(self._run, self._step, name, offset, buffer)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return read_part(self, self.size(name), name, offset, length)

    def beside(self, run: str, step: int) -> AbstractContextManager[Source | None]:
        return nullcontext(HttpSource(self._api, run, step))  # not closed: that would close the connection of both

    def close(self) -> None:
        self._api.close()


def read_part(source: Source, size: int | None, name: str, offset: int, length: int | None) -> bytes:
    """`Files.read` of a file of this size, by `read_into`; None if it does not exist."""
    if size is None:
        raise NoSuchResource(
            f"{source.label} has no file {name!r}", hint="`holdfast show` lists the files of the checkpoint", file=name
        )
    there = max(size - offset, 0)
    buffer = bytearray(there if length is None else min(length, there))
    return bytes(buffer[: source.read_into(name, offset, memoryview(buffer))])

"""The lease on a bucket that one daemon serves without others: an object that is written again while it serves.

Daemons that share a catalog have none: the catalog knows them, and the mark of the root refuses others. Only until the root
has that mark, the first of them holds the lease.

Another daemon takes the lease when the object has stood unchanged for twice its stated interval and `LATE_S`, by its own
clock: no two clocks are compared (I17). It takes it at once where it can see that the process is gone. The lease keeps two
daemons from serving a root by mistake; what keeps their checkpoints apart is each step's commit object. Removals have no
condition on a bucket, so a daemon that was stopped for a while confirms its lease before it removes something. The interval
is in the object, because an idle daemon writes it less often.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from holdfast_files.objects.client import Bucket
from holdfast_formats import naming
from holdfast_formats.body import Body
from holdfast_formats.errors import CheckpointError, NoSuchResource, RootBusy
from holdfast_formats.root_files import decode, encode

log = logging.getLogger(__name__)

BUSY_S, IDLE_S = 10.0, 120.0  # between two renewals, while ranks are connected and while none are
LATE_S = 20.0  # that a renewal may come late, twice the interval aside
LOOK_S = 1.0
GIVE_BACK_S = 5.0  # a daemon that stops waits no longer for the bucket
FILE_BYTES_MAX = 4096
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class OwnerFile(Body):
    """Contents of `.holdfast.owner`. `state` is the daemon's directory for what it keeps, on its machine since it booted:
    only one process at a time can have that locked. `process` is its process there. `catalog` is the address of the catalog
    that it is about to share the root with: then the lease ends when the root says so. `word` is another one in every
    renewal: two copies of one running machine have all else in common.
    """

    model_config = ConfigDict(extra="ignore")

    node: str = Field(max_length=64)
    state: str = Field(max_length=200)
    process: str = Field(max_length=200)
    renews_s: Annotated[float, Field(gt=0, le=3600)]
    count: Annotated[int, Field(ge=0)]
    catalog: str = Field("", max_length=500)
    word: str = Field("", max_length=32)


class BucketLease:
    """A lease that was taken, and is renewed by a thread until `close`."""

    def __init__(self, bucket: Bucket, own: OwnerFile, etag: str) -> None:
        self._bucket, self._own, self._etag = bucket, own, etag
        self._tried: set[str] = set()  # words of renewals since then whose answers were lost
        self._busy, self._lost, self._held_at = True, "", _now_s()
        self.vanished = False  # lost, since something removed its object: nothing else is known to serve the bucket
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="holdfast-lease", daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, bucket: Bucket, node: str, directory: Path) -> BucketLease:
        """Wait until no other daemon renews it; `RootBusy`, which names the other one, as soon as one does. This process has
        locked the `directory` for what it keeps.
        """
        taken = cls._take(bucket, _own(node, directory), lambda: False)
        assert taken is not None
        return taken

    @classmethod
    def take_until_shared(
        cls, bucket: Bucket, node: str, directory: Path, catalog: str, is_shared: Callable[[], bool]
    ) -> BucketLease | None:
        """As `take`, for a daemon that will share the root by this catalog; it waits for others that will. None as soon as
        the root is marked as shared by it (`is_shared`).
        """
        return cls._take(bucket, _own(node, directory, catalog), is_shared)

    @classmethod
    def _take(cls, bucket: Bucket, own: OwnerFile, is_needless: Callable[[], bool]) -> BucketLease | None:
        seen: tuple[bytes, float] | None = None
        while not is_needless():
            found = _read(bucket)
            if found is None:
                written = bucket.put(naming.OWNER, encode(own), if_absent=True)
            else:
                data, etag = found
                other, now = decode(OwnerFile, data), time.monotonic()
                if seen is not None and seen[0] != data:
                    if other is None or not own.catalog or other.catalog != own.catalog:
                        raise _busy(bucket, other)
                    seen = None
                since = seen[1] if seen is not None else now
                if other is not None and not _is_gone(other, own) and now - since < _patience_s(other):
                    if seen is None:
                        log.warning(
                            "%s was served by %s: waiting %.0f s to see whether it still is",
                            *(bucket.label, other.node, _patience_s(other)),
                        )
                    seen = data, since
                    time.sleep(LOOK_S)
                    continue
                written = bucket.put(naming.OWNER, encode(own), if_match=etag)
            if written.outcome == "done":
                return cls(bucket, own, written.etag)
            found = _read(bucket)
            if found is not None and found[0] == encode(own):  # the answer was lost
                return cls(bucket, own, found[1])
            time.sleep(LOOK_S)
        return None

    def lost(self, busy: bool) -> str:
        """Why another daemon has it now; empty while it is held. While no rank is `busy` it is renewed less often."""
        self._busy = busy
        return self._lost

    def confirm(self) -> None:
        """Before something is removed: `RootBusy` if another daemon has it by now. The bucket is asked only after a time in
        which that could be, as when this process was stopped.
        """
        if _now_s() - self._held_at >= self._own.renews_s + LATE_S and not self._lost:
            self._renew_now()
        if self._lost:
            raise RootBusy(self._lost, hint="nothing is removed here any more: ask the other daemon")

    def close(self) -> None:
        """Give it back, so that another daemon need not wait; not to a bucket that does not answer soon."""
        self._closing.set()
        giving = threading.Thread(target=self._give_back, name="holdfast-lease-end", daemon=True)
        giving.start()
        giving.join(GIVE_BACK_S)
        if giving.is_alive():
            log.warning("the lease on %s is not given back: the bucket does not answer", self._bucket.label)

    def _give_back(self) -> None:
        self._thread.join()
        try:
            found = _read(self._bucket)
            if found is not None and self._written(found[0]) is not None:
                self._bucket.delete([naming.OWNER])
        except CheckpointError as error:
            log.warning("the lease on %s could not be given back: %s", self._bucket.label, error.detail)

    def _renew(self) -> None:
        while not self._lost and not self._closing.wait(self._own.renews_s):
            try:
                self._renew_now()
            except CheckpointError as error:
                log.warning("the lease on %s could not be renewed: %s", self._bucket.label, error.detail)

    def _renew_now(self) -> None:
        with self._lock:
            begun, renews_s = _now_s(), BUSY_S if self._busy else IDLE_S
            changed = {"renews_s": renews_s, "count": self._own.count + 1, "word": _word()}
            self._lost = self._renewed(self._own.model_copy(update=changed))
            self._held_at = begun

    def _renewed(self, own: OwnerFile) -> str:
        """Why the lease is lost; empty if it is held."""
        self._tried.add(own.word)
        written = self._bucket.put(naming.OWNER, encode(own), if_match=self._etag)
        if written.outcome == "done":
            self._hold(own, written.etag)
            return ""
        found = _read(self._bucket)
        self.vanished = found is None
        mine = None if found is None else self._written(found[0])
        if found is not None and mine is not None:
            self._hold(mine, found[1])
            return ""
        other = None if found is None else decode(OwnerFile, found[0])
        return f"{other.node} serves {self._bucket.label} now" if other else f"the lease on {self._bucket.label} is gone"

    def _hold(self, own: OwnerFile, etag: str) -> None:
        self._own, self._etag = own, etag
        self._tried.clear()

    def _written(self, data: bytes) -> OwnerFile | None:
        """What this lease has written, if that is what stands: as it was last known, or by a renewal whose answer was lost,
        which may have stated another interval than the next one.
        """
        found, own = decode(OwnerFile, data), self._own
        if found is None or found.word not in {own.word, *self._tried}:
            return None
        changed = {"renews_s": found.renews_s, "count": found.count, "word": found.word}
        return found if found == own.model_copy(update=changed) else None


def _now_s() -> float:
    """Seconds of a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _patience_s(other: OwnerFile) -> float:
    return 2 * other.renews_s + LATE_S


def _is_gone(other: OwnerFile, own: OwnerFile) -> bool:
    """Whether the daemon of a lease has surely ended: it had this process's directory, or was a process of this machine."""
    if other.state == own.state:
        return True
    space, _, pid = other.process.rpartition(" ")[0].rpartition(" ")
    same_space = space == own.process.rpartition(" ")[0].rpartition(" ")[0]
    return same_space and pid.isdecimal() and _process(int(pid)) != other.process


def _own(node: str, directory: Path, catalog: str = "") -> OwnerFile:
    state, process = _state(directory), _process(os.getpid())
    return OwnerFile(node=node, state=state, process=process, renews_s=BUSY_S, count=0, catalog=catalog, word=_word())


def _word() -> str:
    return secrets.token_hex(16)


def _state(directory: Path) -> str:
    at = os.stat(directory)
    return f"{BOOT_ID.read_text().strip()} {at.st_dev} {at.st_ino}"


def _process(pid: int) -> str:
    """A process by machine, name space, number, and time of its start; with no time if there is none."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "-"
    return f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')} {pid} {started}"


def _read(bucket: Bucket) -> tuple[bytes, str] | None:
    try:
        return bucket.read_tagged(naming.OWNER, FILE_BYTES_MAX)
    except NoSuchResource:
        return None


def _busy(bucket: Bucket, other: OwnerFile | None) -> RootBusy:
    return RootBusy(
        f"{bucket.label} is in use by the daemon of {other.node if other else 'another machine'}",
        hint="use that daemon, stop it, or choose another prefix. Daemons of several machines share a bucket if all of them "
        "have the same --catalog postgresql://…",
    )

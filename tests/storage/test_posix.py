"""PosixTier takes the exam of all tiers, and what only a file system can do to it: links, full disks, failing calls."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import (
    AlreadyCommitted,
    CheckpointError,
    InvalidRequest,
    NoSpace,
    NoSuchResource,
    RootBusy,
    StorageFailed,
)
from holdfast_service.storage import PosixTier, Tier, lock_root, posix
from tests.suites.tier_suite import TierSuite


class RawFiles:
    """Writes and reads files below a directory with plain Path calls."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, path: str, data: bytes) -> None:
        file = self._root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def read(self, path: str) -> bytes | None:
        file = self._root / path
        return file.read_bytes() if file.exists() else None


@pytest.fixture
def tier(tmp_path: Path) -> PosixTier:
    return PosixTier(tmp_path / "root")


class TestPosixTier(TierSuite):
    @pytest.fixture
    def raw(self, tier: PosixTier) -> RawFiles:
        return RawFiles(tier.root)


class TestPosixTierWithoutExclusiveRename(TestPosixTier):
    """The whole exam again on a kernel that lacks renameat2 and fallocate."""

    @pytest.fixture(autouse=True)
    def old_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(posix, "_rename", failing(errno.ENOSYS))
        monkeypatch.setattr(posix, "_reserve", failing(errno.EOPNOTSUPP))


class TestPosixTierWithoutDirectAccess(TestPosixTier):
    """The whole exam again on a file system that opens files for direct access and then refuses every such access."""

    @pytest.fixture(autouse=True)
    def no_direct_access(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(posix, "_pwritev", refusing(os.pwritev))
        monkeypatch.setattr(posix, "_preadv", refusing(os.preadv))


class TestPosixTierInMemory(TestPosixTier):
    """The whole exam again on tmpfs."""

    @pytest.fixture
    def tier(self) -> Iterator[PosixTier]:
        shared = Path("/dev/shm")
        if not shared.is_dir():
            pytest.skip("there is no tmpfs")
        with tempfile.TemporaryDirectory(dir=shared) as directory:
            yield PosixTier(Path(directory) / "root")


def refusing(call: Callable[..., int]) -> Callable[..., int]:
    """The call, but it takes no descriptor that goes past the page cache."""

    def checked(descriptor: int, *arguments: Any) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(descriptor, *arguments)

    return checked


def failing(code: int) -> Callable[..., Any]:
    """A system call that fails with this errno."""

    def call(*_: object) -> Any:
        raise OSError(code, os.strerror(code))

    return call


def write_one(tier: Tier, path: str = "s/file") -> None:
    writer = tier.create(path, 4)
    try:
        writer.write(0, [b"data"])
        writer.finish()
    finally:
        writer.discard()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("call", ["_pwritev", "_fsync", "_reserve"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace), (errno.EIO, StorageFailed), (errno.EROFS, StorageFailed)],
)
def test_failing_writes_are_named(
    tier: PosixTier, monkeypatch: pytest.MonkeyPatch, call: str, code: int, kind: type[CheckpointError]
) -> None:
    """A full disk is NoSpace, anything else StorageFailed with path, errno and operation; no descriptor stays open."""
    before = open_descriptors()
    monkeypatch.setattr(posix, call, failing(code))
    with pytest.raises(kind) as caught:
        write_one(tier)
    assert caught.value.members["errno"] == code
    assert caught.value.members["path"] == "s/file"
    assert caught.value.members["operation"] in ("create", "write", "fsync")
    assert caught.value.hint
    assert type(caught.value) is kind
    assert open_descriptors() == before


@pytest.mark.parametrize("call", ["_pwritev", "_fsync"])
@pytest.mark.parametrize("put", ["put", "replace"])
def test_failing_put_leaves_no_half_file(tier: PosixTier, monkeypatch: pytest.MonkeyPatch, call: str, put: str) -> None:
    """A small file that could not be made durable is not there at all; an old one stays."""
    tier.put("old", b"old")
    monkeypatch.setattr(posix, call, failing(errno.ENOSPC))
    with pytest.raises(NoSpace):
        getattr(tier, put)("new", b"new")
    if put == "replace":
        with pytest.raises(NoSpace):
            tier.replace("old", b"new")
    assert tier.list("") == ["old"]
    assert tier.read("old") == b"old"


def test_file_without_room_is_not_left(tier: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose room could not be reserved is taken away again."""
    monkeypatch.setattr(posix, "_reserve", failing(errno.ENOSPC))
    with pytest.raises(NoSpace):
        tier.create("s/file", 10)
    assert tier.list("s") == []


def test_failed_fsync_is_never_retried(tier: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """I9: after a failed fsync the file is closed, and a second finish does not ask the kernel again."""
    calls = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(posix, "_fsync", fsync)
    writer = tier.create("file", 1)
    with pytest.raises(StorageFailed):
        writer.finish()
    with pytest.raises(StorageFailed, match="closed"):
        writer.finish()
    assert len(calls) == 1


def test_short_writes_are_continued(tier: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes seven bytes a call, across buffer borders, still gets every byte in its place."""

    def seven(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        assert len(buffers) <= posix.BUFFERS_MAX
        return os.pwrite(descriptor, b"".join(buffers)[:7], offset)

    monkeypatch.setattr(posix, "_pwritev", seven)
    pieces = [b"abc", b"", b"defghijklmnop", b"q", b"rstuvwxyz"]
    writer = tier.create("file", 26)
    writer.write(0, pieces)
    writer.finish()
    assert tier.read("file") == b"".join(pieces)


def test_a_write_that_takes_nothing_fails(tier: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes no bytes and reports no error does not make the writer spin."""
    monkeypatch.setattr(posix, "_pwritev", lambda *_: 0)
    with pytest.raises(StorageFailed):
        tier.put("file", b"x")


def test_short_reads_are_continued(tier: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that gives three bytes a call still fills the buffer."""
    tier.put("file", b"0123456789")
    monkeypatch.setattr(posix, "_preadv", lambda fd, views, offset: os.preadv(fd, [views[0][:3]], offset))
    buffer = bytearray(8)
    assert tier.read_into("file", 1, buffer) == 8
    assert buffer == b"12345678"
    assert tier.read("file", 5) == b"56789"


def test_failing_reads_are_named(tier: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk error while reading is StorageFailed, never fewer bytes."""
    tier.put("file", b"x")
    monkeypatch.setattr(posix, "_preadv", failing(errno.EIO))
    with pytest.raises(StorageFailed):
        tier.read("file")


def test_discard_under_a_writer_closes_afterwards(tier: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor is never closed under a thread that writes: it could be another file's by then."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        inside.set()
        assert go_on.wait(180)
        return os.pwritev(descriptor, buffers, offset)

    monkeypatch.setattr(posix, "_pwritev", slow)
    before = open_descriptors()
    writer = tier.create("file", 4)
    thread = threading.Thread(target=writer.write, args=(0, [b"data"]))
    thread.start()
    assert inside.wait(180)
    writer.discard()
    assert open_descriptors() == before + 1
    go_on.set()
    thread.join()
    assert open_descriptors() == before
    assert tier.read("file") == b"data"


def test_publish_syncs_after_the_rename(tier: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parents are fsynced, up to the root, and only when the new name stands (I3)."""
    tier.put("run/staging/x/file", b"1")
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        assert tier.list("run/checkpoints") == ["x"]
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(str(tier.root)))

    monkeypatch.setattr(posix, "_fsync", fsync)
    tier.publish("run/staging/x", "run/checkpoints/x")
    assert synced == ["/run/checkpoints", "/run", "", "/run/staging", "/run", ""]


@pytest.mark.parametrize(
    ("call", "code", "outcome"),
    [("_fsync", errno.EIO, "unknown"), ("_fsync", errno.ENOSPC, "unknown"), ("_rename", errno.EIO, None)],
)
def test_failure_after_the_rename_is_outcome_unknown(
    tier: PosixTier, monkeypatch: pytest.MonkeyPatch, call: str, code: int, outcome: str | None
) -> None:
    """I9: parents that cannot be made durable are told apart from a failed rename, whatever the errno."""
    tier.put("a/file", b"1")
    monkeypatch.setattr(posix, call, failing(code))
    with pytest.raises(StorageFailed) as caught:
        tier.publish("a", "b")
    assert caught.value.members.get("outcome") == outcome
    assert tier.list("") == ["a" if outcome is None else "b"]


class TestLinks:
    """Nothing below the root is reached through a symbolic link."""

    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        directory = tmp_path / "outside"
        directory.mkdir()
        (directory / "precious").write_bytes(b"precious")
        return directory

    def test_remove_tree_removes_the_link_alone(self, tier: PosixTier, outside: Path) -> None:
        """A link at the path or anywhere below it goes; what it points to stays."""
        tier.put("trash/x/file", b"1")
        (tier.root / "trash/x/link").symlink_to(outside)
        (tier.root / "trash/x/file-link").symlink_to(outside / "precious")
        (tier.root / "trash/y").symlink_to(outside)
        tier.remove_tree("trash/x")
        tier.remove_tree("trash/y")
        assert tier.list("trash") == []
        assert (outside / "precious").read_bytes() == b"precious"

    def test_remove_below_a_link_is_refused(self, tier: PosixTier, outside: Path) -> None:
        """A link in the middle of the path leads nowhere."""
        (tier.root / "trash").symlink_to(outside)
        for remove in (tier.remove_tree, tier.remove_file):
            with pytest.raises(StorageFailed, match="symbolic link"):
                remove("trash/precious")
        assert tier.list("trash") == []
        assert (outside / "precious").exists()

    def test_files_are_not_read_or_written_through_links(self, tier: PosixTier, outside: Path) -> None:
        """A link in the place of a file is neither followed nor overwritten, save that replace puts a file there."""
        (tier.root / "file").symlink_to(outside / "precious")
        for call in (lambda: tier.read("file"), lambda: tier.put("file", b"x"), lambda: tier.create("file", 1)):
            with pytest.raises(StorageFailed):
                call()
        assert tier.size("file") is None
        tier.replace("file", b"ours")
        assert tier.read("file") == b"ours"
        assert (outside / "precious").read_bytes() == b"precious"

    def test_links_are_not_published(self, tier: PosixTier, outside: Path) -> None:
        """A link to a directory is no directory, and a dangling link is a taken target."""
        (tier.root / "link").symlink_to(outside)
        (tier.root / "dangling").symlink_to(outside / "nothing")
        tier.put("a/file", b"1")
        with pytest.raises(StorageFailed):
            tier.publish("link", "b")
        with pytest.raises(AlreadyCommitted):
            tier.publish("a", "dangling")
        assert tier.list("") == ["a", "dangling", "link"]

    def test_the_root_may_be_a_link(self, tmp_path: Path, outside: Path) -> None:
        """Which directory is the root is for the operator to say."""
        (tmp_path / "alias").symlink_to(outside)
        assert PosixTier(tmp_path / "alias").read("precious") == b"precious"


def test_fifo_does_not_hold_up_a_reader(tier: PosixTier) -> None:
    """What is not a regular file is refused at once."""
    os.mkfifo(tier.root / "pipe")
    with pytest.raises(NoSuchResource):
        tier.read("pipe")
    assert tier.size("pipe") is None
    tier.remove_tree("pipe")
    assert tier.list("") == []


def test_interrupted_replace_is_cleaned_by_the_next(tier: PosixTier) -> None:
    """What a crash left of a replace is not read, and goes with the next replace."""
    (tier.root / ".run.json.new").write_bytes(b"half of a longer te")
    tier.replace("run.json", b"{}")
    assert tier.list("") == ["run.json"]


def test_a_root_that_is_made_is_for_its_user_alone(tmp_path: Path) -> None:
    """Whatever the umask allows. What is there already keeps the permissions that somebody gave it."""
    mask = os.umask(0o002)
    try:
        PosixTier(tmp_path / "deeper" / "root")
        (tmp_path / "open").mkdir(mode=0o755)
        PosixTier(tmp_path / "open")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "deeper" / "root").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o755


def test_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A file in the place of the root is StorageFailed."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageFailed):
        PosixTier(tmp_path / "file")


def test_new_root_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every directory made on the way to the root has its name fsynced in its parent."""
    synced = []
    monkeypatch.setattr(posix, "_fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    PosixTier(tmp_path / "a/b")
    assert set(synced) == {str(tmp_path), str(tmp_path / "a")}


@pytest.mark.parametrize("inside", ["r", "r/checkpoints/step-00000001", "r/checkpoints/step-00000001/data"])
def test_a_run_and_a_checkpoint_are_no_roots(tmp_path: Path, inside: str) -> None:
    """As `--root` of a service with one name too many; nothing is made in there."""
    (tmp_path / naming.ROOT_FILE).touch()
    checkpoint = tmp_path / "r" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    for name in (naming.COMMIT, naming.MANIFEST):
        (checkpoint / name).touch()
    with pytest.raises(InvalidRequest, match="cannot be a root"):
        lock_root(tmp_path / inside)
    assert not (tmp_path / inside / naming.LOCK).exists()
    (checkpoint / naming.MANIFEST).unlink()
    (tmp_path / naming.ROOT_FILE).unlink()
    lock_root(checkpoint).release()  # a file called COMMIT alone makes no checkpoint


def test_a_root_is_no_run_whatever_its_runs_are_called(tmp_path: Path) -> None:
    """A root in another one, with a run called "checkpoints": it was locked out of its own data."""
    (tmp_path / naming.ROOT_FILE).touch()
    inner = tmp_path / "inner"
    (inner / "checkpoints" / "checkpoints").mkdir(parents=True)
    (inner / naming.ROOT_FILE).touch()
    lock_root(inner).release()
    with pytest.raises(InvalidRequest, match="cannot be a root"):
        lock_root(inner / "checkpoints")


class TestLock:
    """One daemon at a time holds a root."""

    def test_second_lock_is_refused_by_name(self, tmp_path: Path) -> None:
        """The error names the process that holds the root, and what to do."""
        lock = lock_root(tmp_path / "root")
        with pytest.raises(RootBusy, match=str(os.getpid())) as caught:
            lock_root(tmp_path / "root")
        assert caught.value.members["pid"] == os.getpid()
        assert caught.value.hint
        lock.release()

    def test_released_lock_can_be_taken_again(self, tmp_path: Path) -> None:
        """Release is final for the holder, harmless twice, and lets the next one in."""
        before = open_descriptors()
        first = lock_root(tmp_path)
        first.release()
        second = lock_root(tmp_path)
        first.release()
        with pytest.raises(RootBusy):
            lock_root(tmp_path)
        second.release()
        assert open_descriptors() == before

    def test_unreadable_holder(self, tmp_path: Path) -> None:
        """A lock file without a process id still says that the root is in use."""
        lock = lock_root(tmp_path)
        (tmp_path / ".holdfast.lock").write_text("?")
        with pytest.raises(RootBusy, match="another process"):
            lock_root(tmp_path)
        lock.release()

    def test_link_in_the_place_of_the_lock(self, tmp_path: Path) -> None:
        """The lock file is never reached through a link."""
        (tmp_path / ".holdfast.lock").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StorageFailed):
            lock_root(tmp_path)

"""COMMIT, manifests and run files are read whole within a bound, and what is no plain file is damage, not absence."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.read.reader import CheckpointReader
from holdfast.read.sources import DirectorySource
from holdfast_files import opened
from holdfast_files.opened import read_bounded
from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.errors import CheckpointError, CorruptManifest, Damaged, LimitExceeded, NotCommitted
from holdfast_service.api.content.open_checkpoints import OpenedCheckpoints
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.checkpoints.run_files import read_run_file
from holdfast_service.daemon.copying import manifest_repair
from holdfast_service.storage import PosixTier
from tests.control.published import a_manifest, put_checkpoint

DIRECTORY = naming.checkpoint_path("run", 5)
ROOM = 1 << 30  # of address space: a file of four gigabytes that is read whole does not fit

_READ = """
import resource, sys
from pathlib import Path
from tests.files.test_opened import READERS, ROOM, used
resource.setrlimit(resource.RLIMIT_AS, (used() + ROOM, -1))
for name, reader in READERS.items():
    try:
        reader(Path(sys.argv[1]))
    except Exception as error:
        print(name, type(error).__name__)
    else:
        print(name, "nothing")
"""


def used() -> int:
    """Bytes of address space that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


READERS = {
    "roots": lambda root: roots.load_manifest(PosixTier(root), "run", 5),
    "opened": lambda root: opened.open_checkpoint(PosixTier(root), DIRECTORY),
    "http": lambda root: OpenedCheckpoints(PosixTier(root), Readers()).open("run", 5),
    "client": lambda root: CheckpointReader.open(DirectorySource(root / DIRECTORY)),
}


@pytest.mark.parametrize("name", [naming.COMMIT, naming.MANIFEST])
@pytest.mark.parametrize("size", [4 << 30, 200 << 20])
def test_no_reader_takes_gigabytes_into_memory(tmp_path: Path, name: str, size: int) -> None:
    """A sparse file under the name of COMMIT or the manifest is damage to every reader, and none runs out of memory."""
    put_checkpoint(PosixTier(tmp_path), a_manifest("run", 5))
    os.truncate(tmp_path / DIRECTORY / name, size)
    done = subprocess.run([sys.executable, "-c", _READ, str(tmp_path)], capture_output=True, text=True, check=True)
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found.keys() == READERS.keys()
    assert set(found.values()) <= {"CorruptManifest", "NotCommitted"}


def _in_place(path: Path, how: str) -> None:
    """Put something else in the place of a file, or of nothing."""
    path.unlink(missing_ok=True)
    if how == "fifo":
        os.mkfifo(path)
    elif how == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if how == "endless" else "elsewhere.json")


@pytest.mark.parametrize("how", ["fifo", "directory", "link", "endless"])
@pytest.mark.parametrize("name", [naming.COMMIT, naming.MANIFEST])
def test_what_is_no_plain_file_is_damage(tmp_path: Path, name: str, how: str) -> None:
    """A link, pipe or directory under the name of COMMIT or the manifest holds nobody up, and everybody calls it damage."""
    tier = PosixTier(tmp_path)
    put_checkpoint(tier, a_manifest("run", 5))
    _in_place(tmp_path / DIRECTORY / name, how)
    for reader in READERS.values():
        with pytest.raises(Damaged):
            reader(tmp_path)
    assert manifest_repair.stored(tier, f"{DIRECTORY}/{name}") == b""


@pytest.mark.parametrize("how", ["fifo", "directory", "link"])
def test_a_run_file_that_is_no_plain_file_is_not_an_absent_one(tmp_path: Path, how: str) -> None:
    """Pins and policy are unknown then, not none: the run file is damaged."""
    tier = PosixTier(tmp_path)
    tier.put("run/other", b"")
    assert read_run_file(tier, "run").pins == ()
    _in_place(tmp_path / "run" / naming.RUN_FILE, how)
    with pytest.raises(CorruptManifest, match="not a regular file"):
        read_run_file(tier, "run")


def test_the_bound_holds_for_what_is_there_when_it_is_read(tmp_path: Path) -> None:
    """Up to the bound a file is read, one byte over it is refused, and nothing is None."""
    tier = PosixTier(tmp_path)
    tier.put("a/file", b"x" * 10)
    assert read_bounded(tier, "a/file", 10) == b"x" * 10
    assert read_bounded(tier, "a/none", 10) is None
    assert read_bounded(tier, "none/file", 10) is None
    with pytest.raises(CorruptManifest, match="over the limit of 9"):
        read_bounded(tier, "a/file", 9)


def test_a_long_manifest_is_proven_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is longer than a reader takes at once is compared with COMMIT piece by piece, and a sound one is handed over."""
    monkeypatch.setattr(opened, "_AT_ONCE_BYTES", 100)
    tier, made = PosixTier(tmp_path), a_manifest("run", 5)
    put_checkpoint(tier, made)
    assert roots.load_manifest(tier, "run", 5) == made
    with (tmp_path / DIRECTORY / naming.MANIFEST).open("r+b") as file:
        file.write(b" ")
    with pytest.raises(CorruptManifest, match="digest"):
        opened.read_manifest(tier, DIRECTORY, opened.read_commit(tier, DIRECTORY))


def test_no_manifest_is_written_that_no_reader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds on both sides."""
    made = a_manifest("run", 5)
    monkeypatch.setattr(manifests, "MANIFEST_BYTES_MAX", len(manifests.encode(made)) - 1)
    with pytest.raises(LimitExceeded, match=naming.MANIFEST):
        manifests.encode(made)


def test_a_commit_that_is_too_long_is_none(tmp_path: Path) -> None:
    """COMMIT over its bound commits nothing."""
    tier = PosixTier(tmp_path)
    tier.put(f"{DIRECTORY}/{naming.COMMIT}", b"x" * (manifests.COMMIT_BYTES_MAX + 1))
    with pytest.raises(NotCommitted):
        opened.read_commit(tier, DIRECTORY)
    assert issubclass(NotCommitted, CheckpointError)

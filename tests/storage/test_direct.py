"""Large files go past the page cache: which writes do, and what happens when the file system refuses."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from holdfast_files.direct import ALIGNMENT
from holdfast_formats.errors import NoSpace, StorageFailed
from holdfast_service.storage import PosixTier, posix
from holdfast_service.storage.posix import DIRECT_BYTES_MIN
from tests.storage.test_posix import failing, open_descriptors
from tests.suites.tier_suite import aligned


@pytest.fixture
def tier(tmp_path: Path) -> PosixTier:
    return PosixTier(tmp_path / "root")


class TestDirectAccess:
    """Large files go past the page cache, where the file system can do that."""

    @pytest.fixture
    def direct(self, tier: PosixTier) -> PosixTier:
        writer = tier.create("probe", DIRECT_BYTES_MIN)
        supported = writer.alignment == ALIGNMENT
        writer.discard()
        if not supported:
            pytest.skip("the file system of the temporary directory has no direct access")
        return tier

    def test_only_aligned_writes_go_past_the_cache(self, direct: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
        """Aligned blocks take the direct descriptor; what is unaligned in offset, length or memory takes the other."""
        taken: list[bool] = []

        def pwritev(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            taken.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
            return os.pwritev(descriptor, buffers, offset)

        monkeypatch.setattr(posix, "_pwritev", pwritev)
        memory = aligned(4 * ALIGNMENT)
        writer = direct.create("file", DIRECT_BYTES_MIN)
        writer.write(ALIGNMENT, [memory[: 2 * ALIGNMENT], memory[:ALIGNMENT]])
        writer.write(1, [memory[:ALIGNMENT]])
        writer.write(0, [memory[:100]])
        writer.write(0, [memory[1 : 1 + ALIGNMENT]])
        writer.finish()
        assert taken == [True, False, False, False]

    def test_small_files_are_buffered(self, tier: PosixTier) -> None:
        """A file that gains nothing from direct access asks for no alignment."""
        writer = tier.create("file", DIRECT_BYTES_MIN - 1)
        assert writer.alignment == 1
        writer.discard()

    def test_a_short_direct_write_is_finished_buffered(self, direct: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
        """A device that takes an odd number of bytes and refuses the rest costs the direct access, and no byte."""
        first = [True]

        def pwritev(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                if not first:
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                first.clear()
                return os.pwritev(descriptor, [buffers[0][:ALIGNMENT]], offset) - 17
            return os.pwritev(descriptor, buffers, offset)

        monkeypatch.setattr(posix, "_pwritev", pwritev)
        memory = aligned(DIRECT_BYTES_MIN)
        memory[:] = np.arange(DIRECT_BYTES_MIN, dtype=np.uint32).astype(np.uint8)
        writer = direct.create("file", DIRECT_BYTES_MIN)
        writer.write(0, [memory])
        assert writer.alignment == 1
        writer.finish()
        assert direct.read("file") == memory.tobytes()

    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
    def test_failing_direct_writes_are_named(self, direct: PosixTier, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        """A disk error is no reason to try the other way: it is raised, and both descriptors are closed."""
        before = open_descriptors()
        writer = direct.create("file", DIRECT_BYTES_MIN)
        monkeypatch.setattr(posix, "_pwritev", failing(code))
        with pytest.raises(NoSpace if code == errno.ENOSPC else StorageFailed):
            writer.write(0, [aligned(ALIGNMENT)])
        writer.discard()
        assert open_descriptors() == before

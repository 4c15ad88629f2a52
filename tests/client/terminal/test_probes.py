"""What doctor tries out, each on what it is there to find."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from holdfast.rest.api import Api
from holdfast.terminal import probes
from holdfast_formats.errors import StorageFailed
from tests.checkpoints import build_root
from tests.serving import served

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /dev/shm rw - tmpfs tmpfs rw
31 22 0:40 / /mnt/with\\040space rw - nfs4 server:/x rw
32 31 0:41 / /mnt/with\\040space/deep rw - fuse.sshfs x rw
not a mount at all
"""


@pytest.mark.parametrize(
    ("place", "kind", "status"),
    [
        ("/home/me", "ext4", "ok"),
        ("/dev/shm/x", "tmpfs", "warn"),
        ("/mnt/with space", "nfs4", "warn"),
        ("/mnt/with space/deep/er", "fuse.sshfs", "warn"),
    ],
)
def test_file_systems(tmp_path: Path, place: str, kind: str, status: str) -> None:
    """The innermost mount counts, with its name unescaped; memory and networks are pointed out."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    found = probes.file_system(Path(place), mounts)
    assert (kind in found.what, found.status, bool(found.advice)) == (True, status, status != "ok")


def test_a_file_system_that_cannot_be_told(tmp_path: Path) -> None:
    """Without the kernel's list there is a warning and no guess."""
    assert probes.file_system(tmp_path, tmp_path / "nothing").status == "warn"


def test_fsync_and_direct_io_leave_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both say what they found; a slow disk and a file system without O_DIRECT are warnings."""
    path = tmp_path / "file"
    path.write_bytes(b"")
    assert "of 16" in probes.fsync(path).what and path.stat().st_size == 4096
    monkeypatch.setattr(probes, "FSYNC_WARN_S", 0.0)
    assert probes.fsync(path).status == "warn"
    opened = os.open

    def refuses(name: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(name, flags, *rest)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", refuses)
    assert probes.direct_io(path).status == "warn"


def test_few_descriptors_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """With too few, the advice says how many; no limit is as good as many."""
    for soft, status in ((256, "warn"), (4096, "ok"), (resource.RLIM_INFINITY, "ok")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert probes.descriptors().status == status


def test_the_service_is_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version, way and catalog each have a line; a slow way, another version and a dead catalog are pointed out."""
    build_root(tmp_path, {"tiny": (5,)})
    with served(tmp_path) as running, Api(running.url) as api:
        found = {f.name: f for f in probes.service(api, "9.9.1")}
        assert {name: f.status for name, f in found.items()} == {"service": "ok", "network": "ok", "catalog": "ok"}
        monkeypatch.setattr(probes, "ROUND_TRIP_WARN_S", 0.0)

        def dead() -> dict[str, int]:
            raise StorageFailed("the catalog: it is gone", hint="mend it")

        monkeypatch.setattr(running.services.control.catalog.rounds, "counts", dead)
        found = {f.name: f for f in probes.service(api, "1.0.0")}
        assert [found[name].status for name in ("versions", "network", "catalog")] == ["warn", "warn", "fail"]
        assert found["catalog"].advice == "mend it"

"""Small disks of a test's own, which root may make and fill: an ext4 in a file, and memory of a limited size."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND_TIMEOUT_S = 180


def command(*words: object) -> str:
    """Run a command of the system; its output."""
    done = subprocess.run(
        [str(word) for word in words], check=True, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
    )
    return done.stdout.strip()


@contextmanager
def attached(file: Path, at: Path) -> Iterator[Path]:
    """The ext4 in a file, mounted; without the writes by which ext4 makes up for programs that do not sync."""
    device = command("losetup", "-f", "--show", file)
    try:
        with mounted(at, "-t", "ext4", "-o", "noauto_da_alloc", device):
            yield at
    finally:
        command("losetup", "-d", device)


@contextmanager
def mounted(at: Path, *how: object) -> Iterator[Path]:
    """What mount(8) makes of `how`, at a directory."""
    command("mount", *how, at)
    try:
        yield at
    finally:
        _unmount(at)


def _unmount(at: Path) -> None:
    """What a process that was killed had open is closed a moment after it has ended."""
    limit = time.monotonic() + COMMAND_TIMEOUT_S
    while True:
        try:
            command("umount", at)
            return
        except subprocess.CalledProcessError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.1)


@contextmanager
def memory_disk(at: Path, size: str) -> Iterator[Path]:
    """A tmpfs of a limited size at a directory, which is made."""
    at.mkdir()
    with mounted(at, "-t", "tmpfs", "-o", f"size={size}", "tmpfs"):
        yield at

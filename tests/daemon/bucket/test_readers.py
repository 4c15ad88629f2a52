"""What a daemon has written into a bucket, commands read without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.daemon.bucket.test_bucket_root import RUN, save, served, settings
from tests.kit.commands import call, call_json, no_service
from tests.kit.objects import TestBucket

__all__ = ["no_service", "settings"]

pytestmark = pytest.mark.usefixtures("no_service")


def test_commands_read_what_a_daemon_wrote(bucket: TestBucket, tmp_path: Path) -> None:
    """After its end: list, verify, compare, download and pipe; the download is the directory, byte for byte."""
    place = f"{bucket.url}/team"
    with served(tmp_path / "state", place) as daemon:
        saved = save(daemon, 3, 7)
    assert [run["name"] for run in call_json("ls", "--root", place)] == [RUN]
    assert [one["step"] for one in call_json("ls", RUN, "--root", place)] == [7, 3]
    assert call_json("verify", f"{place}/{RUN}@latest")["intact"]
    assert call_json("diff", f"{RUN}@3", "7", "--root", place)["relative"] in (0, None)
    out, piped = tmp_path / "out", tmp_path / "piped"
    assert call("export", f"{RUN}@7", out, "--root", place).exit_code == 0
    assert call("verify", out).exit_code == 0
    assert bool((load_file(out / "model.safetensors")["weight"] == saved["model"].weight).all())
    piped.mkdir()
    program = [Path(sys.executable).with_name("holdfast"), "export", f"{place}/{RUN}@7", "-"]
    archive = subprocess.run(program, capture_output=True, check=False)
    assert archive.returncode == 0, archive.stderr
    subprocess.run(["tar", "-x", "-C", piped], input=archive.stdout, check=True)
    top = f"team/{RUN}/data/"
    stored = {key.rpartition("/")[2]: bucket.read(key) for key in bucket.sizes(top) if "/step-00000007." in key}
    for directory in (out, piped):
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == stored

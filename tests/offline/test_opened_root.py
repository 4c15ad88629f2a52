"""Work on a root in a bucket that no daemon does: imports, repairs, the catalog, and tokens; and who may not."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from holdfast_formats import naming
from tests.checkpoints import build
from tests.daemons import running
from tests.kit.bucket_roots import upload
from tests.kit.commands import call, call_json, no_service
from tests.kit.objects import TestBucket

__all__ = ["no_service"]

RUN = "tiny"
BUSY = 4  # the exit status of what is in use

pytestmark = pytest.mark.usefixtures("no_service")


@pytest.fixture
def place(moto_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The address of a root in a bucket, which this machine has never served, with step 5 of a run."""
    for name, value in moto_bucket.server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))
    held = {"model": {"weight": np.arange(24, dtype=np.float32)}, "extra": {}}
    build(tmp_path / "root" / naming.checkpoint_path(RUN, 5), held, run=RUN, step=5)
    return upload(tmp_path / "root", moto_bucket, "team")


def _source(tmp_path: Path) -> Path:
    return tmp_path / "root" / naming.checkpoint_path(RUN, 5)


def test_an_import_into_a_bucket(place: str, tmp_path: Path, moto_bucket: TestBucket) -> None:
    """Without a daemon; a dry run writes nothing. The catalog of this machine is then checked, and made again."""
    before = moto_bucket.sizes()
    assert call("import", _source(tmp_path), f"{RUN}@7", "--dry-run", "--root", place).exit_code == 0
    assert {key for key in moto_bucket.sizes() if "data" in key} == {key for key in before if "data" in key}
    made = call("import", _source(tmp_path), f"{RUN}@7", "--root", place)
    assert made.exit_code == 0, made.output
    assert call("verify", f"{RUN}@7", "--root", place).exit_code == 0
    checked = call_json("catalog", "check", "--root", place)
    assert checked["sound"] and checked["checkpoints"] == 2
    shutil.rmtree(tmp_path / "state-home")
    rebuilt = call_json("catalog", "rebuild", "--root", place)
    assert rebuilt["checkpoints"] == 2 and not rebuilt["left"]
    assert f"team/{naming.OWNER}" not in moto_bucket.sizes()


def test_a_repair_in_a_bucket(place: str, tmp_path: Path, moto_bucket: TestBucket) -> None:
    """From a directory; what is read is checked, and other bytes are published in the place of the damaged ones."""
    (damaged,) = [key for key in moto_bucket.sizes() if key.endswith("/model.safetensors")]
    moto_bucket.put(damaged, moto_bucket.read(damaged)[:-1] + b"x")
    assert call("verify", f"{RUN}@5", "--root", place).exit_code != 0
    repaired = call("repair", f"{RUN}@5", "--root", place, "--from", tmp_path / "root")
    assert repaired.exit_code == 0 and "model.safetensors" in repaired.output, repaired.output
    assert call("verify", f"{RUN}@5", "--root", place).exit_code == 0


def test_a_daemon_serves_the_bucket(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does imports itself, found by the bucket's address; the catalog is its own; tokens are made beside it."""
    state = tmp_path / "state"
    refused = call("token", "create", "ci", "--root", place)
    assert refused.exit_code != 0 and "HOLDFAST_STATE" in refused.output and not state.exists()
    monkeypatch.setenv("HOLDFAST_STATE", str(state))
    with running(state, "--root", place, "--state", str(state), listen="127.0.0.1:0") as daemon:
        token = call("token", "create", "ci", "--root", place)
        assert token.exit_code == 0, token.output
        assert [one["name"] for one in call_json("token", "ls", "--root", place)] == ["ci"]
        assert "ci" in call("token", "ls", "--url", daemon.url).output
        for words in (("check",), ("rebuild",), ("adopt",)):
            busy = call("catalog", *words, "--root", place)
            assert busy.exit_code == BUSY and "is in use" in " ".join(busy.output.split()), busy.output
        elsewhere = tmp_path / "elsewhere"
        monkeypatch.setenv("HOLDFAST_STATE", str(elsewhere))
        busy = call("catalog", "adopt", "--root", place)
        assert busy.exit_code == BUSY and "is in use by the daemon of" in " ".join(busy.output.split()), busy.output


def test_its_own_daemon_imports_into_the_bucket(place: str, tmp_path: Path) -> None:
    """It is found where a daemon of this machine keeps what is its own of that bucket."""
    from holdfast.terminal.options import NamedRoot

    state = NamedRoot.parse(place).daemons
    state.mkdir(parents=True)
    with running(state, "--root", place, "--socket", str(tmp_path / "socket"), listen="127.0.0.1:0"):
        made = call("import", _source(tmp_path), f"{RUN}@7", "--root", place)
        assert made.exit_code == 0, made.output
        assert call("verify", f"{RUN}@7", "--root", place).exit_code == 0

"""What a scrub finds of a served root: every flipped bit, by name; `latest` moves on. Dying in it harms nothing (I7)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.disk import verification
from holdfast_formats.errors import Damaged
from holdfast_service.daemon.saving.saver import Saver
from holdfast_service.daemon.scrub import Scrub, ScrubPlan
from tests.checking import RUN, Checked, Copies, checked_root
from tests.checkpoints import build_root, flip
from tests.crash import ledger
from tests.daemons import RunningDaemon, running, wait_until
from tests.in_memory import in_memory

FLIPS_OF_A_FILE, FLIPS_SLOW = 2, 200
LANE = "flips under a scrub"
UNLISTED = (naming.COMMIT, naming.MANIFEST)
FAST = ("--scrub-bytes-per-second", "1000000000", "--scrub-every", "0.2")
STOPS = Path(__file__).with_name("stops")


@pytest.fixture
def root() -> Iterator[Checked]:
    with in_memory() as directory, checked_root(directory / "root", (1, 2)) as made:
        yield made


@pytest.fixture
def scrub(root: Checked) -> Iterator[Scrub]:
    """A scrub that is asked for; by itself it does nothing."""
    with (
        closing(Saver(root.tier, root.control, "node", root.checker)) as saver,
        closing(Scrub(root.checker, root.control, saver, ScrubPlan(None, None))) as scrub,
    ):
        root.control.watch.suspected.subscribe(saver.checks.suspect)
        yield scrub


def places(root: Checked, more: int = 0) -> Iterator[tuple[str, int, int]]:
    """Random bits of the newest checkpoint, some of each file and `more` of all: file, byte, bit."""
    chance = random.Random(7)
    files = {path.name: path.stat().st_size for path in sorted(root.path(2).iterdir()) if path.stat().st_size}
    names = [*files] * FLIPS_OF_A_FILE + chance.choices([*files], [*files.values()], k=more)
    for name in names:
        yield name, chance.randrange(files[name]), chance.randrange(8)


@pytest.mark.parametrize("more", [0, pytest.param(FLIPS_SLOW, marks=pytest.mark.crash_slow)])
def test_every_flip_is_found_and_latest_moves_on_and_back(root: Checked, scrub: Scrub, more: int) -> None:
    """Bits at random places of every file: each is named, with tensor and range; mended, the newest is the newest again."""
    pieces = verification.pieces(root.built[RUN, 2].manifest)
    for name, offset, bit in places(root, more):
        ledger.tried(LANE)
        flip(root.path(2) / name, offset, bit)
        assert scrub.scrub(RUN).damaged == (f"{RUN}@2",), (name, offset, bit)
        damage = root.known(2).damage
        assert damage is not None and (damage["run"], damage["step"]) == (RUN, 2)
        if name in UNLISTED:
            assert damage["file"] in UNLISTED
        else:
            (piece,) = verification.overlapping(pieces[name], offset, offset + 1)
            assert (damage["file"], damage["tensor"]) == (name, piece.tensor)
            assert damage["offset"] <= offset < damage["offset"] + damage["length"]
        assert root.catalog.newest(RUN) == 1
        flip(root.path(2) / name, offset, bit)
        assert scrub.scrub(RUN).damaged == ()
        assert root.catalog.newest(RUN) == 2 and root.known(2).state == "verified"
        ledger.survived(LANE)


def test_every_flip_is_repaired_where_there_is_a_copy(root: Checked, scrub: Scrub) -> None:
    """With somebody who has the bytes, nothing is ever marked."""
    root.checker.repair = Copies(root).repair
    for name, offset, bit in places(root):
        ledger.tried(LANE)
        flip(root.path(2) / name, offset, bit)
        assert scrub.scrub(RUN).damaged == ()
        assert root.known(2).state == "verified"
        ledger.survived(LANE)
    assert root.events("checkpoint-damaged") == []


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A root that no catalog knows of yet."""
    build_root(tmp_path / "root", {RUN: (1, 2)})
    return tmp_path / "root"


def a_byte(root: Path, step: int) -> tuple[Path, int]:
    """A shard file of a checkpoint, and a place in it that holds a tensor's bytes."""
    directory = root / naming.checkpoint_path(RUN, step)
    path = max(directory.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    return path, path.stat().st_size - 1


def test_a_real_daemon_scrubs(plain: Path) -> None:
    """What stands in the directory is checked though no catalog knew it; then a flip is found, without being asked for."""
    with running(plain, *FAST, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        wait_until(lambda: all(made.verified for made in api.checkpoints(RUN)))
        flip(*a_byte(plain, 2))
        wait_until(lambda: api.checkpoint(RUN, 2).state == "damaged")
        found = api.checkpoint(RUN, 2)
        assert (found.damage or {})["file"] == a_byte(plain, 2)[0].name
        assert api.checkpoint(RUN, "latest").step == 1
        flip(*a_byte(plain, 2))
        wait_until(lambda: api.checkpoint(RUN, "latest").step == 2)


def test_a_download_that_meets_damage_has_it_marked(plain: Path) -> None:
    """Nobody scrubs, and somebody reads: the answer is the damage, and `latest` moves on."""
    with running(plain, "--scrub-bytes-per-second", "none", listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        wait_until(lambda: all(made.verified for made in api.checkpoints(RUN)))
        path, offset = a_byte(plain, 2)
        flip(path, offset)
        with pytest.raises(Damaged):
            api.file_range(RUN, 2, path.name, offset, memoryview(bytearray(1)))
        wait_until(lambda: api.checkpoint(RUN, "latest").step == 1)
        (plain / naming.checkpoint_path(RUN, 1) / naming.MANIFEST).write_bytes(b"?")
        assert httpx.get(f"{daemon.url}/v1/runs/{RUN}/checkpoints/1/manifest").status_code == 500
        wait_until(lambda: api.checkpoint(RUN, 1).state == "damaged")
        answer = httpx.get(f"{daemon.url}/v1/runs/{RUN}/checkpoints/latest").json()
        assert answer["code"] == "no-such-checkpoint" and "no sound" in answer["detail"]


def test_a_daemon_killed_in_a_check_checks_again(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies after it has read everything and before it says so: the next one begins anew, and nothing is damaged."""
    marks = tmp_path / "marks"
    marks.mkdir()
    (marks / "armed").touch()
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(STOPS), os.environ.get("PYTHONPATH")])))
        patch.setenv("CRASH_POINT", "mid check")
        patch.setenv("CRASH_DIRECTORY", str(marks))
        daemon = RunningDaemon(plain)
        wait_until(lambda: (marks / "hit").exists())
        daemon.kill()
    with running(plain, listen="127.0.0.1:0") as successor, Api(successor.url) as api:
        wait_until(lambda: all(made.verified for made in api.checkpoints(RUN)))


def test_a_daemon_killed_in_a_scrub_leaves_what_was_known(plain: Path) -> None:
    """A scrub so slow that it never ends is killed: what was verified is so still, and the next daemon goes on."""
    with running(plain, "--scrub-bytes-per-second", "none", listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        wait_until(lambda: all(made.verified for made in api.checkpoints(RUN)))
    slow = RunningDaemon(plain, "--scrub-bytes-per-second", "1", "--scrub-every", "0.01")
    time.sleep(1.0)
    slow.kill()
    with running(plain, *FAST, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        before = [made.checked for made in api.checkpoints(RUN)]
        assert all(made.state == "verified" for made in api.checkpoints(RUN))
        wait_until(lambda: all(made.checked not in before for made in api.checkpoints(RUN)))
        assert all(made.state == "verified" for made in api.checkpoints(RUN))

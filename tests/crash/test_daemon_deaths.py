"""The daemon dies by SIGKILL, at any moment: what all ranks had sealed the next one commits, once; training goes on."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.link.roots import answers
from holdfast.read.directory_root import committed_steps
from holdfast_formats import naming
from holdfast_service.daemon.arena import fd_keeper, holder
from tests.crash.launches import Ranks, check_sound, holders, kill_all, processes
from tests.crash.points import Place, place, stop_at
from tests.daemons import RunningDaemon, wait_until
from tests.forked import Forked

__all__ = ["place"]

SIZE = 20_000_003


def launch(daemon: RunningDaemon | SimpleNamespace, steps: str) -> Ranks:
    return Ranks(daemon.socket, steps, SIZE)


def check_all(daemon: RunningDaemon, steps: set[int]) -> None:
    """These steps and no others are visible, sound, committed once, and nothing else is left of their saving."""
    root = daemon.root
    wait_until(lambda: steps <= set(committed_steps(root, "r")))
    wait_until(lambda: not any((root / "r" / naming.STAGING).iterdir()))
    told = re.findall(r"r@(\d+) attempt \d+ committed", daemon.log.read_text())
    assert len(told) == len(set(told)), "a step was committed twice"
    check_sound(root, steps, SIZE)


@pytest.fixture
def root(tmp_path: Path):
    """A directory to serve; afterwards no holder process must be left, nor anything that a failed test started."""
    yield tmp_path / "root"
    kill_all()
    for pid in processes(tmp_path, b"\0holdfast_service\0"):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: holders(tmp_path) == [])
    assert not list(tmp_path.glob("*.holder"))


@pytest.mark.crash_slow
def test_daemons_killed_at_random_moments_while_ranks_save(root: Path) -> None:
    """Six daemons die under two ranks that save all the while: every step is committed, once, and no save is refused."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    steps = range(1, 25)
    daemon = RunningDaemon(root)
    world = launch(daemon, ",".join(map(str, steps)))
    for death in range(6):
        world.wait_for(f"sealed {3 * death + 1}", 0)
        time.sleep(chance.uniform(0, 0.3))
        daemon.kill()
        daemon = RunningDaemon(root)
    world.wait_for(f"committed {steps[-1]}")
    for said in world.said:
        assert not [line for line in said if line.split()[0] in ("aborted", "refused", "lost")], (seed, said)
        assert sorted(int(line.split()[1]) for line in said if line.startswith("committed")) == list(steps), seed
    check_all(daemon, set(steps))
    world.end(killed=False)
    assert daemon.stop() == 0


@pytest.mark.parametrize("told", [False, True], ids=["nobody-told", "all-told"])
@pytest.mark.parametrize("flags", [(), ("--arena-bytes-max", "1000000")], ids=["memory", "spilled"])
def test_everybody_killed_after_the_seals(root: Path, told: bool, flags: tuple[str, ...]) -> None:
    """Daemon and ranks die together; what stood sealed is committed by the next daemon, from the holder."""
    daemon = RunningDaemon(root, *flags)
    world = launch(daemon, "1,7!leased")
    world.wait_for("committed 1")
    world.wait_for("leased 7")
    assert ("staging uses" in daemon.log.read_text()) == bool(flags)
    if not told:  # the seals stand in shared memory, but no daemon ever hears of them
        daemon.freeze()
    world.go()
    world.wait_for("sealed 7" if told else "asking 7")
    os.kill(daemon.process.pid, signal.SIGKILL)
    world.end()
    daemon.process.wait()
    assert len(holders(root.parent)) == 1
    daemon = RunningDaemon(root, *flags)
    check_all(daemon, {1, 7})
    after = launch(daemon, "8")
    after.wait_for("committed 8")
    after.end(killed=False)
    assert daemon.stop() == 0


def test_a_holder_that_is_left_alone_starts_a_daemon(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemon and ranks are killed and no daemon comes: the holder starts one, as the one before was started, to commit what
    stood sealed. The holder is an impatient one, so that the test need not be patient.
    """
    source = Path(holder.__file__).read_text()
    for name, value in {"ALONE_S": "2.0", "LINGER_S": "90.0"}.items():
        source, times = re.subn(rf"^{name} = .*$", f"{name} = {value}", source, flags=re.MULTILINE)
        assert times == 1
    impatient = root.parent / "holder.py"
    impatient.write_text(source)
    monkeypatch.setattr(holder, "__file__", str(impatient))
    root.mkdir()
    path = fd_keeper.holder_path(root.parent / "root.sock", root.resolve())
    fd_keeper._start(path)
    daemon = RunningDaemon(root)
    world = launch(daemon, "1,7!leased")
    world.wait_for("committed 1")
    world.wait_for("leased 7")
    daemon.freeze()
    world.go()
    world.wait_for("asking 7")
    daemon.kill()
    world.end()
    wait_until(lambda: sorted(committed_steps(root, "r")) == [1, 7])
    assert "adopted r@7" in path.with_suffix(".log").read_text()
    for pid in (*processes(root.parent, b"\0holdfast_service\0"), *holders(root.parent)):
        os.kill(pid, signal.SIGKILL)
    path.unlink()


def sockets(directory: Path) -> dict[str, int]:
    """The sockets in a directory, and their inodes."""
    return {path.name: path.stat().st_ino for path in directory.iterdir() if path.is_socket()}


def test_a_daemon_of_a_container_is_started_again_with_what_was_staged(root: Path) -> None:
    """The image's first process is the holder: the daemon below it is killed after its ranks were, and the step is committed
    without anybody's doing. A signal ends both, with the daemon's status.
    """
    flags = ["--root", root, "--socket", root.parent / "root.sock", "--listen", "none"]
    with open(root.parent / "log", "wb") as log:
        above = Forked(["-m", "holdfast_service.offline.supervise", *flags], output=log.fileno(), kind="daemon")

    def served() -> int | None:
        """The daemon that serves the root now."""
        try:
            found = int(json.loads((root / naming.DAEMON_FILE).read_text())["pid"])
        except (OSError, ValueError):
            return None
        return found if answers(root.parent / "root.sock") else None

    wait_until(lambda: served() is not None)
    first = served()
    assert first is not None and first != above.pid
    there = sockets(root.parent)
    assert len(there) == 3, "its own, that of its holder, and the one at which that hears of it"
    with open(root.parent / "second", "wb") as log:
        second = Forked(["-m", "holdfast_service.offline.supervise", *flags], output=log.fileno(), kind="daemon")
    assert second.wait(180) == 4 and "root-busy" in (root.parent / "second").read_text()
    assert sockets(root.parent) == there, "a second container with the same volumes leaves the first one alone"
    world = launch(SimpleNamespace(socket=root.parent / "root.sock"), "1,7!leased")
    world.wait_for("committed 1")
    world.wait_for("leased 7")
    os.kill(first, signal.SIGSTOP)
    world.go()
    world.wait_for("asking 7")
    world.end()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: sorted(committed_steps(root, "r")) == [1, 7])
    wait_until(lambda: served() not in (None, first))  # what was sealed is committed before the next daemon serves
    assert "restarts in" in (root.parent / "log").read_text()
    above.terminate()
    assert above.wait(180) == 0 and processes(root.parent, b"\0holdfast_service\0") == []


def test_a_container_that_stops_has_another_daemon_write_what_one_that_hangs_does_not(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its main thread hears no signal any more: it is killed within the grace of an engine, and the save is committed."""
    stop_at("main loop", place, monkeypatch)
    flags = ["--root", place.root, "--socket", place.root.with_name("root.sock"), "--listen", "none"]
    with open(place.root.with_name("log"), "wb") as log:
        slow = ["--write-bytes-per-second", "4000000"]  # 10 s for a save
        above = Forked(["-m", "holdfast_service.offline.supervise", *flags, *slow], output=log.fileno(), kind="daemon")
    wait_until(lambda: "serving" in place.root.with_name("log").read_text())
    world = launch(SimpleNamespace(socket=place.root.with_name("root.sock")), "1!leased")
    world.wait_for("leased 1")
    (place.marks / "armed").touch()
    wait_until(lambda: place.stopped is not None)
    world.go()
    world.wait_for("sealed 1")
    world.end()
    above.terminate()
    above.wait(180)
    assert sorted(committed_steps(place.root, "r")) == [1]
    assert "has been silent for 4 s and is killed; staged saves are kept" in place.root.with_name("log").read_text()


def test_one_rank_short_of_sealed_is_no_checkpoint(root: Path) -> None:
    """Rank 1 was never heard to seal and is dead with the daemon: a new launch starts from the step before, and saves."""
    daemon = RunningDaemon(root)
    world = launch(daemon, "1,7!leased")
    world.wait_for("committed 1")
    world.wait_for("leased 7")
    world.go(0)
    world.wait_for("sealed 7", 0)
    daemon.kill()
    world.end()
    daemon = RunningDaemon(root)
    assert committed_steps(root, "r") == [1]
    after = launch(daemon, "7")
    after.wait_for("committed 7")
    check_all(daemon, {1, 7})
    after.end(killed=False)
    assert daemon.stop() == 0


def test_without_a_holder_the_ranks_bring_their_memory(root: Path) -> None:
    """The holder dies with the daemon: the ranks' own descriptors are enough for the next daemon to commit."""
    daemon = RunningDaemon(root)
    world = launch(daemon, "1,7!leased,8")
    world.wait_for("committed 1")
    world.wait_for("leased 7")
    for pid in holders(root.parent):
        os.kill(pid, signal.SIGKILL)
    daemon.kill()
    world.go()
    world.wait_for("asking 7")
    daemon = RunningDaemon(root)
    world.wait_for("committed 8")
    check_all(daemon, {1, 7, 8})
    world.end(killed=False)
    assert daemon.stop() == 0


def test_a_trainer_replaces_its_embedded_daemon(tmp_path: Path) -> None:
    """The daemon that trainers started is killed: the open save is committed and the next ones go on, with no exception."""
    torch = pytest.importorskip("torch")
    from holdfast import Checkpointer
    from holdfast.link.roots import running_socket

    def pid() -> int:
        import json

        return int(json.loads((tmp_path / "data" / naming.DAEMON_FILE).read_text())["pid"])

    state = {"x": torch.ones(1_000_000)}
    with Checkpointer("r", state, at=tmp_path / "data") as checkpointer:
        checkpointer.save(1, wait="durable")
        first = pid()
        ticket = checkpointer.save(2)
        os.kill(first, signal.SIGKILL)
        assert ticket.result(180).step == 2
        assert checkpointer.save(3, wait="durable").done
        second = pid()
        assert second != first and running_socket(tmp_path / "data") is not None
        assert checkpointer.restore() == 3
    os.kill(second, signal.SIGTERM)

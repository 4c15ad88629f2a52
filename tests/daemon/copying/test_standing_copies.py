"""Looks at copies in a tier; what follows from them is in `tests/control/retention/test_tier_retention.py`."""

from __future__ import annotations

import threading
from pathlib import Path

from holdfast_formats import naming
from holdfast_service.storage import PosixTier
from tests.daemon.copies_world import RUN, CopiesWorld, contents, copies

world = copies((5, 10), copied=True)


class Hanging(PosixTier):
    """A directory whose files have no sizes until it is told to go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked = 0
        self.goes = threading.Event()

    def size(self, path: str) -> int | None:
        self.asked += 1
        assert self.goes.wait(180)
        return super().size(path)


def test_all_that_stands_is_seen(world: CopiesWorld) -> None:
    """Nothing is said of copies that are whole."""
    assert world.replicators["far"].standing.look(RUN, (5, 10), 180.0) == {}


def test_a_copy_of_another_checkpoint_is_none(world: CopiesWorld, tmp_path: Path) -> None:
    """It does not count, and is left as it is."""
    directory = tmp_path / "far" / naming.checkpoint_path(RUN, 5)
    for name, data in contents(tmp_path / "far" / naming.checkpoint_path(RUN, 10)).items():
        (directory / name).write_bytes(data)
    before = contents(directory)
    found = world.replicators["far"].standing.look(RUN, (5, 10), 180.0)
    assert found == {5: "is another checkpoint of this step"} and world.states(5) == {"far": "copying"}
    assert contents(directory) == before


def test_a_lost_file_is_told(world: CopiesWorld, tmp_path: Path) -> None:
    """By its name, once; so is a manifest of another length. Both copies are due to be read back."""
    (tmp_path / "far" / naming.checkpoint_path(RUN, 5) / naming.STATE).unlink()
    manifest = tmp_path / "far" / naming.checkpoint_path(RUN, 10) / naming.MANIFEST
    manifest.write_bytes(manifest.read_bytes() + b" ")
    for _ in range(2):
        found = world.replicators["far"].standing.look(RUN, (5, 10), 180.0)
        assert found[5].startswith("is damaged: state.json is missing")
        assert found[10].startswith("is damaged: manifest.json has")
    assert world.states(5) == world.states(10) == {"far": "damaged"}
    told = world.control.events.after(0, 100, kind="replica-failed")
    assert [(event.step, event.level) for event in told] == [(5, "error"), (10, "error")]
    world.copy()
    assert world.states(5) == world.states(10) == {"far": "present"}


def test_a_tier_that_hangs_holds_a_caller_up_once(world: CopiesWorld, tmp_path: Path) -> None:
    """Later looks say at once that it cannot be looked at, until it answers."""
    replicator = world.replicators["far"]
    hanging = Hanging(tmp_path / "far")
    slow = world.add("slow", hanging)
    hanging.goes.set()
    world.copy("slow")
    hanging.goes.clear()
    away = {5: "cannot be looked at now", 10: "cannot be looked at now"}
    assert slow.standing.look(RUN, (5, 10), 0.2) == away
    asked = hanging.asked
    assert slow.standing.look(RUN, (5, 10), 180.0) == away and hanging.asked == asked
    hanging.goes.set()
    assert slow.standing._looking is not None
    slow.standing._looking.join(180)
    assert slow.standing.look(RUN, (5, 10), 180.0) == {} == replicator.standing.look(RUN, (5, 10), 180.0)

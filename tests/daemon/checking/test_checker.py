"""The restore check: everything is read, other layouts are tried, frozen saves told of, damage mended or marked (I7)."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast_formats import naming
from holdfast_formats.errors import (
    CorruptExtent,
    CorruptManifest,
    Damaged,
    NoSuchCheckpoint,
    NotCommitted,
    RoundAborted,
)
from holdfast_service.daemon.checking.checker import Checks
from holdfast_service.daemon.saving import read_throttle
from tests.checking import RUN, Checked, Copies, checked_root
from tests.checkpoints import build, flip, varied_arrays
from tests.daemon.saver_world import saver_world
from tests.daemons import wait_until


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Checked]:
    with checked_root(tmp_path / "root") as made:
        yield made


def damaged_tensor(root: Checked, step: int) -> tuple[str, int]:
    """Flip a bit of a tensor: its name, and where its first extent begins in its file."""
    name, entry = next((n, e) for n, e in root.built[RUN, step].manifest.tensors["model"].items() if e.nbytes)
    flip(root.path(step) / entry.file, entry.start)
    return name, entry.start


def test_a_sound_one_is_verified_and_says_what_was_done(root: Checked) -> None:
    """Time, bytes and the layouts that were tried stand beside it; another check of it is no other event."""
    assert (root.known(2).checked, root.known(2).state) == (None, "committed")
    done = root.checker.check(RUN, 2)
    found = root.known(2)
    assert (found.state, found.check, found.damage) == ("verified", done, None)
    assert found.checked is not None and found.check["bytes"] == found.bytes
    assert len(found.check["layouts"]) == 2 and all(" rank " in text for text in found.check["layouts"])
    assert root.checker.check(RUN, 2)["layouts"] == done["layouts"]
    assert root.events("checkpoint-verified") == [2]


def test_damage_is_named_marked_and_told_once(root: Checked) -> None:
    """Run, step, file, tensor and range; `latest` is the one before; the same damage found again is no news."""
    for step in (1, 2, 3):
        root.checker.check(RUN, step)
    name, offset = damaged_tensor(root, 3)
    for _ in range(2):
        with pytest.raises(CorruptExtent):
            root.checker.check(RUN, 3)
    found = root.known(3)
    assert (found.state, found.verified) == ("damaged", False)
    assert found.damage is not None
    assert [found.damage[key] for key in ("run", "step", "tensor", "offset")] == [RUN, 3, name, offset]
    assert (root.catalog.newest(RUN), root.catalog.run(RUN).newest) == (2, 2)
    assert root.events("checkpoint-damaged") == [3]
    assert root.control.restores.choose(RUN, 1, 0, None, ()) == 2
    assert f"step 3 is damaged ({found.damage['detail']})" in root.control.findings.passed_over(RUN, 2)[0]


def test_a_later_check_clears_the_mark(root: Checked) -> None:
    """Mended by hand, it is verified again, and the newest again."""
    damaged_tensor(root, 3)
    with pytest.raises(Damaged):
        root.checker.check(RUN, 3)
    damaged_tensor(root, 3)  # the same bit turns back
    root.checker.check(RUN, 3)
    assert root.known(3).state == "verified" and root.catalog.newest(RUN) == 3


@pytest.mark.parametrize("name", [naming.COMMIT, naming.MANIFEST])
def test_damage_of_what_vouches_for_the_rest(root: Checked, name: str) -> None:
    """COMMIT or the manifest: the check says so, the row stays with all that was known, also over a new start."""
    (root.path(3) / name).write_bytes(b"?")
    with pytest.raises((NotCommitted, CorruptManifest)):
        root.checker.check(RUN, 3)
    before = root.known(3)
    root.control.recovery.recover()
    found = root.known(3)
    assert found.state == "damaged" and (found.created, found.bytes) == (before.created, before.bytes)
    assert (found.damage or {})["file"] == name
    assert root.control.restores.choose(RUN, 1, 0, None, ()) == 2


def test_nobody_starts_from_nothing_because_all_is_damaged(root: Checked) -> None:
    """With no sound checkpoint left, the question what to restore is answered with the damage of the newest."""
    for step in (1, 2, 3):
        damaged_tensor(root, step)
        with pytest.raises(Damaged):
            root.checker.check(RUN, step)
    with pytest.raises(CorruptExtent) as caught:
        root.control.restores.choose(RUN, 1, 0, None, ())
    assert "no sound checkpoint" in caught.value.hint


def test_a_repair_is_asked_first_and_proven(root: Checked) -> None:
    """Two damaged files are mended one after the other, read again, and nothing is marked."""
    copies = Copies(root)
    root.checker.repair = copies.repair
    damaged_tensor(root, 3)
    (root.path(3) / "config.json").unlink()
    done = root.checker.check(RUN, 3)
    assert done["repaired"] == ["replica copy"] * 2 and root.known(3).state == "verified"
    assert {type(error) for error in copies.asked} == {CorruptExtent, CorruptManifest}
    assert root.events("checkpoint-damaged") == []
    assert root.checker.counts.all()["repaired"] == 2


def test_a_repair_that_does_not_help_ends(root: Checked) -> None:
    """Who says that it repaired and did not is not asked for ever."""

    class Liar:
        def repair(self, run: str, step: int, error: Damaged) -> str | None:
            return "nowhere"

    root.checker.repair = Liar().repair
    damaged_tensor(root, 3)
    with pytest.raises(CorruptExtent):
        root.checker.check(RUN, 3)
    assert root.known(3).state == "damaged"


def test_what_is_removed_while_it_is_read_is_not_damaged(root: Checked) -> None:
    """Without a hold a removal goes ahead; the check ends with that, and marks nothing."""

    def remove(size: int) -> None:
        if root.path(3).exists():
            root.control.rotation.remove(RUN, 3, newest=True)

    with pytest.raises(NoSuchCheckpoint):
        root.checker.check(RUN, 3, remove, hold=False)
    assert root.events("checkpoint-damaged") == []


def test_a_frozen_save_is_told(tmp_path: Path) -> None:
    """Bit-identical tensors of training: a warning says what it may mean. Random streams and counters aside do not count."""
    with checked_root(tmp_path / "root", (1, 2)) as root:
        shutil.rmtree(root.path(2))
        build(root.path(2), {**varied_arrays(), "extra": {"ranks/00000/rng": np.arange(9)}}, run=RUN, step=2, aliases={})
        build(root.path(3), varied_arrays(seed=1), run=RUN, step=3, aliases={})
        root.control.recovery.recover()
        for step in (1, 2, 3):
            root.checker.check(RUN, step)
        assert [root.known(step).same_as for step in (1, 2, 3)] == [None, 1, None]
        (event,) = root.control.events.after(0, 100, kind="checkpoint-frozen")
        assert (event.step, event.level) == (2, "warning") and "bit-identical to step 1" in event.text


def test_a_reader_that_complains_is_believed_after_a_look(root: Checked) -> None:
    """What is sound stays unmarked whatever is said of it; what is damaged is marked; what can be mended is mended."""
    said = CorruptExtent("it looks wrong from here", file="config.json")
    assert root.checker.suspect(RUN, 3, said) is None
    assert root.known(3).damage is None
    name, _ = damaged_tensor(root, 3)
    found = root.checker.suspect(RUN, 3, CorruptExtent("x", file=root.built[RUN, 3].manifest.tensors["model"][name].file))
    assert found is not None and found.members["tensor"] == name
    assert root.known(3).state == "damaged"


@pytest.mark.parametrize("has_copy", [True, False])
@pytest.mark.parametrize("name", [naming.COMMIT, naming.MANIFEST, "config.json"])
def test_what_a_look_finds_is_called_damaged_only_if_nothing_can_mend_it(root: Checked, name: str, has_copy: bool) -> None:
    """A look at the root or before a removal meets a file that is gone: it counts no more, and what has a copy is mended."""
    root.checker.check(RUN, 3)
    root.checker.repair = Copies(root).repair if has_copy else None
    goes_on = threading.Event()
    checks = Checks(root.checker, recorded=lambda wait_s: goes_on.wait(wait_s))
    root.control.watch.suspected.subscribe(checks.suspect)
    (root.path(3) / name).unlink()
    root.control.watch.scan()
    assert root.known(3).state == "committed"
    goes_on.set()
    wait_until(lambda: checks.pending == 0)
    checks.close()
    assert root.known(3).state == ("verified" if has_copy else "damaged")
    assert root.events("checkpoint-damaged") == ([] if has_copy else [3])


def test_complaints_are_looked_into_in_the_background(root: Checked) -> None:
    """The same complaint waits once; the thread ends with what is left done."""
    name, _ = damaged_tensor(root, 3)
    file = root.built[RUN, 3].manifest.tensors["model"][name].file
    checks = Checks(root.checker)
    for _ in range(50):
        checks.suspect(RUN, 3, CorruptExtent("x", file=file))
    checks.add(root.built[RUN, 2].manifest)
    checks.close()
    assert (root.known(3).state, root.known(2).state, checks.pending) == ("damaged", "verified", 0)
    wait_until(lambda: root.events("checkpoint-damaged") == [3])


def test_a_check_that_cannot_be_recorded_is_not_asked_for_without_a_pause(root: Checked) -> None:
    """Where the catalog's book is closed, `recorded` does not wait: the thread spun until its process ended."""
    asked = threading.Semaphore(0)
    checks = Checks(root.checker, recorded=lambda wait_s: bool(asked.release()))
    checks.add(root.built[RUN, 2].manifest)
    assert asked.acquire(timeout=180)
    time.sleep(0.5)
    checks.close()
    assert sum(iter(lambda: asked.acquire(blocking=False), False)) < 100, "some ten a second, and not as many as can be"


def test_what_waits_to_be_checked_takes_no_memory(root: Checked) -> None:
    """Where saves outpace the checks the line grows, and only the newest manifest is kept."""
    made = root.built[RUN, 2].manifest
    goes_on = threading.Event()
    checks = Checks(root.checker, heed=lambda size: _waited(goes_on))
    before = sys.getrefcount(made)
    for _ in range(20):
        checks.add(made)
    assert checks.pending == 20 and sys.getrefcount(made) == before + 1
    goes_on.set()
    checks.close()
    assert root.known(2).state == "verified"


def _waited(event: threading.Event) -> None:
    assert event.wait(180)


@pytest.mark.parametrize("what", ["staging", "restoring", "arriving"])
def test_reading_back_gives_way(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """While a rank holds a slot that it has not sealed, restores or has just come, a save's check waits; not for ever."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        if what == "staging":
            rank.lease(7)
        elif what == "arriving":
            monkeypatch.setattr(read_throttle, "ARRIVAL_S", 600.0)
            world.saver.giving_way.expect()
        else:
            world.saver.restores.answered(rank.who, 1, 5, named=True)
        world.saver.giving_way(1)  # a rank that hangs: this ends all the same
        monkeypatch.setattr(read_throttle, "GIVE_WAY_MAX_S", 600.0)
        waiting = threading.Thread(target=world.saver.giving_way, args=(1,))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        if what == "staging":
            world.saver.give_up(rank.who, 7, RoundAborted("no more"))
        elif what == "arriving":
            monkeypatch.setattr(read_throttle, "ARRIVAL_S", 0.0)
        else:
            world.saver.restores.abandoned(rank.who, 1)
        waiting.join(180)
        assert not waiting.is_alive()

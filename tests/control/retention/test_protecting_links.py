"""protecting_links: which links keep which steps, and when a directory of links is gone rather than out of sight."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, LimitExceeded, Pinned
from holdfast_service.control.checkpoints import run_files
from holdfast_service.control.checkpoints.run_files import LinkDirectory
from holdfast_service.control.retention import protecting_links
from tests.control.retention.test_rotation import RUN, World, world
from tests.daemons import wait_until

__all__ = ["world"]


def link(directory: Path, name: str, step: int, run: str = RUN, root: str = "/elsewhere/root") -> Path:
    """A link to a checkpoint of a root that need not exist."""
    directory.mkdir(exist_ok=True)
    made = directory / name
    made.symlink_to(f"{root}/{naming.checkpoint_path(run, step)}")
    return made


def test_a_link_keeps_its_checkpoint_until_it_is_removed(world: World, tmp_path: Path) -> None:
    """Nothing is told to the service when a link comes or goes."""
    (tmp_path / "out").mkdir()
    protecting_links.watch(world.files, RUN, str(tmp_path / "out"))
    made = link(tmp_path / "out", "best", 20)
    world.put(10, 20, 30)
    world.keep(last=1)
    assert world.steps == [20, 30]
    why = {verdict.step: verdict.reasons for verdict in world.rotation.verdicts.preview(RUN).verdicts}
    assert why[20] == [f"{made} is a link to it"]
    with pytest.raises(Pinned, match="best is a link"):
        world.rotation.remove(RUN, 20)
    made.unlink()
    world.rotation.due(RUN)
    assert world.rotation.wait_until_applied()
    assert world.steps == [30]


def test_a_linked_checkpoint_may_be_replaced(world: World, tmp_path: Path) -> None:
    """The link leads to whatever stands there: to save a step again is no removal, as it is where it is pinned."""
    (tmp_path / "out").mkdir()
    protecting_links.watch(world.files, RUN, str(tmp_path / "out"))
    link(tmp_path / "out", "checkpoint-20", 20)
    world.put(20, 30)
    with world.rotation.replacing(RUN, 20):
        pass
    world.files.change(RUN, lambda file: run_files.pinned(file, 20))
    with pytest.raises(Pinned), world.rotation.replacing(RUN, 20):
        pass


def test_only_links_to_checkpoints_of_this_run_count(world: World, tmp_path: Path) -> None:
    """Whatever else stands in the directory is passed over."""
    out = tmp_path / "out"
    link(out, "a", 10)
    link(out, "other-run", 20, run="other")
    (out / "step-00000030").mkdir()
    (out / "file").write_text("x")
    for number, target in enumerate(("nothing", "/", "checkpoints/step-00000040", f"/x/{RUN}/checkpoints/step-4", "loop")):
        (out / f"odd-{number}").symlink_to(target)
    (out / "loop").symlink_to("loop")
    protecting_links.watch(world.files, RUN, str(out))
    assert protecting_links.standing(world.files.read(RUN), RUN).by_step == {10: str(out / "a")}


def test_a_directory_out_of_sight_keeps_everything(world: World, tmp_path: Path) -> None:
    """A disk that is not mounted may hold links; a directory that was removed holds none."""
    away = LinkDirectory(path=str(tmp_path / "mount" / "out"), device=2**40)
    world.files.change(RUN, lambda file: file.model_copy(update={"link_directories": (away,)}))
    world.put(10, 20, 30)
    world.keep(last=1)
    assert world.steps == [10, 20, 30]
    reasons = world.rotation.verdicts.preview(RUN).verdicts[-1].reasons
    assert any("cannot be read" in reason for reason in reasons), reasons
    here = away.model_copy(update={"device": tmp_path.stat().st_dev})
    world.files.change(RUN, lambda file: file.model_copy(update={"link_directories": (here,)}))
    world.rotation.due(RUN)
    assert world.rotation.wait_until_applied()
    assert world.steps == [30]


def test_an_empty_place_where_a_disk_was_mounted_keeps_everything(world: World, tmp_path: Path) -> None:
    """The directory is there and can be read, but it is not the one that held the links; nobody may take its place."""
    out = tmp_path / "out"
    out.mkdir()
    mounted = LinkDirectory(path=str(out), device=2**40)
    world.files.change(RUN, lambda file: file.model_copy(update={"link_directories": (mounted,)}))
    world.put(10, 20, 30)
    world.keep(last=1)
    assert world.steps == [10, 20, 30]
    with pytest.raises(Pinned, match="cannot be read"):
        world.rotation.remove(RUN, 10)
    with pytest.raises(InvalidRequest, match="another disk"):
        protecting_links.watch(world.files, RUN, str(out))
    link(out, "mounted-again", 10)  # the numbers of devices change when a machine starts anew
    protecting_links.watch(world.files, RUN, str(out))
    world.rotation.due(RUN)
    assert world.rotation.wait_until_applied()
    assert world.steps == [10, 30]


def test_a_link_that_a_killed_process_left_half_made_keeps_nothing(world: World, tmp_path: Path) -> None:
    """It has a name that nobody sees."""
    link(tmp_path / "out", naming.link_in_the_making("best"), 10)
    protecting_links.watch(world.files, RUN, str(tmp_path / "out"))
    assert protecting_links.standing(world.files.read(RUN), RUN).by_step == {}


def test_a_file_in_the_place_of_a_directory_that_is_gone(world: World, tmp_path: Path) -> None:
    """It holds no links, but nobody can tell what it was."""
    out = tmp_path / "out"
    out.mkdir()
    protecting_links.watch(world.files, RUN, str(out))
    out.rmdir()
    out.write_text("a file")
    found = protecting_links.standing(world.files.read(RUN), RUN)
    assert not found.by_step and found.unseen == (str(out),)


def test_watching_twice_writes_nothing_and_gone_directories_are_forgotten(tmp_path: Path, world: World) -> None:
    """The file does not grow with launches."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        protecting_links.watch(world.files, RUN, str(tmp_path / name))
    before = world.files.read(RUN)
    protecting_links.watch(world.files, RUN, str(tmp_path / "one"))
    assert world.files.read(RUN) == before
    (tmp_path / "two").rmdir()
    protecting_links.watch(world.files, RUN, str(tmp_path / "one"))
    assert [one.path for one in world.files.read(RUN).link_directories] == [str(tmp_path / "one")]


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/no/such/directory", "/etc/passwd", "/x\0y"])
def test_what_is_no_directory_here_is_refused(path: str, world: World) -> None:
    """A link in it would keep nothing, and who made it would believe that it does."""
    with pytest.raises(InvalidRequest):
        protecting_links.watch(world.files, RUN, path)
    assert world.files.read(RUN) == run_files.RunFile()


def test_there_is_a_limit(tmp_path: Path, world: World) -> None:
    """Whoever names directories without end fills no file."""
    for number in range(protecting_links.DIRECTORIES_MAX):
        (tmp_path / str(number)).mkdir()
        protecting_links.watch(world.files, RUN, str(tmp_path / str(number)))
    (tmp_path / "more").mkdir()
    with pytest.raises(LimitExceeded):
        protecting_links.watch(world.files, RUN, str(tmp_path / "more"))


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Path, threading.Event]]:
    """A directory into which no look returns before the event: a hard mount whose server is away."""
    there, back, scan = tmp_path / "hard", threading.Event(), os.scandir
    there.mkdir()

    def scandir(path: str | Path) -> object:
        if str(path) == str(there):
            back.wait(180)
        return scan(path)

    monkeypatch.setattr(protecting_links, "LOOK_S", 0.2)
    monkeypatch.setattr(os, "scandir", scandir)
    yield there, back
    back.set()


def test_a_disk_that_does_not_answer_holds_nobody_up(world: World, hanging: tuple[Path, threading.Event]) -> None:
    """Its checkpoints stay; only the first look waits, and nothing else of the daemon does."""
    there, back = hanging
    protecting_links.watch(world.files, RUN, str(there))
    made = link(there, "best", 10)
    world.put(10, 20, 30)
    world.keep(last=1)
    assert world.steps == [10, 20, 30]
    for _ in range(5):
        assert protecting_links.standing(world.files.read(RUN), RUN).unseen == (str(there),)
    assert sum(thread.name == "holdfast-link-look" for thread in threading.enumerate()) == 1  # later ones do not look
    back.set()
    wait_until(lambda: protecting_links.standing(world.files.read(RUN), RUN).by_step == {10: str(made)})
    world.rotation.due(RUN)
    assert world.rotation.wait_until_applied()
    assert world.steps == [10, 30]


def test_a_removal_that_has_looked_is_over_when_the_directory_is_watched(world: World, tmp_path: Path) -> None:
    """Who links a step and is then told that its directory is watched finds the step there for good, or gone."""
    (tmp_path / "out").mkdir()
    world.put(10, 20, 30)
    told = threading.Thread(target=world.rotation.watch_links, args=(RUN, str(tmp_path / "out")))
    with world.rotation.deciding(RUN):  # a removal that has looked
        told.start()
        told.join(0.3)
        assert told.is_alive()
    told.join(180)
    assert not told.is_alive()
    assert [one.path for one in world.files.read(RUN).link_directories] == [str(tmp_path / "out")]

"""Links in a Trainer's output directory: no training ends because of one; tests/integrations has those of real Trainers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast.integrations.trainers.links import SENTINEL, OutputLinks
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest
from tests.daemons import RunningDaemon
from tests.kit.daemons import own_daemon, run

__all__ = ["run"]

daemon = own_daemon()


@pytest.fixture
def checkpointer(daemon: RunningDaemon, run: str) -> Iterator[Checkpointer]:
    with Checkpointer(run, {"model": torch.nn.Linear(2, 2)}, at=daemon.socket) as made:
        yield made


def test_a_root_without_its_mark_ends_no_training(
    daemon: RunningDaemon, checkpointer: Checkpointer, run: str, tmp_path: Path
) -> None:
    """It is said once, and the next save tries again; retention by links has nothing to remove meanwhile."""
    links, mark = OutputLinks(str(tmp_path), run), daemon.root / naming.ROOT_FILE
    checkpointer.save(1, wait="durable")
    content = mark.read_bytes()
    mark.unlink()
    for step in (2, 3):
        links.clear_way(step)
        links.release_after(checkpointer, step - 1)
        assert not links.link(checkpointer, checkpointer.save(step, wait="durable"))
        links.rotate(checkpointer, 1, None)
    (said,) = checkpointer.notices
    assert f"checkpoint-2 was not linked: no link can lead to checkpoints of {run}" in said
    assert naming.ROOT_FILE in said and "start the program again" in said
    mark.write_bytes(content)
    assert links.link(checkpointer, checkpointer.save(4, wait="durable"))
    assert (tmp_path / "checkpoint-4" / naming.COMMIT).is_file()


def test_what_appears_in_the_way_is_left_alone(checkpointer: Checkpointer, run: str, tmp_path: Path) -> None:
    links = OutputLinks(str(tmp_path / "output"), run)
    (tmp_path / "output" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "output" / "checkpoint-1" / "mine").write_text("mine")
    links.clear_way(1)
    assert not links.link(checkpointer, checkpointer.save(1))
    (tmp_path / "file").write_text("")
    hidden = OutputLinks(str(tmp_path / "file"), run)
    hidden.clear_way(2)
    assert not hidden.link(checkpointer, checkpointer.save(2))
    one, other = checkpointer.notices
    assert "checkpoint-1 exists, and is not a link" in one and "move it away" in one
    assert "cannot be created" in other or "Not a directory" in other
    assert (tmp_path / "output" / "checkpoint-1" / "mine").read_text() == "mine"


def test_what_is_in_the_way_of_later_steps_is_refused(
    daemon: RunningDaemon, checkpointer: Checkpointer, run: str, tmp_path: Path
) -> None:
    """What is at or before the resumed step, or after the last one, or gives way, is not."""
    links = OutputLinks(str(tmp_path), run)
    links.check_free(checkpointer, 0, 100)
    for step in (2, 4, 6):
        (tmp_path / f"checkpoint-{step}" / "of-the-library").mkdir(parents=True)
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "checkpoint-8" / SENTINEL).write_text("")
    (tmp_path / "checkpoint-9").symlink_to(daemon.root / naming.checkpoint_path(run, 9))
    (tmp_path / "checkpoint-10").symlink_to(daemon.root / naming.checkpoint_path("another", 10))
    (tmp_path / "checkpoint-last").write_text("")
    for resumed, last, named in ((0, 9, "checkpoint-2, checkpoint-4, checkpoint-6"), (4, 10, "checkpoint-6, checkpoint-10")):
        with pytest.raises(InvalidRequest, match=rf"steps {resumed + 1} to {last} .*exists, and is not a link") as refused:
            links.check_free(checkpointer, resumed, last)
        assert f"move away {named};" in str(refused.value.hint)
    with pytest.raises(InvalidRequest, match="not a checkpoint of"):
        links.check_free(checkpointer, 6, 10)
    links.check_free(checkpointer, 6, 9)

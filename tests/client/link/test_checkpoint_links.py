"""Checkpointer.link: where a framework looks, there is a link to the checkpoint, and it keeps it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast.link.checkpoint_links import unlink
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast.save_warning import SaveWarning
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint, QuotaExceeded
from holdfast_formats.rest.retention import RetentionPolicy
from tests.daemons import RunningDaemon, free_port, wait_until
from tests.kit.daemons import own_daemon

daemon = own_daemon(listen=f"127.0.0.1:{free_port()}")


def steps(daemon: RunningDaemon, run: str) -> list[int]:
    """What is there of a run."""
    return sorted(int(path.name[5:]) for path in (daemon.root / run / naming.CHECKPOINTS).iterdir())


def test_links_keep_their_checkpoints(daemon: RunningDaemon, tmp_path: Path) -> None:
    """keep_last=1 lets all go but the newest, and what a link leads to; also after the link was moved to another step."""
    out = tmp_path / "out"
    with Checkpointer("kept", {"model": torch.nn.Linear(2, 2)}, at=daemon.socket, keep_last=1) as checkpointer:
        first = checkpointer.save(1)
        checkpointer.link(first, out / "checkpoint-1")
        assert os.readlink(out / "checkpoint-1") == str(daemon.root / naming.checkpoint_path("kept", 1))
        first.result()
        for step in (2, 3, 4):
            checkpointer.save(step, wait="durable")
        wait_until(lambda: steps(daemon, "kept") == [1, 4])
        assert (out / "checkpoint-1" / "COMMIT").is_file()
        checkpointer.link(4, out / "checkpoint-1")
        checkpointer.save(5, wait="durable")
        wait_until(lambda: steps(daemon, "kept") == [4, 5])
        (out / "checkpoint-1").unlink()
        checkpointer.save(6, wait="durable")
        wait_until(lambda: steps(daemon, "kept") == [6])


def test_the_link_of_a_save_that_failed_is_removed(daemon: RunningDaemon, tmp_path: Path) -> None:
    """It would lead nowhere for ever."""
    with Checkpointer("failed", {"model": torch.nn.Linear(2, 2)}, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
        with Api(daemon.url) as api:
            retention.set_policy(api, "failed", RetentionPolicy(quota_bytes=1), "*")
        before = checkpointer.save(2)
        checkpointer.link(before, tmp_path / "linked-before-it-failed")
        with pytest.raises(QuotaExceeded):
            before.result()
        with pytest.warns(SaveWarning):
            after = checkpointer.save(3)
        with pytest.raises(QuotaExceeded):
            after.result()
        checkpointer.link(after, tmp_path / "linked-after-it-failed")
        wait_until(lambda: not any(tmp_path.iterdir()))
        checkpointer._tickets.take_failure()


def test_a_path_is_known_as_a_step(daemon: RunningDaemon, tmp_path: Path) -> None:
    """By the directory, and by links, also several in a row; not what has the same name in another root or run."""
    other = tmp_path / naming.checkpoint_path("known", 1)
    other.mkdir(parents=True)
    with Checkpointer("known", {"model": torch.nn.Linear(2, 2)}, at=daemon.socket) as checkpointer:
        checkpointer.link(checkpointer.save(1, wait="durable"), tmp_path / "link")
        (tmp_path / "again").symlink_to("link")
        place = daemon.root / naming.checkpoint_path("known", 1)
        for path in (place, str(place) + "/", tmp_path / "link", tmp_path / "again"):
            assert checkpointer.step_at(path) == 1
        for path in (other, tmp_path, tmp_path / "nothing", place / "COMMIT", place.parent):
            assert checkpointer.step_at(path) is None
        (tmp_path / "dangling").symlink_to(daemon.root / naming.checkpoint_path("known", 2))
        with pytest.raises(NoSuchCheckpoint, match="does not exist"):
            checkpointer.step_at(tmp_path / "dangling")


def test_the_step_of_a_save_that_is_under_way(daemon: RunningDaemon, tmp_path: Path) -> None:
    """A link that leads nowhere yet: who saved it and loads it at once is not told that it is does not exist."""
    state = {"x": torch.zeros(1_000_000)}
    with Checkpointer("at-once", state, at=daemon.socket, policy="wait") as checkpointer:
        for step in range(1, 6):
            checkpointer.link(checkpointer.save(step), tmp_path / "at-once")
            assert checkpointer.step_at(tmp_path / "at-once") == step


def test_what_stands_there_is_not_touched(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Files, directories and links to anything else; and the root itself takes no links."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "directory").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "directory")
    other = naming.checkpoint_path("another", 1)
    (tmp_path / "another").symlink_to(daemon.root / other)
    with Checkpointer("refused", {"model": torch.nn.Linear(2, 2)}, at=daemon.socket) as checkpointer:
        ticket = checkpointer.save(1)
        elsewhere = tmp_path / "elsewhere" / naming.checkpoint_path("refused", 1)
        elsewhere.mkdir(parents=True)
        (tmp_path / "of-another-root").symlink_to(elsewhere)
        for name in ("file", "directory", "other", "another", "of-another-root", "file/below"):
            with pytest.raises(InvalidRequest) as refused:
                checkpointer.link(ticket, tmp_path / name)
            assert refused.value.hint or name == "file/below"
        for name in ("link", "refused/link", "refused/checkpoints/link"):
            with pytest.raises(InvalidRequest, match="in the root"):
                checkpointer.link(ticket, daemon.root / name)
        (tmp_path / "inside").symlink_to(daemon.root)
        with pytest.raises(InvalidRequest, match="in the root"):
            checkpointer.link(ticket, tmp_path / "inside" / "link")
        with pytest.raises(NoSuchCheckpoint):
            checkpointer.link(99, tmp_path / "none")
        with pytest.raises(InvalidRequest):
            checkpointer.link("1", tmp_path / "none")  # type: ignore[arg-type]
        assert not os.path.lexists(tmp_path / "none")
        ticket.result()
    assert os.readlink(tmp_path / "of-another-root") == str(elsewhere)
    assert (tmp_path / "file").read_text() == "mine" and not list((tmp_path / "directory").iterdir())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    with pytest.raises(InvalidRequest, match="closed"):
        checkpointer.link(ticket, tmp_path / "late")


def test_a_removed_mark_of_the_root_is_named(daemon: RunningDaemon, tmp_path: Path) -> None:
    """The directory may be another one then, so nothing links into it."""
    mark = daemon.root / naming.ROOT_FILE
    with Checkpointer("marked", {"model": torch.nn.Linear(2, 2)}, at=daemon.socket) as checkpointer:
        ticket = checkpointer.save(1, wait="durable")
        content = mark.read_bytes()
        mark.unlink()
        with pytest.raises(InvalidRequest, match=r"\.holdfast\.root was removed"):
            checkpointer.link(ticket, tmp_path / "link")
        mark.write_bytes(content)
        checkpointer.link(ticket, tmp_path / "link")


def test_a_link_that_is_not_required_is_said_once(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Nothing is raised, and the next attempt may succeed."""
    (tmp_path / "mine").write_text("mine")
    with Checkpointer("spare", {"model": torch.nn.Linear(2, 2)}, at=daemon.socket) as checkpointer:
        ticket = checkpointer.save(1, wait="durable")
        for _ in range(2):
            checkpointer.link(ticket, tmp_path / "mine", required=False)
            checkpointer.link(9, tmp_path / "none", required=False)
        assert len(checkpointer.notices) == 2
        assert "mine exists, and is not a link. The checkpoint is saved" in checkpointer.notices[0]
        assert "spare@9 is not a checkpoint" in checkpointer.notices[1]
        (tmp_path / "mine").unlink()
        checkpointer.link(ticket, tmp_path / "mine", required=False)
        assert (tmp_path / "mine" / naming.COMMIT).is_file() and len(checkpointer.notices) == 2


def test_a_directory_that_was_removed_and_made_again_keeps_links(daemon: RunningDaemon, tmp_path: Path) -> None:
    """The daemon forgets what is gone, so it is told again."""
    with Checkpointer("again", {"model": torch.nn.Linear(2, 2)}, at=daemon.socket, keep_last=1) as checkpointer:
        for number, place in enumerate(("one", "two", "one")):
            checkpointer.link(checkpointer.save(1 + number, wait="durable"), tmp_path / place / "link")
            checkpointer._links.close()
            if number == 0:
                (tmp_path / "one" / "link").unlink()
                (tmp_path / "one").rmdir()
        for step in (4, 5):
            checkpointer.save(step, wait="durable")
        wait_until(lambda: steps(daemon, "again") == [2, 3, 5])


def test_what_follows_a_save_and_fails_stops_nothing(daemon: RunningDaemon) -> None:
    """It is called where the outcomes of other saves are heard."""
    with Checkpointer("follows", {"model": torch.nn.Linear(2, 2)}, at=daemon.socket) as checkpointer:
        ticket = checkpointer.save(1)
        ticket.when_ended(lambda error: 1 / 0)
        ticket.result(180)
        checkpointer.save(2).result(180)


def test_a_directory_that_the_daemon_cannot_read_is_said(daemon: RunningDaemon, tmp_path: Path) -> None:
    """The link stands, and a notice says that it keeps nothing."""
    out = tmp_path / "out"
    with Checkpointer("unseen", {"model": torch.nn.Linear(2, 2)}, at=daemon.socket) as checkpointer:
        ticket = checkpointer.save(1, wait="durable")
        for number in range(101):  # more than a run may name
            checkpointer.link(ticket, out / str(number) / "link")
        checkpointer._links.close()
        assert any("do not protect checkpoints" in notice for notice in checkpointer.notices), checkpointer.notices
    assert (out / "100" / "link" / "COMMIT").is_file()


def test_a_link_that_cannot_be_removed_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is named in a warning, the others go, and one that is gone is no error."""
    (tmp_path / "stays").mkdir()
    (tmp_path / "goes").symlink_to("nowhere")
    unlink([tmp_path / "stays", tmp_path / "gone", tmp_path / "goes"])
    assert not os.path.lexists(tmp_path / "goes")
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert str(tmp_path / "stays") in warning

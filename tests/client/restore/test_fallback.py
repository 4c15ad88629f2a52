"""restore() past damage, by a rank that is alone: with a daemon and without one, by name and unasked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast.read.directory_root import DirectoryRoot
from holdfast.read.root_directory import open_checkpoint
from holdfast.read.root_index import RootIndex
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import CorruptExtent, CorruptManifest, DaemonGone, NoSuchCheckpoint, NotCommitted
from tests.checkpoints import flip
from tests.daemons import RunningDaemon, running, wait_until

STEPS = (100, 200, 300)
SIZE = 5000


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, every value of which is the step."""
    root = tmp_path_factory.mktemp("saved") / "root"
    with running(root) as daemon, Checkpointer("r", {"model": {"w": (w := torch.zeros(SIZE))}}, at=daemon.socket) as c:
        for step in STEPS:
            w.fill_(step)
            c.save(step, wait="durable")
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A root of three steps that nobody serves."""
    return Path(shutil.copytree(saved, tmp_path / "root"))


@pytest.fixture
def daemon(root: Path) -> Iterator[RunningDaemon]:
    """A daemon that scrubs nothing, over three steps of which no slot holds any."""
    with running(root, "--scrub-bytes-per-second", "none", listen="127.0.0.1:0") as daemon:
        yield daemon


def damage(root: Path, step: int, name: str = "") -> None:
    directory = root / naming.checkpoint_path("r", step)
    path = directory / name if name else next(directory.glob("model*.safetensors"))
    flip(path, path.stat().st_size - 1)


class Trainer:
    """A rank that is alone, whose values are not those of any step."""

    def __init__(self, at: Path | str) -> None:
        self.w = torch.full((SIZE,), -1.0)
        self.checkpointer = Checkpointer("r", {"model": {"w": self.w}}, at=at)

    def restored(self, step: int | None = None) -> int:
        """The step that it has now, whole."""
        found = self.checkpointer.restore(step, groups=["model"])
        assert self.w.unique().tolist() == [float(found)]
        return found

    def said(self) -> list[str]:
        report = self.checkpointer.last_restore
        assert report is not None
        notes = [note for note in report.notes if "is damaged" in note]
        assert all(note in self.checkpointer.notices for note in notes)
        return notes


def test_a_sound_newest_one_is_taken_without_a_word(root: Path) -> None:
    """Nothing is damaged: nothing is said."""
    trainer = Trainer(at=root)
    assert trainer.restored() == 300 and trainer.said() == []


@pytest.mark.parametrize("name", ["", naming.MANIFEST, naming.COMMIT], ids=["tensor", "manifest", "COMMIT"])
def test_without_a_daemon(root: Path, name: str) -> None:
    """A directory alone: the rank goes back by itself, and says from what."""
    damage(root, 300, name)
    trainer = Trainer(at=root)
    assert trainer.restored() == 200
    assert len(trainer.said()) == 1 and "step 300 is damaged" in trainer.said()[0]


@pytest.mark.parametrize("name", ["", naming.MANIFEST], ids=["tensor", "manifest"])
def test_with_a_daemon_it_is_marked(daemon: RunningDaemon, name: str) -> None:
    """The daemon looks for itself, and knows from then on: the next launch is told at once."""
    damage(daemon.root, 300, name)
    for _ in range(2):
        trainer = Trainer(at=daemon.socket)
        assert trainer.restored() == 200
        assert len(trainer.said()) == 1 and "restored step 200 instead" in trainer.said()[0]
        trainer.checkpointer.close()
    with Api(daemon.url) as api:
        assert api.checkpoint("r", 300).state == "damaged" and api.checkpoint("r", "latest").step == 200


def test_what_the_daemon_can_mend_is_restored(daemon: RunningDaemon) -> None:
    """COMMIT follows from the manifest: it is made anew while the rank waits, and nobody falls back."""
    damage(daemon.root, 300, naming.COMMIT)
    trainer = Trainer(at=daemon.socket)
    assert trainer.restored() == 300
    with Api(daemon.url) as api:
        wait_until(lambda: api.checkpoint("r", 300).state == "verified")


def test_over_http(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that shares nothing with the daemon is told the same."""
    monkeypatch.setattr("holdfast.link.own_daemon.socket_of", lambda api: None)
    damage(daemon.root, 300)
    trainer = Trainer(at=daemon.url)
    assert trainer.restored() == 200 and len(trainer.said()) == 1


@pytest.mark.parametrize("listen", ["none", "0.0.0.0:0"])
def test_a_root_that_is_not_mounted_here(root: Path, monkeypatch: pytest.MonkeyPatch, listen: str) -> None:
    """As in another container: read over HTTP where the daemon can be reached, and its address is one to connect to; else
    refused with the path that is to be mounted.
    """
    monkeypatch.setattr("holdfast.link.roots.is_at", lambda directory, meant: False)
    with running(root, "--insecure-no-tokens", listen=listen) as daemon:
        trainer = Trainer(at=daemon.socket)
        if listen == "none":
            with pytest.raises(NoSuchCheckpoint, match=f"the daemon's root {root} is not visible here") as refused:
                trainer.restored()
            assert f"mount {root} at the same path" in str(refused.value.hint)
            with pytest.raises(NoSuchCheckpoint, match=f"the daemon's root {root} is not visible here"):
                trainer.checkpointer.read_asset(300, "config.json")
        else:
            assert daemon.url.startswith("http://127.0.0.1:") and trainer.restored() == 300
            assert "0.0.0.0" in daemon.log.read_text(), "what it listens at is still said"


def test_neither_the_root_nor_its_daemon_is_reached_from_here(tmp_path: Path) -> None:
    """As in another container: the error names the directory that is to be mounted, and not only the address."""
    with pytest.raises(
        DaemonGone, match=f"the daemon's root {tmp_path} is not visible here, and over HTTP: no answer"
    ) as gone:
        open_checkpoint(None, "http://127.0.0.1:1", "r", 1, str(tmp_path))
    assert f"mount {tmp_path} at the same path" in str(gone.value.hint)


def test_a_step_by_name_is_that_step_or_an_error(daemon: RunningDaemon) -> None:
    """It never falls back; the hint names the newest that is sound, and nothing of the damaged one stays in live tensors."""
    damage(daemon.root, 300)
    trainer = Trainer(at=daemon.socket)
    with pytest.raises(CorruptExtent) as caught:
        trainer.restored(300)
    assert "not known to be damaged is 200" in caught.value.hint
    assert trainer.w.unique().tolist() in ([-1.0], [0.0])
    assert trainer.restored(100) == 100


def test_a_step_by_name_without_a_daemon(root: Path) -> None:
    """The hint names another step of the directory."""
    damage(root, 300)
    with pytest.raises(CorruptExtent) as caught:
        Trainer(at=root).restored(300)
    assert "not known to be damaged is 200" in caught.value.hint


@pytest.mark.parametrize("served", [True, False])
def test_where_nothing_is_sound_it_is_an_error(root: Path, served: bool) -> None:
    """Nobody starts from nothing since everything is damaged: the error is the newest one's."""
    for step in STEPS:
        damage(root, step)
    if served:
        with running(root) as daemon, pytest.raises(CorruptExtent):
            Trainer(at=daemon.socket).restored()
    else:
        with pytest.raises(CorruptExtent):
            Trainer(at=root).restored()


def test_a_damaged_directory_is_told_by_the_listing(root: Path) -> None:
    """With no service, what cannot be read is listed as that."""
    damage(root, 300, naming.MANIFEST)
    damage(root, 200, naming.COMMIT)
    listing = RootIndex(DirectoryRoot(root)).checkpoints("r")
    assert [made.step for made in listing.checkpoints] == [100]
    assert all(isinstance(error, CorruptManifest | NotCommitted) for error in listing.unreadable)
    assert len(listing.unreadable) == 2

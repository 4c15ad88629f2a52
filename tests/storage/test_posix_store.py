"""PosixStore takes the exam of all stores: on a real directory, with and without an exchange of names, and in memory."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import StorageFailed
from holdfast_service.storage import MemoryTier, PosixStore, PosixTier, posix
from tests.crash.calls import steered
from tests.in_memory import tmp_path
from tests.suites.store_suite import FIRST, JOINT, RUN, STEP, Fault, StoreSuite, save, stage, standing

__all__ = ["tmp_path"]


class RealDirectory:
    """A directory; what fails are its system calls."""

    def __init__(self, root: Path) -> None:
        self._root = root
        PosixTier(root)

    def open(self) -> PosixStore:
        return PosixStore(PosixTier(self._root))

    def used(self) -> int:
        return sum(path.stat().st_size for path in self._root.rglob("*") if path.is_file())

    def lose(self, path: str) -> None:
        there = self._root / path
        if there.is_dir():
            shutil.rmtree(there)
        else:
            there.unlink()

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        def steer(name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            if not fault.due():
                return call(*arguments, **options)
            if fault.how == "answer lost":
                found = call(*arguments, **options)
                if name == "open":
                    os.close(found)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with steered(steer):
            yield

    @contextmanager
    def full(self) -> Iterator[None]:
        def steer(name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            if name in ("pwritev", "fallocate"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*arguments, **options)

        with steered(steer):
            yield


class FailingTier:
    """A tier of which calls fail as a `Fault` says, those of its files included."""

    def __init__(self, tier: Any, fault: Fault) -> None:
        self._behind, self._fault = tier, fault

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._behind, name)
        return self._failing(name, found) if callable(found) else found

    def _failing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any) -> Any:
            due = name != "discard" and self._fault.due()
            if due and self._fault.how == "fails":
                raise StorageFailed(f"{name} fails")
            done = call(*arguments)
            if due:
                raise StorageFailed(f"the answer of {name} is lost")
            return FailingTier(done, self._fault) if name in ("create", "join") else done

        return act


class Memory:
    """A tier in memory; what fails are the calls to it."""

    def __init__(self) -> None:
        self._tier = MemoryTier()
        self._fault: Fault | None = None

    def open(self) -> PosixStore:
        return PosixStore(_Switched(self))  # type: ignore[arg-type] - it passes on what a tier has

    def used(self) -> int:
        return sum(len(data) for data in self._tier._files.values())

    def lose(self, path: str) -> None:
        self._tier.remove_tree(path)

    def behind(self) -> Any:
        return self._tier if self._fault is None else FailingTier(self._tier, self._fault)

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        self._fault = fault
        try:
            yield
        finally:
            self._fault = None

    @contextmanager
    def full(self) -> Iterator[None]:
        before, self._tier._capacity_bytes = self._tier._capacity_bytes, self.used()
        try:
            yield
        finally:
            self._tier._capacity_bytes = before


class _Switched:
    """The tier as it is at each call."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory.behind(), name)


class TestPosixStore(StoreSuite):
    @pytest.fixture
    def fresh(self, tmp_path: Path) -> Callable[[], RealDirectory]:
        numbers = itertools.count()
        return lambda: RealDirectory(tmp_path / str(next(numbers)))


@pytest.mark.crash_slow
class TestPosixStoreWithoutExchange(TestPosixStore):
    """The whole exam again where two names cannot be exchanged: what replaces another takes two renames."""

    @pytest.fixture(autouse=True)
    def _lacking(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def lacking(*_: Any) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(posix, "_exchange", lacking)


class TestPosixStoreInMemory(StoreSuite):
    @pytest.fixture
    def fresh(self) -> Callable[[], Memory]:
        return Memory


@pytest.fixture
def root(tmp_path: Path) -> RealDirectory:
    return RealDirectory(tmp_path / "root")


def test_a_rename_that_is_not_durable_is_unknown(root: RealDirectory) -> None:
    """It is visible, and its parent was not synced (I9): the value says so, and the next committer makes it durable."""
    store = root.open()
    stage(store, JOINT, FIRST)
    seen: list[str] = []

    def steer(name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        seen.append(name)
        if name == "fsync" and "renameat2" in seen:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*arguments, **options)

    with steered(steer):
        done = store.commit(JOINT, FIRST.contents())
    assert done.outcome == "unknown" and "fsync of its parent directory failed" in done.detail
    assert standing(store) is FIRST
    assert root.open().commit(JOINT, FIRST.contents()).outcome == "published"


@pytest.mark.parametrize("taken", [False, True], ids=["rename fails", "name is taken"])
def test_a_storage_that_does_not_say_what_stands_is_unknown(root: RealDirectory, taken: bool) -> None:
    """The rename was tried, and nothing can be read afterwards: it may have been done (I14)."""
    store = root.open()
    stage(store, JOINT, FIRST)
    if taken:
        save(store, JOINT._replace(round_id=9), FIRST)
    tried: list[str] = []

    def steer(name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if name == "renameat2":
            tried.append(name)
        if tried and (name != "renameat2" or not taken):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*arguments, **options)

    with steered(steer):
        done = store.commit(JOINT, FIRST.contents())
    assert done.outcome == "unknown" and ("cannot be" in done.detail or "is unknown" in done.detail)
    assert root.open().commit(JOINT, FIRST.contents()).outcome == "published"


def test_another_node_publishes_while_a_small_file_is_put(root: RealDirectory) -> None:
    """It finds its own file there already, and a moment later nothing at all: it is committed, and so it says."""
    store = root.open()
    stage(store, JOINT, FIRST)
    outcomes: list[str] = []

    def steer(name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if name == "open" and arguments[0] in FIRST.small and not outcomes:
            outcomes.append("meanwhile")
            outcomes.append(root.open().commit(JOINT, FIRST.contents()).outcome)
        return call(*arguments, **options)

    with steered(steer):
        outcomes.append(store.commit(JOINT, FIRST.contents()).outcome)
    assert outcomes == ["meanwhile", "published", "published"] and standing(store) is FIRST


def test_another_node_publishes_and_tidies_up_while_a_small_file_is_put(
    root: RealDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was staged is gone, and so is the directory that is made again for the file: it is committed, and so it says."""
    store = root.open()
    stage(store, JOINT, FIRST)
    put, outcomes = store._tier.put, list[str]()

    def late(path: str, data: bytes) -> None:
        if not outcomes:
            outcomes.append(root.open().commit(JOINT, FIRST.contents()).outcome)
        put(path, data)

    def steer(name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        found = call(*arguments, **options)
        if name == "mkdir" and arguments[0] == JOINT.path.rpartition("/")[2]:
            outcomes.append("tidied up")
            os.rmdir(arguments[0], dir_fd=options["dir_fd"])
        return found

    monkeypatch.setattr(store._tier, "put", late)
    with steered(steer):
        outcomes.append(store.commit(JOINT, FIRST.contents()).outcome)
    assert outcomes == ["published", "tidied up", "published"] and standing(store) is FIRST


def test_what_stands_without_commit_keeps_its_step(root: RealDirectory) -> None:
    """A directory that somebody has damaged, or made: the step is taken, and nothing is put into it."""
    store = root.open()
    PosixTier(root._root).put(f"{naming.checkpoint_path(RUN, STEP)}/theirs", b"x")
    assert save(store, JOINT, FIRST).outcome == "taken"
    assert store.steps(RUN) == [STEP]
    assert store.files.list(naming.checkpoint_path(RUN, STEP)) == ["theirs"]


def test_what_is_there_and_not_seen_yet_is_unknown(root: RealDirectory) -> None:
    """Another node has published, and this one's client of a network file system does not see the files yet: nobody says
    that the round has failed.
    """
    store = root.open()
    stage(store, JOINT, FIRST)
    store.discard(JOINT)
    PosixTier(root._root).put(f"{naming.checkpoint_path(RUN, STEP)}/theirs", b"x")
    assert store.commit(JOINT, FIRST.contents()).outcome == "unknown"


def test_names_that_are_not_ours_are_no_steps(root: RealDirectory) -> None:
    """Files and directories of others under checkpoints/ are not listed."""
    tier = PosixTier(root._root)
    for name in ("step-7", "step-0000000x", "old", "step-00000007.a1"):
        tier.put(f"{RUN}/{naming.CHECKPOINTS}/{name}/file", b"x")
    assert root.open().steps(RUN) == []

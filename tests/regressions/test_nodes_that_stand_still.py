"""A node stands still in the middle of a decision (SIGSTOP, a paused machine), and goes on when others have gone on without
it: it removes nothing that is wanted by then, and no other node waits for it for long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.checkpoints import run_files
from holdfast_service.control.database import engines
from holdfast_service.storage.posix import PosixTier
from tests.databases import Postgres
from tests.in_memory import tmp_path
from tests.regressions.test_daemons_that_share_a_root import RUN, Node, committed, steps
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes", "tmp_path"]

WAITS_S = 1  # for another node's lock; ten, but for the length of these tests
LIMIT_S = 180.0


class Stopping(PosixTier):
    """The storage of a node that stands still just before it moves something to a place of this name."""

    before = ""

    def __init__(self, root: Path, node: str) -> None:
        super().__init__(root, node=node)
        self.stands, self.goes_on = threading.Event(), threading.Event()

    def publish(self, source: str, target: str) -> None:
        self._stand_still(target)
        super().publish(source, target)

    def exchange(self, source: str, target: str) -> bool:
        self._stand_still(target)
        return super().exchange(source, target)

    def _stand_still(self, target: str) -> None:
        if self.before and self.before in target and not self.stands.is_set():
            self.stands.set()
            assert self.goes_on.wait(LIMIT_S)


class Still:
    """What node a does in a thread, in which it stands still; it goes on at the end of the block."""

    def __init__(self, tier: Stopping, act: Callable[[], Any]) -> None:
        self._tier = tier
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(act,))

    def _run(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:
            self.error = error

    def __enter__(self) -> Still:
        self._thread.start()
        assert self._tier.stands.wait(LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._tier.goes_on.set()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


class Pair:
    """Two nodes with three checkpoints, of which one is to stay."""

    def __init__(self, nodes: Nodes, root: Path) -> None:
        self.nodes = nodes
        self.tier = Stopping(root, "a")
        self.a, self.b = Node(nodes, root, "a", tier=self.tier), Node(nodes, root, "b")
        committed(self.b, 1, 2, 3)
        self.b.control.rotation.files.change(RUN, lambda file: file.model_copy(update={"policy": RetentionPolicy(last=1)}))

    def still(self, before: str, act: Callable[[], Any]) -> Still:
        self.tier.before = before
        return Still(self.tier, act)

    def pin(self, step: int) -> None:
        self.b.control.rotation.mark(RUN, step, lambda file: run_files.pinned(file, step))

    @property
    def standing(self) -> list[int]:
        return self.b.control.store.steps(RUN)


@pytest.fixture
def pair(postgres: Postgres, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pair]:
    monkeypatch.setattr(engines, "BUSY_TIMEOUT_S", WAITS_S)
    url = postgres.take()
    made = Pair(Nodes(url), tmp_path)
    yield made
    for node in (made.a, made.b):
        node.control.close()
    made.nodes.close()
    postgres.give_back(url)


def test_a_checkpoint_that_is_read_elsewhere_is_not_removed_by_a_node_that_stood_still(pair: Pair) -> None:
    """Node b begins to read step 1 while node a stands still before the rename of its removal: step 1 is there afterwards.
    What is not read goes when a decides again.
    """
    with pair.still("/trash/", lambda: pair.a.control.rotation.apply(RUN)) as still:
        reading = pair.b.control.readers.reading(RUN, pair.standing[0])
        reading.__enter__()
    assert isinstance(still.error, CatalogUnavailable) and pair.standing == [1, 2, 3] == steps(pair.b)
    pair.a.control.rotation.apply(RUN)
    assert pair.standing == [1, 3]
    reading.__exit__(None, None, None)


def test_a_link_that_was_made_meanwhile_holds(pair: Pair, tmp_path: Path) -> None:
    """What stands under a link when `watch_links` has returned stays, whichever node was deciding."""
    links = tmp_path / "links"
    links.mkdir()
    (links / "one").symlink_to(tmp_path / naming.checkpoint_path(RUN, 1))
    with pair.still("/trash/", lambda: pair.a.control.rotation.apply(RUN)):
        pair.b.control.rotation.watch_links(RUN, str(links))
    assert 1 in pair.standing
    pair.a.control.rotation.apply(RUN)
    assert pair.standing == [1, 3]


def test_what_replaced_a_checkpoint_meanwhile_is_not_removed_in_its_place(pair: Pair) -> None:
    """Node b saves step 1 again while node a stands still in the removal of the old one: the new one stands."""
    staged = naming.staging_path(RUN, 1, 2)
    pair.b.tier.put(f"{staged}/new", b"new")
    still = pair.still("/trash/", lambda: pair.a.control.rotation.remove(RUN, 1))
    with still, pair.b.control.rotation.replacing(RUN, 1):
        pair.b.tier.exchange(staged, naming.checkpoint_path(RUN, 1))
    assert isinstance(still.error, CatalogUnavailable)
    assert pair.b.tier.read(f"{naming.checkpoint_path(RUN, 1)}/new") == b"new"


def test_a_pin_waits_for_no_node_whose_lease_has_ended(pair: Pair) -> None:
    """Its lock is taken from it, and what it had decided is not carried out."""
    with pair.still("/trash/", lambda: pair.a.control.rotation.apply(RUN)):
        pair.nodes.lapse(pair.a.cluster)
        pair.pin(2)
        pair.pin(1)
    assert pair.standing == [1, 2, 3] == steps(pair.b)


def test_a_member_that_takes_long_is_named_and_goes_on(pair: Pair) -> None:
    """A pin is refused with the node that is deciding, which then removes what it has decided."""
    with pair.still("/trash/", lambda: pair.a.control.rotation.apply(RUN)) as still:
        with pytest.raises(CatalogUnavailable, match="daemon of node a") as refused:
            pair.pin(1)
        assert "stopped" in str(refused.value.hint)
    assert still.error is None and pair.standing == [3]


def test_a_run_is_not_deleted_by_a_node_that_stood_still(pair: Pair) -> None:
    """A pin set meanwhile holds: the run is where it was, whole, with nothing left that says it was deleted."""
    with pair.still(naming.RUN_TRASH, lambda: pair.a.control.trash.delete(RUN)) as still:
        pair.nodes.lapse(pair.a.cluster)
        pair.pin(2)
    assert isinstance(still.error, CatalogUnavailable)
    assert pair.standing == [1, 2, 3] == steps(pair.b) and pair.b.control.trash.entries() == []
    assert naming.DELETED_FILE not in pair.b.tier.list(RUN)
    assert run_files.read_run_file(pair.b.tier, RUN).pins == (2,)


def test_a_change_of_marks_by_a_node_that_stood_still_loses_no_other(pair: Pair) -> None:
    """Node a read the run's file, and stood still for longer than its lease: what b has set since stays set."""
    reading, goes_on = threading.Event(), threading.Event()

    def pinned(file: run_files.RunFile) -> run_files.RunFile:
        if threading.current_thread().name == "still" and pair.a.control.rotation.files.changing.locked():
            reading.set()
            assert goes_on.wait(LIMIT_S)
        return run_files.pinned(file, 3)

    errors: list[Exception] = []

    def change() -> None:
        try:
            pair.a.control.rotation.files.change(RUN, pinned)
        except CatalogUnavailable as lost:
            errors.append(lost)

    still = threading.Thread(target=change, name="still")
    still.start()
    assert reading.wait(LIMIT_S)
    pair.nodes.lapse(pair.a.cluster)
    pair.pin(1)
    goes_on.set()
    still.join(LIMIT_S)
    assert len(errors) == 1 and run_files.read_run_file(pair.b.tier, RUN).pins == (1,)

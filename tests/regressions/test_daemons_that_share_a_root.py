"""Decisions of two nodes on one root and one catalog: neither does what a living other one has to be asked about."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from errno import ENOENT
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from sqlalchemy import text

from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable, InUse, NoSuchResource, Pinned, RoundAborted
from holdfast_formats.lineage import Intent
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import consistency, run_files
from holdfast_service.control.control import Control
from holdfast_service.control.nodes import changing
from holdfast_service.storage import Looks, stored_in
from holdfast_service.storage.posix import PosixTier
from holdfast_service.wings.cluster import root_maintenance
from holdfast_service.wings.cluster.node_ranks import NodeRanks
from holdfast_service.wings.cluster.root_maintenance import RootMaintenance
from tests.control.published import a_manifest, a_row, mark_verified, put_checkpoint
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]
RUN = "run"
OLD_S = 7200.0


class Node:
    """One daemon's control."""

    def __init__(self, nodes: Nodes, root: Path, name: str, lease_s: float = 600.0, tier: PosixTier | None = None) -> None:
        self.cluster = nodes.add(name, lease_s)
        self.tier = tier or PosixTier(root, node=name)
        self.catalog = Catalog(self.cluster.database, name)
        self.control = Control(stored_in(self.tier), self.catalog, None, self.cluster)
        self.control.recovery.recover()
        self.maintenance = RootMaintenance(self.control, self.cluster)


class Looking:
    """A daemon's control, over a root that is looked at as often as stated."""

    def __init__(self, control: Control, looks: Looks) -> None:
        self._control, self.storage = control, control.storage._replace(looks=looks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)


@pytest.fixture
def pair(nodes: Nodes, tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    made = Node(nodes, tmp_path, "a"), Node(nodes, tmp_path, "b")
    yield made
    for node in made:
        node.control.close()


def committed(node: Node, *steps: int) -> None:
    for step in steps:
        put_checkpoint(node.tier, a_manifest(RUN, step))
        node.catalog.record_checkpoint(a_row(RUN, step))
        mark_verified(node.catalog, RUN, step)


def steps(node: Node) -> list[int]:
    return sorted(found.step for found in node.catalog.checkpoints(RUN, None, 100).items)


def test_a_start_leaves_the_saves_and_the_list_of_others(pair: tuple[Node, Node]) -> None:
    """What node a has open, stages and lists is there when node b has started, also a second time."""
    a, b = pair
    committed(a, 1)
    number, _ = a.catalog.rounds.open(RUN, 2, 1, 1, "2026-01-01T00:00:00Z")
    staged = naming.staging_path(RUN, 2, 1)
    a.tier.put(f"{staged}/model.safetensors", b"half")
    b.control.recovery.recover()
    assert b.control.record_queue.recorded(30)
    assert [found.id for found in a.catalog.rounds.page(RUN, "open").items] == [number]
    assert a.tier.list(staged) == ["model.safetensors"] and steps(b) == [1]


def test_its_own_saves_of_before_end_with_its_start(pair: tuple[Node, Node]) -> None:
    """A daemon that comes back ends what it had open, and nothing else."""
    a, b = pair
    mine, _ = a.catalog.rounds.open(RUN, 2, 1, 1, "2026-01-01T00:00:00Z")
    other, _ = b.catalog.rounds.open("other", 2, 1, 1, "2026-01-01T00:00:00Z")
    a.control.recovery.recover()
    assert a.control.record_queue.recorded(30)
    assert [found.id for found in a.catalog.rounds.page(None, "open").items] == [other]
    assert [found.id for found in a.catalog.rounds.page(RUN, "aborted").items] == [mine]


def test_who_looks_after_the_root_ends_the_saves_of_nodes_that_are_gone(pair: tuple[Node, Node]) -> None:
    """And no others."""
    a, b = pair
    gone, _ = a.catalog.rounds.open(RUN, 2, 1, 1, "2026-01-01T00:00:00Z")
    b.catalog.rounds.open("other", 2, 1, 1, "2026-01-01T00:00:00Z")
    b.maintenance.run_once()
    assert len(b.catalog.rounds.page(None, "open").items) == 2
    a.cluster.close()
    b.maintenance.run_once()
    assert [found.id for found in b.catalog.rounds.page(None, "aborted").items] == [gone]
    assert [found.run for found in b.catalog.rounds.page(None, "open").items] == ["other"]


def test_a_bucket_is_looked_at_less_often(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """A look costs requests: lost nodes are noticed all the same, and the root has its turn later."""
    a, b = pair
    looks = Looks(lambda runs: 600.0, at_files=False, late=True)
    b.maintenance = RootMaintenance(cast(Any, Looking(b.control, looks)), b.cluster)
    now = 1000.0
    monkeypatch.setattr(root_maintenance, "time", SimpleNamespace(monotonic=lambda: now))
    staged = naming.staging_path(RUN, 2, 1)

    def run_once() -> list[str]:
        b.maintenance.run_once(idle_s=0.0)
        return a.tier.list(staged)

    a.tier.put(f"{staged}/model.safetensors", b"half")
    assert run_once() == []
    a.tier.put(f"{staged}/model.safetensors", b"half")
    gone, _ = a.catalog.rounds.open(RUN, 3, 1, 1, "2026-01-01T00:00:00Z")
    a.cluster.close()
    now += 599.0
    assert run_once() == ["model.safetensors"]
    assert [found.id for found in b.catalog.rounds.page(None, "aborted").items] == [gone]
    now += 2.0
    assert run_once() == []


def test_a_save_of_one_live_node_is_not_swept(pair: tuple[Node, Node]) -> None:
    """However long ago it wrote: an upload to a bucket does not show that it goes on. That of a lost node is."""
    a, b = pair
    a.catalog.rounds.open(RUN, 2, 1, 1, "2026-01-01T00:00:00Z")
    assert b.cluster.rounds.places() == [naming.Place(RUN, 2, 1)]
    a.cluster.close()
    assert b.cluster.rounds.places() == []


def test_what_was_committed_and_never_listed_is_listed_by_who_looks_after_the_root(pair: tuple[Node, Node]) -> None:
    """Its committer was lost before the catalog heard of it; a commit that is on its way there is left to its node."""
    a, b = pair
    committed(a, 1)
    put_checkpoint(a.tier, a_manifest(RUN, 2))
    b.maintenance.run_once()
    assert steps(b) == [1]
    b.maintenance.run_once()
    assert steps(b) == [1, 2]


def test_what_a_lost_node_put_into_the_place_of_another_is_listed_as_it_is(pair: tuple[Node, Node]) -> None:
    """Its committer was lost before the catalog heard of it: nothing that is known of the old one is said of the new one.
    A node that does not see the new one yet looks again.
    """
    a, b = pair
    committed(a, 1, 2)
    a.catalog.rounds.open(RUN, 2, 2, 1, "2026-01-01T00:00:00Z")
    a.cluster.close()
    b.maintenance.run_once()
    assert b.catalog.checkpoint(RUN, 2).verified and b.catalog.checkpoint(RUN, 2).attempt == 1
    _replaced_by_another_attempt(b, 2)
    b.maintenance.run_once()
    listed = b.catalog.checkpoint(RUN, 2)
    assert (listed.attempt, listed.verified) == (2, False) and b.catalog.checkpoint(RUN, 1).verified


def test_a_save_that_another_node_committed_does_not_go_on_in_the_catalog(pair: tuple[Node, Node]) -> None:
    """Also where its beginning is recorded only after that: a new launch would wait for its end."""
    a, b = pair
    late = threading.Event()
    a.control.record_queue.enqueue("something slow", late.wait)
    number = a.control.saves.begin(RUN, 2, 1, 2)
    a.control.rounds.seal(number, 2)
    a.control.saves.joined(number, RUN, 2, 1, {})
    quiet = b.control.saves.begin(RUN, 2, 1, 2, quiet=True)
    b.control.saves.joined(quiet, RUN, 2, 1, {})
    late.set()
    for node in pair:
        assert node.control.record_queue.recorded(30)
    assert [found.state for found in b.catalog.rounds.page(RUN).items] == ["committed"]


def test_a_save_that_all_nodes_gave_up_is_one(pair: tuple[Node, Node]) -> None:
    """One record and one event; also where the node of the first rank had not begun it."""
    for step, told in ((1, pair), (2, pair[1:])):
        for node in told:
            number = node.control.saves.begin(RUN, step, 1, 2, quiet=node is not pair[0])
            assert node.control.record_queue.recorded(30)
            node.control.saves.abort(number, RoundAborted("a rank is gone"), None)
            assert node.control.record_queue.recorded(30)
        assert [found.step for found in pair[0].catalog.rounds.page(RUN, "aborted").items].count(step) == 1
        events = pair[0].control.events.after(0, 50, RUN, "save-aborted")
        assert [found.step for found in events].count(step) == 1


def test_a_save_is_one_record_however_late_a_node_tells_of_it(pair: tuple[Node, Node]) -> None:
    """The node of the first rank records its beginning after another one has recorded its end. The next try is another."""
    a, b = pair
    late = threading.Event()
    a.control.record_queue.enqueue("something slow", late.wait)
    numbers = [node.control.saves.begin(RUN, 2, 1, 2, quiet=node is b) for node in pair]
    a.control.rounds.seal(numbers[0], 2)
    for node, number in reversed([*zip(pair, numbers, strict=True)]):
        node.control.saves.abort(number, RoundAborted("a rank is gone"), None)
        if node is b:
            assert b.control.record_queue.recorded(30)
    late.set()
    assert a.control.record_queue.recorded(30)
    assert [found.state for found in a.catalog.rounds.page(RUN).items] == ["aborted"]
    assert len(a.control.events.after(0, 50, RUN, "save-aborted")) == 1
    again = a.control.saves.begin(RUN, 2, 1, 2)
    a.control.saves.joined(again, RUN, 2, 1, {})
    assert a.control.record_queue.recorded(30)
    assert [found.state for found in a.catalog.rounds.page(RUN).items] == ["committed", "aborted"]


def test_only_what_nobody_writes_to_is_swept(pair: tuple[Node, Node]) -> None:
    """By the storage's clock: a tree of two hours ago goes, one that was written to now stays."""
    a, b = pair
    stale, fresh = naming.staging_path(RUN, 1, 1), naming.staging_path(RUN, 2, 1)
    for path in (stale, fresh):
        a.tier.put(f"{path}/model.safetensors", b"half")
    b.maintenance.run_once()
    assert a.tier.list(f"{RUN}/{naming.STAGING}") == [Path(stale).name, Path(fresh).name]
    time.sleep(3.1)
    a.tier.put(f"{fresh}/more.safetensors", b"half")
    b.maintenance.run_once(idle_s=3.0)  # in which a busy machine comes from the write to here
    assert a.tier.list(f"{RUN}/{naming.STAGING}") == [Path(fresh).name]


def test_what_a_round_that_goes_on_has_staged_is_not_swept(pair: tuple[Node, Node]) -> None:
    """It may wait for longer than anybody writes, as while PostgreSQL is away; once it has ended, it goes (I16)."""
    a, b = pair
    meeting = a.cluster.rendezvous
    number = meeting.arrive(RUN, 7, 1, 2, [0], b"declared", b"said")
    place = naming.Place(RUN, 7, 1, number)
    a.control.store.begin(place).put("config.json", b"{}")
    b.maintenance.run_once(idle_s=0.0)
    assert a.tier.list(place.path) == ["config.json"]
    assert meeting.abort(number, RoundAborted("given up").problem())
    b.maintenance.run_once(idle_s=0.0)
    assert a.tier.list(place.path) == []


def test_a_checkpoint_between_two_renames_is_put_back_and_never_swept(pair: tuple[Node, Node]) -> None:
    """What stands aside while it is replaced goes back to its place, however old its files are."""
    a, b = pair
    committed(a, 1)
    aside = naming.replaced_path(RUN, 1)
    a.tier.publish(naming.checkpoint_path(RUN, 1), aside)
    assert b.control.store.sweep((), 0.0) == []
    b.maintenance.run_once(idle_s=0.0)
    assert a.tier.size(f"{naming.checkpoint_path(RUN, 1)}/{naming.COMMIT}") is not None


def test_what_is_read_by_way_of_one_node_stays_on_all(pair: tuple[Node, Node]) -> None:
    """Retention of node b keeps it, `rm` by way of node b is refused, and both go through when the reader is done."""
    a, b = pair
    committed(a, 1, 2, 3)
    with a.control.readers.reading(RUN, 1):
        b.control.rotation.set_policy(RUN, RetentionPolicy(last=1), "*")
        b.control.rotation.apply(RUN)
        assert steps(b) == [1, 3]
        with pytest.raises(InUse):
            b.control.rotation.remove(RUN, 1)
    a.cluster.holds.renew(a.control.readers.places())
    b.control.rotation.apply(RUN)
    assert steps(b) == [3]


def test_a_restore_by_way_of_one_node_holds_its_step_on_all(pair: tuple[Node, Node]) -> None:
    """What a launch was told to restore is not removed while its ranks read it."""
    a, b = pair
    committed(a, 1, 2)
    attempt = a.control.launches.declare(RUN, "launch", 1, None, 0, "session")
    assert a.control.restores.choose(RUN, attempt, 0, 1, ()) == 1
    with pytest.raises(InUse):
        b.control.rotation.remove(RUN, 1)
    a.control.launches.parted(RUN, attempt)
    a.cluster.holds.renew(a.control.readers.places())
    b.control.rotation.remove(RUN, 1)


def test_a_pin_that_was_set_holds_on_all_nodes(pair: tuple[Node, Node]) -> None:
    """Pins set by way of both nodes at once are all there, and no removal decides between reading and removing (I4)."""
    a, b = pair
    committed(a, *range(1, 21))
    a.control.rotation.set_policy(RUN, RetentionPolicy(last=30), "*")

    def pin(node: Node, steps: range) -> None:
        for step in steps:
            node.control.rotation.mark(RUN, step, lambda file, step=step: run_files.pinned(file, step))

    threads = [
        threading.Thread(target=pin, args=(a, range(1, 21, 2))),
        threading.Thread(target=pin, args=(b, range(2, 21, 2))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert run_files.read_run_file(a.tier, RUN).pins == tuple(range(1, 21))
    b.control.rotation.set_policy(RUN, RetentionPolicy(last=1), "*")
    b.control.rotation.apply(RUN)
    assert steps(a) == list(range(1, 21))
    with pytest.raises(Pinned):
        b.control.rotation.remove(RUN, 4)


def test_a_runs_file_is_changed_by_one_node_at_a_time(pair: tuple[Node, Node]) -> None:
    """What node b sets waits until node a has replaced the file that it had read, so that neither change is lost."""
    a, b = pair
    committed(a, 1)
    setting = threading.Thread(target=b.control.rotation.set_policy, args=(RUN, RetentionPolicy(last=5), "*"))
    with a.cluster.locks.locked(changing(RUN)):
        setting.start()
        setting.join(0.3)
        assert setting.is_alive() and run_files.read_run_file(a.tier, RUN).policy is None
        run_files.write_run_file(a.tier, RUN, run_files.RunFile(pins=(1,)))
    setting.join(180)
    file = run_files.read_run_file(a.tier, RUN)
    assert file.pins == (1,) and file.in_force.last == 5


def test_two_nodes_that_apply_a_policy_at_once_remove_the_same(pair: tuple[Node, Node]) -> None:
    """Each checkpoint goes once, and what is to stay stays."""
    a, b = pair
    committed(a, *range(1, 21))
    file = run_files.RunFile(policy=RetentionPolicy(last=3))
    run_files.write_run_file(a.tier, RUN, file)
    removed: list[int] = []
    threads = [threading.Thread(target=lambda n=node: removed.extend(n.control.rotation.apply(RUN))) for node in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert sorted(removed) == list(range(1, 18)) and steps(b) == [18, 19, 20]


def test_a_run_that_trains_on_another_node_is_not_swept_as_empty(pair: tuple[Node, Node]) -> None:
    """Nothing was ever saved to it, and node b has never seen its ranks: it stays as long as node a has them."""
    a, b = pair
    a.control.launches.declare(RUN, "launch", 1, None, 0, "session")
    assert not b.control.empty_runs.forget(RUN)
    a.cluster.node_ranks.parted(RUN)
    a.cluster.node_ranks.report({})
    assert b.control.empty_runs.forget(RUN)


def test_the_catalogs_check_knows_who_else_writes(pair: tuple[Node, Node]) -> None:
    """A save of node a is no save that nobody writes, for node b; once node a is gone it is."""
    a, b = pair
    a.catalog.rounds.open(RUN, 2, 1, 1, "2026-01-01T00:00:00Z")
    assert b.control.writers() == {"a", "b"}
    assert consistency.check(b.control.store, b.catalog, b.control.writers()).count == 0
    a.cluster.close()
    found = consistency.check(b.control.store, b.catalog, b.control.writers())
    assert [item.kind for item in found.items] == ["orphaned-round"]


def test_what_a_node_knows_of_ranks_all_show(pair: tuple[Node, Node]) -> None:
    """Whether a run is running, ended or lost, whichever node its ranks were connected to."""
    a, b = pair
    attempt = a.control.launches.declare(RUN, "launch", 1, None, 0, "session")
    a.control.lives.became(RUN, attempt, "died")
    assert a.control.record_queue.recorded(30)
    assert b.control.lives.by_run(None, {})[RUN].life == "died" == a.control.lives.by_run(None, {})[RUN].life


class Remembering(PosixTier):
    """A client of a network file system, which remembers which names there were when it looked before."""

    hidden: frozenset[str] = frozenset()

    def list(self, path: str) -> list[str]:
        return [name for name in super().list(path) if f"{path}/{name}" not in self.hidden]

    def size(self, path: str) -> int | None:
        return None if any(path.startswith(f"{name}/") for name in self.hidden) else super().size(path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if self.size(path) is None:
            raise NoSuchResource(f"there is no file {path}", errno=ENOENT)
        return super().read(path, offset, length)

    def stamps(self, path: str, names: Sequence[str]) -> dict[str, str]:
        return {name: stamp for name, stamp in super().stamps(path, names).items() if f"{path}/{name}" not in self.hidden}


@pytest.fixture
def remembering(nodes: Nodes, tmp_path: Path) -> Iterator[tuple[Node, Node, Remembering]]:
    """Node a has committed steps 1 and 2; node b does not see step 2 yet."""
    a = Node(nodes, tmp_path, "a")
    committed(a, 1, 2)
    b = Node(nodes, tmp_path, "b")
    tier = Remembering(tmp_path, node="b")
    tier.hidden = frozenset({naming.checkpoint_path(RUN, 2)})
    b.control = Control(stored_in(tier), b.catalog, None, b.cluster)
    b.control.recovery.recover()
    assert b.control.record_queue.recorded(30)
    yield a, b, tier
    a.control.close()
    b.control.close()


def test_a_step_that_this_node_does_not_see_yet_stays_listed(remembering: tuple[Node, Node, Remembering]) -> None:
    """Its start compares catalog and directories: what is missing for a moment is not gone, and stays verified."""
    a, b, _ = remembering
    assert steps(b) == [1, 2] and a.catalog.checkpoint(RUN, 2).verified


def test_a_launch_waits_for_the_newest_step_until_it_is_seen(remembering: tuple[Node, Node, Remembering]) -> None:
    """A run that moves from node a to node b goes on from where it was, and not from an older step."""
    _, b, tier = remembering
    attempt = b.control.launches.declare(RUN, "launch", 1, None, 0, "session")
    chosen: list[int | None] = []
    asking = threading.Thread(target=lambda: chosen.append(b.control.restores.choose(RUN, attempt, 0, None, ())))
    asking.start()
    asking.join(1.0)
    assert asking.is_alive()
    tier.hidden = frozenset()
    asking.join(180)
    assert chosen == [2]


def test_a_step_that_stays_missing_is_gone(remembering: tuple[Node, Node, Remembering]) -> None:
    """Somebody has removed the directory by hand: after a while the launch restores the step before it."""
    _, b, _ = remembering
    b.control.absences.patience_s = 0.5
    attempt = b.control.launches.declare(RUN, "launch", 1, None, 0, "session")
    assert b.control.restores.choose(RUN, attempt, 0, None, ()) == 1
    assert steps(b) == [1]


def test_a_run_is_lost_with_its_node(pair: tuple[Node, Node]) -> None:
    """Nobody saw its ranks go: the node that looks after the root says so, once, when it has missed them twice."""
    a, b = pair
    attempt = a.control.launches.declare(RUN, "launch", 1, None, 0, "session")
    a.control.lives.became(RUN, attempt, "running")
    a.cluster.node_ranks.report({RUN: NodeRanks(attempt, 1, 1)})
    assert a.control.record_queue.recorded(30)
    for _ in range(2):
        b.maintenance.run_once()
        assert b.control.lives.by_run(None, {})[RUN].life == "running"
    a.cluster.close()
    b.maintenance.run_once()
    assert b.control.lives.by_run(None, {})[RUN].life == "running"
    for _ in range(2):
        b.maintenance.run_once()
        assert b.control.lives.by_run(None, {})[RUN].life == "died"
    assert [event.run for event in b.control.events.newest(None, 100).items if event.kind == "run-died"] == [RUN]


def test_a_removal_that_stood_still_for_too_long_ends(pair: tuple[Node, Node]) -> None:
    """The database has given its lock away meanwhile: what it had decided is not carried out (I16)."""
    a, b = pair
    committed(a, 1, 2, 3)
    removed = a.control.rotation._discard

    def frozen(*arguments: object) -> dict[int, str]:
        with b.cluster.database.apart() as session:
            others = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"
            session.execute(text(others))
        return removed(*arguments)

    a.control.rotation._discard = frozen
    a.control.rotation.files.change(RUN, lambda file: file.model_copy(update={"policy": RetentionPolicy(last=1)}))
    with pytest.raises(CatalogUnavailable):
        a.control.rotation.apply(RUN)
    assert steps(b) == [1, 2, 3]


def test_files_that_a_node_replaces_are_not_another_ones_halves(pair: tuple[Node, Node], tmp_path: Path) -> None:
    """A crash leaves a half-written file under its node's own name; another node's replacement goes through."""
    a, b = pair
    (tmp_path / RUN).mkdir()
    (tmp_path / RUN / ".run.json.a.new").write_bytes(b"half")
    b.tier.replace(f"{RUN}/run.json", b"whole")
    assert (tmp_path / RUN / "run.json").read_bytes() == b"whole"
    assert os.path.exists(tmp_path / RUN / ".run.json.a.new")
    a.tier.replace(f"{RUN}/run.json", b"newer")
    assert not os.path.exists(tmp_path / RUN / ".run.json.a.new")


def test_what_several_nodes_have_staged_is_removed_at_one_stroke(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves staging/ before a file of it goes, so that a committer that was held up publishes all of it or nothing."""
    a, b = pair
    place = naming.Place(RUN, 7, 1, 3)
    staged = place.path
    for name in ("one.safetensors", "two.safetensors"):
        a.tier.put(f"{staged}/{name}", b"bytes")
    removed: list[tuple[str, list[str]]] = []
    remove = b.tier.remove_tree

    def looking(path: str) -> None:
        removed.append((path, a.tier.list(staged)))
        remove(path)

    monkeypatch.setattr(b.tier, "remove_tree", looking)
    number = b.control.saves.begin(RUN, 7, 1, 2)
    b.control.saves.abort(number, RoundAborted("given up"), place)
    aside = f"{RUN}/{naming.TRASH}/{staged.rpartition('/')[2]}"
    assert removed[-1] == (aside, []) and a.tier.list(aside) == []
    b.control.saves.abort(number, RoundAborted("heard again"), place)


def test_what_another_node_replaced_is_known_as_it_is_now(pair: tuple[Node, Node]) -> None:
    """By the nodes that took part in it, and by a launch that restores afterwards: it decides what is on the line that goes
    on, and whether a rank that comes back is told that its save is committed.
    """
    a, b = pair
    for step in (1, 2):
        put_checkpoint(a.tier, a_manifest(RUN, step))
    assert [node.control.lineage_index.launch(RUN, 2) for node in pair] == [(1, 0), (1, 0)]
    _replaced_by_another_attempt(b, 2)
    number = a.control.saves.begin(RUN, 3, 2, 2, Intent(turn=1, again=1))  # it has said that it replaces
    a.control.saves.joined(number, RUN, 2, 2, {})
    assert a.control.lineage_index.launch(RUN, 2) == (2, 0)
    _replaced_by_another_attempt(b, 1)
    assert a.control.launches.declare(RUN, "a later launch", 1, None) and a.control.restores.choose(RUN, 3, 0, 1, ()) == 1
    assert a.control.lineage_index.launch(RUN, 1) == (2, 0)


def _replaced_by_another_attempt(node: Node, step: int) -> None:
    node.tier.remove_tree(naming.checkpoint_path(RUN, step))
    put_checkpoint(node.tier, msgspec.structs.replace(a_manifest(RUN, step), attempt=2))


def test_one_node_at_a_time_repairs_a_checkpoint(pair: tuple[Node, Node]) -> None:
    """Both would write to the same place; another checkpoint does not wait."""
    a, b = pair
    done = threading.Event()

    def repair() -> None:
        with b.control.repairs.repairing(RUN, 1):
            done.set()

    with a.control.repairs.repairing(RUN, 1), b.control.repairs.repairing(RUN, 2):
        other = threading.Thread(target=repair)
        other.start()
        assert not done.wait(0.3)
    other.join(180)
    assert done.is_set()

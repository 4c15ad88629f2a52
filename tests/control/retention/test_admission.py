"""Admission: a save that cannot fit makes room as the policy allows, or is refused by name before a byte is written."""

from __future__ import annotations

import pytest

from holdfast_formats import naming
from holdfast_formats.disk import packing
from holdfast_formats.errors import QuotaExceeded
from holdfast_formats.lineage import NO_INTENT, Intent
from holdfast_formats.naming import Place
from holdfast_formats.region import whole
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.control.checkpoints.planner import plan
from holdfast_service.control.retention import admission
from holdfast_service.daemon.writing.writer import write
from holdfast_service.storage import MemoryTier, PosixStore
from tests.daemon.saver_world import RUN, Rank, SaverWorld, saver_world


class Counted(MemoryTier):
    """A tier that knows which files were begun."""

    def __init__(self, capacity_bytes: int = 2**40) -> None:
        super().__init__(capacity_bytes)
        self.created: list[str] = []

    def create(self, path: str, size: int):  # type: ignore[no-untyped-def]
        self.created.append(path)
        return super().create(path, size)


def save(world: SaverWorld, rank: Rank, step: int, intent: Intent = NO_INTENT) -> dict | None:
    """Save a step to its end: None once it is verified and rotated, else the problem that the ticket says."""
    rank.outcomes.pop(step, None)
    rank.save(step, intent=intent)
    outcome = rank.wait(step)
    world.checked()
    assert outcome.problem is not None or world.catalog.checkpoint(RUN, step).verified
    assert world.control.rotation.wait_until_applied()
    return outcome.problem


def grant(world: SaverWorld, **rules: object) -> None:
    world.control.rotation.set_policy(RUN, RetentionPolicy(**rules), "*")


def size_of(world: SaverWorld, step: int) -> int:
    return world.catalog.checkpoint(RUN, step).bytes


def test_a_save_over_the_quota_is_refused_early() -> None:
    """The ticket says what is needed, used and granted; nothing was written; with more room the same step is saved."""
    tier = Counted()
    with saver_world(tier) as world:
        (rank,) = world.launch(1)
        assert save(world, rank, 1) is None
        size = size_of(world, 1)
        grant(world, last=5, quota_bytes=2 * size - 1)
        tier.created.clear()
        problem = save(world, rank, 2)
        assert problem is not None
        assert (problem["code"], problem["status"], problem["retryable"]) == ("quota-exceeded", 507, True)
        assert (problem["used"], problem["quota"]) == (size, 2 * size - 1)
        assert problem["needed"] == size
        assert "holdfast keep r --dry-run" in problem["hint"]
        assert tier.created == [] and tier.list(f"{RUN}/{naming.STAGING}") == []
        assert world.catalog.rounds.failure_counts() == {"quota-exceeded": 1}
        assert world.committed() == [1]
        grant(world, last=5, quota_bytes=3 * size)
        assert save(world, rank, 2) is None
        assert world.committed() == [1, 2]


def test_room_is_made_among_superseded_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two and a half checkpoints "last 2" goes on for ever; the newest verified one is there throughout."""
    monkeypatch.setattr(admission, "USED_S", 60.0)  # on a busy machine the catalog takes longer to say what is used
    with saver_world() as world:
        (rank,) = world.launch(1)
        assert save(world, rank, 1) is None
        grant(world, last=2, quota_bytes=size_of(world, 1) * 5 // 2)
        for step in range(2, 6):
            assert save(world, rank, step) is None
            assert world.committed() == [step - 1, step]
        assert world.control.rotation.removed["space"] == 3


def test_the_newest_verified_makes_no_room() -> None:
    """With room for one and a half checkpoints the one that is there stays, whatever would be kept afterwards (I10)."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        assert save(world, rank, 1) is None
        grant(world, last=1, quota_bytes=size_of(world, 1) * 3 // 2)
        problem = save(world, rank, 2)
        assert problem is not None and problem["code"] == "quota-exceeded"
        assert world.committed() == [1]


def test_a_disk_that_has_no_room_is_refused_early() -> None:
    """Free bytes are compared with the plan, some left for the catalog; what rules of any run let go is removed first."""
    tier = Counted()
    with saver_world(tier) as world:
        (rank,) = world.launch(1)
        for step in (1, 2, 3):
            assert save(world, rank, step) is None
        used = 2**40 - tier.free_bytes()
        assert save(world, rank, 4) is None
        tier._capacity_bytes = used + size_of(world, 4) + admission.SPARE_BYTES + 40_000
        tier.created.clear()
        problem = save(world, rank, 5)
        assert problem is not None and problem["code"] == "no-space"
        assert problem["needed"] > problem["free"] == tier.free_bytes()
        assert tier.created == []
        assert world.committed() == [1, 2, 3, 4]
        tier._capacity_bytes += problem["needed"] - problem["free"] - size_of(world, 1)  # one more, once another has gone
        grant(world, last=2)
        tier.put("other/run.json", b"?")  # another run's broken file is no reason to refuse
        assert save(world, rank, 5) is None
        assert world.committed() == [4, 5]


def test_the_bound_on_what_a_save_takes_counts_every_extent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents are stated twice, in receipt and manifest: of very many, too, no more is written than was foreseen."""
    monkeypatch.setattr(packing, "EXTENT_BYTES_MIN", 64)
    spec = TensorSpec("model", "w", "U8", (2**19,))
    held = (StagedFragment(spec, (whole(spec.shape),), 0),)
    planned = plan([SlotTable(RUN, 1, 1, 0, 1, ("model",), held, {"model": {}}, {})])
    tier = MemoryTier()
    staged = Place(RUN, 1, 1)
    write(PosixStore(tier).begin(staged), planned, {0: memoryview(bytes(2**19))}, "node")
    receipt = tier.size(f"{staged.path}/{naming.RECEIPTS}/node.json")
    data = sum(tier.size(f"{staged.path}/{file.layout.name}") or 0 for file in planned.files)
    assert receipt is not None and receipt > 2**16
    assert data + 2 * receipt <= admission.disk_bytes(planned) <= 2 * (data + 2 * receipt)


def test_an_unreadable_quota_refuses_no_save() -> None:
    """A save is worth more than a limit that nobody can read; and nothing is removed without knowing what is pinned."""
    with saver_world(keep_last=1) as world:
        (rank,) = world.launch(1)
        assert save(world, rank, 1) is None
        world.tier.replace(f"{RUN}/{naming.RUN_FILE}", b"?")
        for step in (2, 3):
            assert save(world, rank, step) is None
        assert world.committed() == [1, 2, 3]
        (again,) = world.launch(1)
        assert again.attempt == 2


def test_the_quotas_of_a_save_that_ended_before_its_commit_are_not_those_of_another_one() -> None:
    """Its write failed, or another node committed it. They are not kept for ever either."""
    planned = plan([SlotTable(RUN, 1, 1, 0, 1, ("model",), (), {"model": {}}, {})])
    with saver_world() as world:
        (rank,) = world.launch(1)
        assert save(world, rank, 1) is None
        size, admissions = size_of(world, 1), world.control.admission
        admissions.admit(planned._replace(step=2))
        grant(world, last=5, quota_bytes=2 * size - 1)
        admissions.check_quotas(RUN, 2, size)  # as it was admitted
        grant(world, last=5, quota_bytes=3 * size)
        admissions.admit(planned._replace(step=3))
        grant(world, last=5, quota_bytes=2 * size - 1)
        with pytest.raises(QuotaExceeded):
            admissions.check_quotas(RUN, 4, size)
        for step in range(5, 5 + 2 * admission.ADMITTED_MAX):
            admissions.admit(planned._replace(step=step))
        assert len(admissions._admitted) == admission.ADMITTED_MAX


def test_what_a_launch_restored_is_held_until_it_saves_or_parts() -> None:
    """The step that `restore()` was told stays while its ranks may read it, and not longer."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        for step in (1, 2):
            assert save(world, rank, step) is None
        readers = world.control.readers
        for way in ("commits", "parts"):
            (next_rank,) = world.launch(1)
            assert world.control.restores.choose(RUN, next_rank.attempt, 0, 1, ()) == 1
            assert list(readers.held(RUN)) == [1]
            if way == "commits":
                assert save(world, next_rank, 3, Intent(restored=1, turn=1)) is None
            else:
                next_rank.leave()
            assert readers.held(RUN) == {}

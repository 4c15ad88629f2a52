"""Quotas of teams: kept in the root, counted over all runs of a pattern, and refused by name before a byte is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable, CorruptManifest, LimitExceeded, NoSuchResource
from holdfast_service.control.retention import team_quotas
from holdfast_service.control.retention.admission import USED_S
from holdfast_service.control.retention.team_quotas import TeamQuotas
from holdfast_service.storage import MemoryTier, PosixTier
from holdfast_service.storage.map_file import FILE_BYTES_MAX
from tests.control.retention.test_admission import Counted, save, size_of
from tests.daemon.saver_world import RUN, GatedTier, SaverWorld, saver_world


def quotas_of(world: SaverWorld) -> TeamQuotas:
    return TeamQuotas(world.tier, world.catalog.database)


def test_a_save_over_the_quota_of_a_team_is_refused_early() -> None:
    """Runs of the team count together; the refusal has the numbers and the pattern; nothing was written."""
    tier = Counted()
    with saver_world(tier) as world:
        (rank,) = world.launch(1)
        assert save(world, rank, 1) is None
        size, quotas = size_of(world, 1), quotas_of(world)
        quotas.set("other-*", 1)
        quotas.set(f"{RUN}*", 2 * size - 1)
        tier.created.clear()
        problem = save(world, rank, 2)
        assert problem is not None and (problem["code"], problem["status"]) == ("quota-exceeded", 507)
        assert (problem["pattern"], problem["used"], problem["quota"]) == (f"{RUN}*", size, 2 * size - 1)
        assert f"holdfast quota set '{RUN}*'" in problem["hint"]
        assert tier.created == [] and tier.list(f"{RUN}/{naming.STAGING}") == []
        quotas.set(f"{RUN}*", 2 * size)
        assert save(world, rank, 2) is None
        assert [(one.pattern, one.used_bytes, one.runs) for one in quotas.usage()] == [
            ("other-*", 0, 0),
            (f"{RUN}*", 2 * size, 1),
        ]


@pytest.mark.parametrize("pattern", ["*", RUN])
def test_a_quota_that_others_use_up_while_a_save_is_written(pattern: str) -> None:
    """Two that fit one by one do not pass it together: the second is refused when it is to be committed, and leaves
    nothing.
    """
    tier = GatedTier(MemoryTier())
    with saver_world(tier) as world:
        (rank,) = world.launch(1)
        assert save(world, rank, 1) is None
        size = size_of(world, 1)
        quotas_of(world).set(pattern, 2 * size)
        tier.gate.swing(True)
        rank.save(2)
        tier.gate.wait_for(2)  # it was admitted, and is being written
        other = world.catalog.checkpoint(RUN, 1).model_copy(update={"run": "other" if pattern == "*" else RUN, "step": 9})
        world.catalog.declare_attempt("other", "launch", 1, "now")
        world.catalog.record_checkpoint(other)  # by another daemon
        tier.gate.swing(False)
        problem = rank.wait(2).problem
        assert problem is not None and problem["code"] == "quota-exceeded"
        assert (problem["needed"], problem["used"], problem["quota"]) == (size, 2 * size, 2 * size)
        assert world.committed() == [1] and tier.list(f"{RUN}/{naming.STAGING}") == []
        quotas_of(world).set(pattern, 4 * size)
        assert save(world, rank, 3) is None


def test_a_file_that_cannot_be_read_stops_no_save() -> None:
    """Nor a catalog that is away: a save is worth more than a limit; whoever asks for the quotas is told."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        world.tier.replace(naming.QUOTAS, b"{broken")
        assert save(world, rank, 1) is None
        with pytest.raises(CorruptManifest):
            quotas_of(world).all()
        with pytest.raises(CorruptManifest):
            quotas_of(world).set("*", 5)  # what is in it may still be saved by hand
        world.tier.replace(naming.QUOTAS, json.dumps({"quotas": {"*": 1}}).encode())
        admission = world.control.admission

        def away(*_: object) -> int:
            raise CatalogUnavailable("away")

        admission._ask = away
        assert save(world, rank, 2) is None


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"[" * 100_000,
        b"x" * (FILE_BYTES_MAX + 1),
        b'{"version": 2}',
        b'{"quotas": {"*": 5, "*": 500}}',
        b'{"quotas": {"*": "5"}}',
        b'{"quotas": {"*": 0}}',
        b'{"quotas": {"a,b": 5}}',
        b'{"quotas": {"*": 1' + b"0" * 5000 + b"}}",
        "{}".encode("utf-16"),
    ],
)
def test_a_file_that_is_not_understood_is_told_of(written: bytes) -> None:
    """By name, and nothing of it is taken for a quota."""
    tier = MemoryTier(2**30)
    tier.replace(naming.QUOTAS, written)
    with saver_world(tier) as world, pytest.raises(CorruptManifest, match="quotas"):
        quotas_of(world).of(RUN)


@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "dangling", "loop"])
def test_what_is_no_file_is_told_of(tmp_path: Path, kind: str) -> None:
    """A quota is not quietly gone because something else stands in its place; and no save waits for a FIFO."""
    path, target = tmp_path / "root" / naming.QUOTAS, {"link": "elsewhere", "dangling": "nowhere", "loop": naming.QUOTAS}
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "elsewhere").write_text('{"quotas": {}}')
    tier = PosixTier(tmp_path / "root")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(target[kind])
    with pytest.raises(CorruptManifest, match="quotas"):
        TeamQuotas(tier, None).of(RUN)  # type: ignore[arg-type]
    with saver_world(tier) as world:
        (rank,) = world.launch(1)
        assert save(world, rank, 1) is None


def test_a_save_waits_for_all_its_quotas_at_once() -> None:
    """However many teams its run belongs to: the catalog may be slow. And once more when it is to be committed."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        for length in range(1, len(RUN) + 1):
            quotas_of(world).set(f"{RUN[:length]}*", 2**40)
        admission, waits = world.control.admission, []
        asked = admission._ask
        admission._ask = lambda question, wait_s: waits.append(wait_s) or asked(question, wait_s)
        assert save(world, rank, 1) is None
        assert waits == [USED_S, USED_S]


def test_quotas_survive_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the root; one that is not there cannot be removed; and there is an end to how many there are."""
    monkeypatch.setattr(team_quotas, "QUOTAS_MAX", 2)
    tier = MemoryTier(2**30)
    with saver_world(tier) as world:
        quotas = quotas_of(world)
        assert quotas.all() == {}
        quotas.set("b*", 5)
        quotas.set("a*", 7)
        with pytest.raises(LimitExceeded):
            quotas.set("c*", 1)
        with pytest.raises(NoSuchResource):
            quotas.remove("c*")
        assert quotas_of(world).of("a1") == {"a*": 7}
        quotas.remove("b*")
        assert json.loads(tier.read(naming.QUOTAS)) == {"version": 1, "quotas": {"a*": 7}}

"""Quotas of teams: kept in the root, counted over all runs of a pattern, and refused by name before a byte is written."""

from __future__ import annotations

import json

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable, CorruptManifest, LimitExceeded, NoSuchResource
from holdfast_service.control.retention import team_quotas
from holdfast_service.control.retention.team_quotas import TeamQuotas
from holdfast_service.storage import MemoryTier
from tests.control.retention.test_admission import Counted, save, size_of
from tests.daemon.saver_world import RUN, SaverWorld, saver_world


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
        assert [(one.pattern, one.used_bytes, one.runs) for one in quotas.told()] == [
            ("other-*", 0, 0),
            (f"{RUN}*", 2 * size, 1),
        ]


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
        admission = world.decisions._admission

        def away(*_: object) -> int:
            raise CatalogUnavailable("away")

        admission._ask = away
        assert save(world, rank, 2) is None


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

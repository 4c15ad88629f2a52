"""What a run may hold of what all share: nearly everything alone, and never so much that nobody else gets anything."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from holdfast_formats.errors import LimitExceeded
from holdfast_formats.memory_bounds import Bound
from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import SegmentOwner
from holdfast_service.config import RUN_SHARE_PERCENT
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.budget import Budget
from holdfast_service.daemon.arena.segment import ArenaSegment
from holdfast_service.daemon.arena.shares import ShareHolder, Shares, StagingQuota, left
from holdfast_service.daemon.arena.spill import Spill

ONE = arena.geometry(1, 2**20, 4096)
TOTAL = 100 * ONE.segment_bytes


def node(total: int = TOTAL, spill: Spill | None = None, share: int = RUN_SHARE_PERCENT) -> Arena:
    return Arena(Budget(total, lambda: [Bound("machine", 2**40, 2**40)]), spill=spill, shares=Shares(share))


def reserve(made: Arena, run: str, rank: int = 0, tenant: str = "") -> ArenaSegment:
    return made.reserve(ONE, f"{run}-rank{rank}", SegmentOwner(run, rank, 200, 1), ShareHolder(run, tenant))


def fill(made: Arena, run: str, tenant: str = "") -> int:
    """How many ranks of a run get memory before one is refused."""
    for rank in range(200):
        try:
            reserve(made, run, rank, tenant)
        except LimitExceeded:
            return rank
    raise AssertionError("nothing bounds it")


def test_the_rule() -> None:
    """So many percent of what others do not hold, for a run and for all runs of a tenant; 100 is no bound but the total."""
    a, b, c = ShareHolder("a", "team"), ShareHolder("b", "team"), ShareHolder("c")
    assert left(Shares(96), 100, [], a).bytes_left == 96
    assert left(Shares(96), 100, [(a, 96)], c).bytes_left == 3, "of the 4 that are left"
    assert left(Shares(96), 100, [(a, 96)], a).bytes_left == 0
    assert left(Shares(96), 100, [(a, 50)], b).bytes_left == 46, "a second name of the same team is no way around it"
    assert left(Shares(96), 100, [(a, 50)], ShareHolder("b", "others")).bytes_left == 48
    assert left(Shares(96), 100, [(a, 50)], ShareHolder("b")).bytes_left == 48
    assert left(Shares(100), 100, [(a, 60)], b).bytes_left == 40
    assert left(Shares(50), 100, [(a, 90)], a).bytes_left == 0, (
        "what was there before the setting stays, and nothing comes to it"
    )


def test_a_token_alone_leaves_room() -> None:
    """All runs of the tokens for one pattern have a smaller share than a run or a local user."""
    shares = Shares(96, 50)
    a, b = (
        ShareHolder("a", "tokens for the runs 'a*'", remote=True),
        ShareHolder("b", "tokens for the runs 'b*'", remote=True),
    )
    assert left(shares, 100, [], a).bytes_left == 50
    assert left(shares, 100, [(a, 50)], a._replace(run="a2")).bytes_left == 0
    assert left(shares, 100, [(a, 50)], b).bytes_left == 25
    assert left(shares, 100, [(a, 50)], ShareHolder("own")).bytes_left == 48
    assert left(shares, 100, [], ShareHolder("c", "user 7")).bytes_left == 96
    assert left(Shares(40, 50), 100, [], a).bytes_left == 40, "a run's share bounds a token's"


def test_a_quota_bounds_what_is_staged_on_the_disk(tmp_path: Path) -> None:
    """Of all runs that it covers together; who has none is bounded by the share alone. The refusal names the quota."""
    quota = StagingQuota("the quota of the runs team-*", 2 * ONE.segment_bytes, lambda run: run.startswith("team-"))
    made = node(4096, Spill(tmp_path, lambda run: [quota] if quota.covers(run) else []))
    held = [reserve(made, f"team-{name}") for name in "ab"]
    with pytest.raises(LimitExceeded, match=r"the quota of the runs team-\*, \d+ bytes, of which \d+ are staged"):
        reserve(made, "team-c")
    held.append(reserve(made, "other"))
    made.drop(held[0])
    held.append(reserve(made, "team-c"))
    for segment in held[1:]:
        made.drop(segment)


def test_what_a_run_alone_may_have_is_what_it_always_could() -> None:
    """Of an automatic budget the share of a run alone is at least the 90 % of the machine that the whole arena once was."""
    budget = Budget(None, lambda: [Bound("machine", 10**12, 10**12)])
    assert budget.bytes_max * RUN_SHARE_PERCENT // 100 >= 9 * 10**11


def test_one_run_does_not_take_it_all(caplog: pytest.LogCaptureFixture) -> None:
    """Its refusal names the share and what it holds, with no other run's name; the daemon's log names all; others go on."""
    made = node()
    assert fill(made, "greedy") == 96
    with pytest.raises(
        LimitExceeded, match=r"the run 'greedy' may reserve 96 % of what others have not reserved: .* --run-share"
    ):
        try:
            reserve(made, "greedy", 99)
        except LimitExceeded as error:
            raise LimitExceeded(f"{error.detail} {error.hint}") from error
    reserve(made, "later")
    reserve(made, "latest", tenant="team")
    with caplog.at_level(logging.WARNING), pytest.raises(LimitExceeded) as refused:
        for rank in range(1, 9):
            reserve(made, "later", rank)
    assert "greedy" not in refused.value.detail and f"greedy {96 * ONE.segment_bytes}" in caplog.text
    assert made.holders == {"greedy": 96 * ONE.segment_bytes, "later": 2 * ONE.segment_bytes, "latest": ONE.segment_bytes}


def test_many_names_are_no_way_around_it() -> None:
    """All runs of one tenant together hold no more than one of them could; somebody else still gets memory."""
    made = node()
    assert fill(made, "team-a", "team") == 96
    assert [fill(made, f"team-{name}", "team") for name in "bc"] == [0, 0]
    reserve(made, "other", tenant="another team")


def test_the_disk_is_shared_as_well(tmp_path: Path) -> None:
    """Segments that are staged on disk leave room there: a run gets its share of what is free, by the same rule."""
    made = node(4096, Spill(tmp_path), share=1)
    huge = arena.geometry(1, Spill(tmp_path).free_bytes() // 50, 4096)
    with pytest.raises(LimitExceeded, match=r"the disk's .* may reserve 1 % of what others have not reserved"):
        made.reserve(huge, "r", SegmentOwner("r", 0, 1, 1))
    segment = made.reserve(ONE, "r", SegmentOwner("r", 0, 1, 1))
    assert segment.spilled and made.has("r") and not made.has("other")
    made.drop(segment)

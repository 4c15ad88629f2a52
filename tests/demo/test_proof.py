"""The demo's comparisons: they hold for equal runs, and name what differs."""

from __future__ import annotations

import json

from holdfast.demo.proof import KINDS, LaunchRecord, compare_losses, compare_states, compare_weights, parse_journal

WHOLE = [LaunchRecord(0, {1: 2.5, 2: 2.25, 3: 2.0}, []), LaunchRecord(0, {1: 2.75, 2: 2.5, 3: 2.125}, [])]
STATE = {f"{kind}/entry": f"{position:016x}" for position, kind in enumerate(KINDS)}


def event(**members: object) -> str:
    return json.dumps(members) + "\n"


def test_a_journal_is_read_launch_by_launch_and_losses_keep_every_bit() -> None:
    """Each `restored` line begins a launch; a loss written as float.hex() comes back exactly."""
    text = (
        event(restored=0)
        + event(step=1, loss=(0.1).hex())
        + event(staged=1)
        + event(restored=1)
        + event(step=2, loss="0x1p-1")
    )
    assert parse_journal(text) == [LaunchRecord(0, {1: 0.1}, [1]), LaunchRecord(1, {2: 0.5}, [])]


def test_the_line_that_a_kill_tore_is_left_out() -> None:
    """A last line without its end counts as not written."""
    assert parse_journal(event(restored=0) + event(step=1, loss="0x1p+0") + '{"step": 2, "lo') == [
        LaunchRecord(0, {1: 1.0}, [])
    ]


def test_equal_losses_hold_with_their_count() -> None:
    """Losses of a later launch are compared at the same steps on the same ranks."""
    claim = compare_losses(
        WHOLE, [LaunchRecord(1, {2: 2.25, 3: 2.0}, []), LaunchRecord(1, {2: 2.5, 3: 2.125}, [])], "losses"
    )
    assert claim.holds
    assert claim.evidence == "4 losses on 2 ranks, steps 2 to 3"


def test_one_bit_in_one_loss_on_one_rank_is_found() -> None:
    """The smallest difference there is makes the claim false and is named by rank and step."""
    claim = compare_losses(WHOLE, [WHOLE[0], LaunchRecord(0, {3: 2.125000000000001}, [])], "losses")
    assert not claim.holds
    assert claim.evidence.startswith("rank 1, step 3:")


def test_no_loss_at_all_proves_nothing() -> None:
    """A run that never took a step does not count as equal."""
    assert not compare_losses(WHOLE, [LaunchRecord(0, {}, []), LaunchRecord(0, {}, [])], "losses").holds


def test_equal_states_hold_for_every_kind() -> None:
    """There is a claim for each kind of state a checkpoint holds."""
    claims = compare_states([STATE, STATE], [STATE, STATE])
    assert len(claims) == len(KINDS)
    assert all(claim.holds for claim in claims)


def test_a_different_or_missing_digest_fails_its_kind_alone() -> None:
    """What differs on one rank is named, what is missing is a difference."""
    without = {name: value for name, value in STATE.items() if name != "ema/entry"}
    changed = without | {"optim/entry": "f" * 16}
    failed = {claim.what: claim.evidence for claim in compare_states([STATE, STATE], [STATE, changed]) if not claim.holds}
    assert failed == {
        "final state: optimizer": "rank 1: optim/entry, and 0 more",
        "final state: EMA": "rank 1: ema/entry, and 0 more",
    }


def test_loaded_weights_must_be_all_and_equal() -> None:
    """A weight that is missing, added or changed is named."""
    assert compare_weights({"a": "1", "b": "2"}, {"a": "1", "b": "2"}).holds
    assert compare_weights({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}).evidence == "different: b, c"
    assert not compare_weights({}, {}).holds

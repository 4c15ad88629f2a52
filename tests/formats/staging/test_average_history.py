"""Which updates an average has taken in, and the note of it in a slot."""

from __future__ import annotations

import msgspec
import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging import average, average_history
from holdfast_formats.staging.arena import SegmentOwner
from holdfast_formats.staging.average import AverageRule, AverageState, AverageUpdate

RULE = AverageRule("master", 0.9, 1, "none")
STATE = AverageState("master", 0.9, 1, "none", n=3, step=3, dropped=1)


def update(number: int, step: int, rank: int = 0, seed: AverageState | None = None) -> AverageUpdate:
    return AverageUpdate(SegmentOwner("r", rank, 2, 1), number, step, RULE, f"layout of {rank}", (), seed)


def test_ranks_with_the_same_updates_have_the_same_history() -> None:
    """Whatever they hold; another update, step, order or rule makes another one, and a seed begins anew."""
    after = average_history.history_after
    one = after(after("", update(1, 10)), update(2, 20))
    assert one == after(after("", update(1, 10, rank=1)), update(2, 20, rank=1))
    others = {
        after("", update(2, 20)),
        after(after("", update(1, 10)), update(2, 21)),
        after(after("", update(1, 10)), update(3, 20)),
        after(after("", update(1, 10)), msgspec.structs.replace(update(2, 20), rule=AverageRule("master", 0.8, 1))),
    }
    assert len(others) == 4 and one not in others
    assert after(one, update(3, 3, seed=STATE)) == after("", update(3, 3, rank=1, seed=STATE))


def test_a_note_reads_back() -> None:
    """Also one of a daemon that knew no history; and what is none is refused."""
    assert average_history.decode_note(average_history.encode_note(STATE, "abc")) == (STATE, "abc")
    assert average_history.decode_note(average.encode_state(STATE).encode()) == (STATE, "")
    assert average.decode_state(average_history.encode_note(STATE, "abc")) == STATE
    with pytest.raises(InvalidRequest, match="record of an average"):
        average_history.decode_note(b"{}")

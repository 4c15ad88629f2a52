"""Ranges of other nodes' slots: fetched in the order in which they are read, ahead of who reads; a loss keeps nobody."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import pytest

from holdfast.read import held_slots
from holdfast.read.held_slots import PeerSlots
from holdfast_formats.errors import DaemonGone
from holdfast_formats.staging.slot_ranges import SlotRange


class Asked:
    """Answers requests as the daemon would, once `opened`; `lost` are the ranks of which nothing comes."""

    def __init__(self, lost: Collection[int] = ()) -> None:
        self.lost, self.requests = lost, list[Sequence[SlotRange]]()
        self.opened = threading.Event()
        self.opened.set()

    def __call__(self, ranges: Sequence[SlotRange]) -> Collection[int]:
        assert self.opened.wait(180)
        self.requests.append(ranges)
        return {one.rank for one in ranges} & set(self.lost)


def test_in_order_and_in_requests_of_some_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long range is cut, short ones go together; parts of what was wanted are there, and what was not wanted is not."""
    monkeypatch.setattr(held_slots, "FETCH_BYTES", 100)
    asked = Asked()
    peers = PeerSlots((), asked)
    peers.want([SlotRange(1, 0, 250), SlotRange(2, 10, 20), SlotRange(2, 20, 60), SlotRange(1, 300, 400)])
    for one in (SlotRange(1, 0, 250), SlotRange(1, 90, 210), SlotRange(2, 12, 58), SlotRange(1, 399, 400)):
        assert peers.has(one), one
    for one in (SlotRange(1, 0, 251), SlotRange(1, 249, 301), SlotRange(2, 9, 12), SlotRange(3, 0, 1)):
        assert not peers.has(one), one
    assert [[(one.rank, one.begin, one.end) for one in some] for some in asked.requests] == [
        [(1, 0, 100)],
        [(1, 100, 200)],
        [(1, 200, 250), (2, 10, 20), (2, 20, 60)],
        [(1, 300, 400)],
    ]
    assert peers.bytes_wanted == 400
    peers.close()


def test_what_is_lost_is_lost_for_that_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the batches in which it was: what came before stays."""
    monkeypatch.setattr(held_slots, "FETCH_BYTES", 100)
    asked = Asked()
    peers = PeerSlots((), asked)
    asked.opened.clear()
    peers.want([SlotRange(1, 0, 60), SlotRange(2, 0, 40), SlotRange(1, 60, 120), SlotRange(2, 40, 80)])
    asked.opened.set()
    assert peers.has(SlotRange(1, 0, 60))
    peers.close()
    asked = Asked(lost=(1,))
    peers = PeerSlots((), asked)
    peers.want([SlotRange(1, 0, 60), SlotRange(2, 0, 40)])
    assert not peers.has(SlotRange(1, 5, 6)) and peers.has(SlotRange(2, 0, 40))
    peers.close()


def test_nobody_waits_for_a_daemon_that_is_gone() -> None:
    """Whoever waits, and whoever comes later, reads the files."""

    def gone(ranges: Sequence[SlotRange]) -> Collection[int]:
        raise DaemonGone("it is gone")

    peers = PeerSlots((), gone)
    peers.want([SlotRange(1, 0, 10)])
    assert not peers.has(SlotRange(1, 0, 10))
    peers.close()


def test_who_waits_is_let_go_by_the_end() -> None:
    """A load that fails closes what its other threads wait for."""
    asked = Asked()
    asked.opened.clear()
    peers = PeerSlots((), asked)
    peers.want([SlotRange(1, 0, 10)])
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(peers.has(SlotRange(1, 0, 10))))
    waiting.start()
    threading.Timer(0.2, asked.opened.set).start()
    peers.close()
    waiting.join(180)
    assert len(found) == 1

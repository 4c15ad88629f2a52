"""Pausing the garbage collector changes nothing that outlives the pause."""

from __future__ import annotations

import gc

import pytest

from holdfast.memory import gc_pause


def test_the_collector_is_paused_and_goes_on() -> None:
    """It rests inside, also when that ends in an error, and is on again after."""
    with pytest.raises(KeyError), gc_pause.paused():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    """Who had it off finds it off."""
    gc.disable()
    try:
        with gc_pause.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

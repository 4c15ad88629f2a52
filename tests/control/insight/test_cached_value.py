"""A remembered value: made once, made anew behind the backs of those who ask, never older than it may be."""

from __future__ import annotations

import threading

import pytest

from holdfast_formats.errors import StorageFailed
from holdfast_service.control.insight.cached_value import CachedValue


def test_made_once_while_it_is_fresh() -> None:
    """Who asks again gets the same value."""
    made: list[int] = []
    remembered = CachedValue(lambda: made.append(0) or len(made), 1000, 1000)  # type: ignore[func-returns-value]
    assert [remembered.get() for _ in range(3)] == [1, 1, 1]


def test_made_anew_behind_the_back() -> None:
    """A value that is no longer fresh is given once more, while the next one is made by a thread of its own."""
    done, makers = threading.Event(), []

    def make() -> int:
        makers.append(threading.current_thread().name)
        if len(makers) == 2:
            done.set()
        return len(makers)

    remembered = CachedValue(make, 0, 1000)
    assert remembered.get() == 1
    assert remembered.get() == 1
    assert done.wait(180)
    assert makers[1] == "holdfast-remembered"


def test_the_last_one_waits_for_none() -> None:
    """None before the first is made, which the question starts; then however old it is."""
    made = threading.Event()
    remembered = CachedValue(lambda: made.wait(180), 0, 0)
    assert remembered.last() is None
    made.set()
    while remembered.last() is None:
        pass
    assert remembered.last() is True


def test_too_old_is_not_given() -> None:
    """Beyond its age whoever asks waits for a new one, and has the error if there is one."""
    answers = iter([1, 2])

    def make() -> int:
        try:
            return next(answers)
        except StopIteration:
            raise StorageFailed("gone") from None

    remembered = CachedValue(make, 0, 0)
    assert [remembered.get(), remembered.get()] == [1, 2]
    with pytest.raises(StorageFailed):
        remembered.get()


def test_failure_behind_the_back_is_asked_again() -> None:
    """A failure of the thread leaves the value there is, and the next one may try."""
    failed = threading.Event()

    def make() -> int:
        if threading.current_thread() is not threading.main_thread():
            failed.set()
            raise StorageFailed("gone")
        return 1

    remembered = CachedValue(make, 0, 1000)
    for _ in range(3):
        failed.clear()
        for _ in range(1000):  # one that is asked while the thread before still ends starts none
            assert remembered.get() == 1
            if failed.wait(0.01):
                break
        assert failed.is_set()


def test_renewed_while_it_is_made() -> None:
    """What was being made when somebody changed what it is about is given to who asked before, and to nobody else."""
    made: list[int] = []

    def make() -> int:
        made.append(0)
        if len(made) == 1:
            remembered.renew()
        return len(made)

    remembered = CachedValue(make, 1000, 1000)
    assert [remembered.get() for _ in range(3)] == [1, 2, 2]
    remembered.renew()
    assert remembered.get() == 3


def test_an_old_one_is_waited_for() -> None:
    """The first question after a long time gets what is so now, and what was so before if that takes too long."""
    go, made = threading.Event(), [0]

    def make() -> int:
        if made[0]:
            go.wait(180)
        made[0] += 1
        return made[0]

    remembered = CachedValue(make, 0, 1000)
    assert remembered.get() == 1
    assert remembered.last(0.01) == 1
    go.set()
    assert remembered.last(180) >= 2

"""Copies and pickles of what users hold: a copy of its own, or a refusal that says what to do; never a shared connection."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast import Checkpointer
from holdfast.integrations.dcp import HoldfastStorageReader, HoldfastStorageWriter
from holdfast.integrations.replaced_method import ReplacedMethod
from holdfast.tickets import SaveTicket
from holdfast_formats.errors import InvalidRequest

WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value))}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_checkpointer_and_a_ticket_refuse(way: Callable[[Any], Any]) -> None:
    """Both belong to one process; what holds one of them cannot be copied either."""
    checkpointer = Checkpointer("copied", {"w": torch.ones(2)})
    with pytest.raises(InvalidRequest, match="the Checkpointer of copied cannot be copied or pickled"):
        way(checkpointer)
    if way is not copy.copy:
        with pytest.raises(InvalidRequest, match="the Checkpointer of copied cannot be copied or pickled"):
            way({"trainer": [checkpointer]})
    with pytest.raises(InvalidRequest, match="the SaveTicket of copied@3 cannot be copied or pickled"):
        way(SaveTicket("copied", 3, 1))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_readers_and_writers_of_dcp_are_copied(way: Callable[[Any], Any]) -> None:
    """DCP itself gives a writer to another process."""
    reader, writer = way(HoldfastStorageReader("run", step=3)), way(HoldfastStorageWriter("run", step=4))
    assert (reader.checkpoint_id, writer.checkpoint_id) == ("run@3", "run@4")


class Framework:
    """An object of a framework with a method that an adapter replaces."""

    def __init__(self, name: str) -> None:
        self.name = name

    def save(self) -> str:
        return f"saved by {self.name}"


@pytest.mark.parametrize("way", [WAYS["deepcopy"], WAYS["pickle"]])
def test_a_copy_of_a_frameworks_object_has_its_own_method(way: Callable[[Any], Any]) -> None:
    """Else the copy would save the object that was copied; also if a method was replaced twice, or is a function."""
    own = Framework("one")
    calls: list[str] = []
    for word in ("first", "second"):
        own.save = ReplacedMethod(own.save, lambda word=word: calls.append(word))  # type: ignore[method-assign]
    own.made = ReplacedMethod(copy.copy, lambda value: calls.append(value))  # type: ignore[attr-defined]
    other = way(own)
    own.save()
    own.made("third")  # type: ignore[attr-defined]
    assert calls == ["second", "third"]
    other.name = "the copy"
    assert other.save() == "saved by the copy" and other.made([1]) == [1]
    assert calls == ["second", "third"]

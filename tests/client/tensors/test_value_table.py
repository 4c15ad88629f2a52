"""Plain values of a state, each kind at every depth: what the user holds is what comes back, or it is refused by name."""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import pathlib
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import Fragment
from holdfast.state.train_state import TrainState
from holdfast_formats.errors import InvalidRequest, StateMismatch
from tests.client.checkpoint_in_memory import restore, save

Made = dict[str, Any]
Pair = namedtuple("Pair", "a b")


class Colour(enum.Enum):
    RED = 1


@dataclass
class Record:
    n: int


class OwnDict(dict):  # type: ignore[type-arg]
    """A subclass: what it has besides its items, nobody knows."""


class OwnList(list):  # type: ignore[type-arg]
    """Another."""


class Slotted:
    __slots__ = ("n",)

    def method(self) -> None:
        """Something to refer to."""


class Holder:
    """An object that is asked for its state: what it is given back is its own affair."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Made:
        return {"held": self.held}

    def load_state_dict(self, state: Made) -> None:
        self.held = state["held"]


def assign(held: Any) -> None:
    held[...] = 9


def halves(n: int) -> list[Fragment]:
    return [Fragment(torch.full((2,), float(n + at)), (4,), offset=(at,)) for at in (2, 0)]


def cyclic() -> Any:
    held: list[Any] = [1]
    held.append({"again": held})
    return held


MUTABLE: dict[str, tuple[Callable[[int], Any], Callable[[Any], object]]] = {
    "array": (lambda n: np.arange(3.0) + n, assign),
    "array of integers": (lambda n: np.full((2, 2), n, np.uint16), assign),
    "0-dim array": (lambda n: np.array(n), assign),
    "fortran array": (lambda n: np.asfortranarray(np.arange(6).reshape(2, 3) + n), assign),
    "sliced array": (lambda n: (np.arange(12) + n).reshape(6, 2)[::-2], assign),
    "list": (lambda n: [n, "x"], lambda held: held.append(9)),
    "longer list": (lambda n: [0] * n, lambda held: held.append(9)),
    "list of lists": (lambda n: [[n], [n, n]], lambda held: held[0].append(9)),
    "dict": (lambda n: {"b": n, "a": n}, lambda held: held.update(c=9)),
    "dict of anything": (lambda n: {n: 1, (n, 2): 2, None: 3}, lambda held: held.update({9: 9})),
    "ordered dict": (lambda n: OrderedDict(b=n, a=n), lambda held: held.update(c=9)),
    "counter": (lambda n: Counter({"a": n}), lambda held: held.update("a")),
    "default dict": (lambda n: defaultdict(list, {n: [n]}), lambda held: held[9].append(9)),
    "deque": (lambda n: deque([n] * n), lambda held: held.append(9)),
    "bounded deque": (lambda n: deque([n, n, n], maxlen=3), lambda held: held.append(9)),
    "set": (lambda n: {n, "x"}, lambda held: held.add(9)),
    "bytearray": (lambda n: bytearray([n] * n), lambda held: held.append(9)),
    "tensor": (lambda n: torch.arange(3.0) + n, lambda held: held.add_(9)),
    "0-dim tensor": (lambda n: torch.tensor(n), lambda held: held.add_(9)),
    "parameter": (lambda n: nn.Parameter(torch.full((2,), float(n))), lambda held: held.data.add_(9)),
    "fragment": (lambda n: Fragment(torch.full((2,), float(n)), (2,), offset=(0,)), lambda held: held.tensor.add_(9)),
    "fragments": (halves, lambda held: held[1].tensor.add_(9)),
}
IMMUTABLE: dict[str, Callable[[int], Any]] = {
    "int": lambda n: n,
    "huge int": lambda n: 10**40 + n,
    "float": lambda n: n + 0.1,
    "infinity": lambda n: float("inf") if n == 1 else float("nan"),
    "bool": lambda n: n == 1,
    "none": lambda n: None if n == 1 else 0,
    "text": lambda n: f"n{n}\ud800",
    "bytes": lambda n: bytes([n]),
    "complex": lambda n: complex(n, -0.0),
    "tuple": lambda n: (n, (n,)),
    "frozenset": lambda n: frozenset({n}),
    "range": lambda n: range(n),
    "numpy number": lambda n: np.float32(n),
    "dtype": lambda n: torch.float16 if n == 1 else torch.float32,
    "size": lambda n: torch.Size([n]),
}
REFUSED: dict[str, Callable[[], Any]] = {
    "namedtuple": lambda: Pair(1, 2),
    "dataclass": lambda: Record(1),
    "enum": lambda: Colour.RED,
    "path": lambda: pathlib.Path("x"),
    "datetime": lambda: datetime.datetime(2020, 1, 1),
    "decimal": lambda: decimal.Decimal("0.1"),
    "subclass of dict": lambda: OwnDict(a=1),
    "subclass of list": lambda: OwnList([1]),
    "mapping": lambda: UserDict(a=1),
    "read-only mapping": lambda: MappingProxyType({"a": 1}),
    "array.array": lambda: array.array("i", [1]),
    "memoryview": lambda: memoryview(b"x"),
    "masked array": lambda: np.ma.masked_array([1], mask=[True]),
    "array of objects": lambda: np.array([None]),
    "array of text": lambda: np.array(["x"]),
    "record array": lambda: np.zeros(1, [("a", "i4")]),
    "complex128 array": lambda: np.zeros(1, complex),
    "swapped array": lambda: np.zeros(1, ">f4"),
    "overlapping array": lambda: np.lib.stride_tricks.as_strided(np.zeros(6), (3, 3), (8, 8)),
    "date of numpy": lambda: np.datetime64("2020-01-01"),
    "tensor in a set": lambda: {torch.ones(1)},
    "tensor as a key": lambda: {(torch.ones(1), 1): 1},
    "fragments and others": lambda: [*halves(1), 1],
    "fragments as a key": lambda: {tuple(halves(1)): 1},
    "slots": Slotted,
    "bound method": lambda: Slotted().method,
    "class with a state_dict": lambda: Holder,
    "cycle": cyclic,
    "lambda with a default": lambda: defaultdict(lambda: 1),
}
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda held: {"n": 1, "at": held}, lambda outer: outer["at"]),
    "list": (lambda held: [0, held], lambda outer: outer[1]),
    "tuple": (lambda held: (0, held), lambda outer: outer[1]),
    "deque": (lambda held: deque([0, held]), lambda outer: outer[1]),
    "object": (Holder, lambda outer: outer.held),
}
WAYS = [(place, depth) for place in PLACES for depth in ((1, 2) if place != "object" else (1,))] + [("dict", 0)]


def wrapped(held: Any, place: str, depth: int) -> Made:
    for _ in range(depth):
        held = PLACES[place][0](held)
    return {"entry": held}


def found(state: Made, place: str, depth: int) -> Any:
    held = state["entry"]
    for _ in range(depth):
        held = PLACES[place][1](held)
    return held


def plain(value: Any) -> Any:
    """The value as text that tells types, order and bits apart."""
    if isinstance(value, Fragment):
        return plain(value.tensor)
    if isinstance(value, list) and any(isinstance(item, Fragment) for item in value):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor | np.ndarray):
        return isinstance(value, torch.Tensor), str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, set):
        return sorted(map(repr, value))
    if isinstance(value, dict | list | deque):
        items = list(value.items()) if isinstance(value, dict) else list(value)
        return type(value).__name__, getattr(value, "maxlen", None), repr(items)
    return type(value).__name__, repr(value)


@pytest.mark.parametrize("kind", MUTABLE)
def test_what_the_user_holds_is_what_comes_back(kind: str) -> None:
    """A mutable value anywhere in the state is filled and stays itself; what its holder changes is in the next save."""
    make, change = MUTABLE[kind]
    # A list with a Fragment in it is one tensor, so nothing else may be there.
    ways = [way for way in WAYS if kind != "fragment" or way[0] not in ("list", "tuple")]
    for place, depth in ways:
        state = wrapped(make(2), place, depth)
        held = found(state, place, depth)
        done = restore(save(wrapped(make(1), place, depth)), state)
        now = found(state, place, depth)
        assert plain(now) == plain(make(1)) and not done.notes, (place, depth)
        assert now is held or place == "object", (place, depth)
        change(now)
        after = wrapped(make(2), place, depth)
        restore(save(state), after)
        assert plain(found(after, place, depth)) == plain(now) != plain(make(1)), (place, depth)


@pytest.mark.parametrize("kind", IMMUTABLE)
def test_immutable_values_come_back_in_their_place(kind: str) -> None:
    """What cannot change is put into the user's mapping, and whatever stands there later is saved."""
    make = IMMUTABLE[kind]
    for place, depth in WAYS:
        state = wrapped(make(2), place, depth)
        restore(save(wrapped(make(1), place, depth)), state)
        assert plain(found(state, place, depth)) == plain(make(1)), (place, depth)
        state["entry"] = wrapped(make(3), place, depth)["entry"]
        after = wrapped(make(1), place, depth)
        restore(save(state), after)
        assert plain(found(after, place, depth)) == plain(make(3)), (place, depth)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_json_cannot_hold_is_refused_where_it_stands(kind: str) -> None:
    """No value is saved as something that only looks like it: the first save names the place, and what to write instead."""
    ways = [way for way in WAYS if kind != "overlapping array" or way[0] != "object"]  # an object gets another array
    for place, depth in ways:
        with pytest.raises(InvalidRequest, match=r"^(tensor 'extra/)?(ranks/00000/)?entry") as refusal:
            save(wrapped(REFUSED[kind](), place, depth))
        where = {"dict": "at", "list": "1", "tuple": "1", "deque": "1", "object": "held"}[place]
        assert depth == 0 or where in refusal.value.detail
        assert refusal.value.hint, kind


def test_containers_keep_what_is_in_them():
    """In a mapping, list and tuple that come back, each live object inside keeps its identity where it has a place."""
    log, array_, queue = [1], np.zeros(2), deque([0], maxlen=2)
    live = {"replay": {"x": array_, "log": log, "both": (queue, 1)}, "old": [1, 2, 3]}
    held = dict(live), live["replay"]["both"]
    saved = {"replay": {"log": [5, 6], "x": np.ones(2), "both": (deque([7, 8], maxlen=2), 2), "new": [[]]}, "old": []}
    done = restore(save(saved), live, strict=False)
    assert repr(live) == repr(saved) and list(live["replay"]) == list(saved["replay"]) and not done.notes
    assert live["replay"] is held[0]["replay"] and live["old"] is held[0]["old"]
    assert live["replay"]["x"] is array_ and live["replay"]["log"] is log and live["replay"]["both"][0] is queue


@pytest.mark.parametrize(
    ("live", "saved"),
    [
        (deque([1], maxlen=2), deque([1, 2, 3], maxlen=4)),
        ([1], {"a": 1}),
        (np.frombuffer(bytes(4), np.int32), np.array([7], np.int32)),
        ({1}, np.array([7])),
    ],
)
def test_another_object_that_takes_a_place_is_noted(live, saved):
    """What cannot become the saved value is replaced in the user's mapping, and the restore says so; saves read it there."""
    state = {"deep": {"at": [live]}}
    done = restore(save({"deep": {"at": [saved]}}), state)
    assert plain(state["deep"]["at"][0]) == plain(saved) and state["deep"]["at"][0] is not live
    assert [note.split(":")[0] for note in done.notes] == ["deep/at/0"] and type(live).__name__ in done.notes[0]
    after = {"deep": {"at": [live]}}
    restore(save(state), after)
    assert plain(after["deep"]["at"][0]) == plain(saved)


def test_an_array_or_tensor_of_another_form_is_refused():
    """Before anything is touched, by name, at every depth."""
    for one, two in (
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (torch.zeros(2), torch.zeros(1, 2)),
    ):
        live = {"deep": [{"x": two, "n": 0}]}
        with pytest.raises(StateMismatch, match=r"extra/deep/0/x: stored"):
            restore(save({"deep": [{"x": one, "n": 1}]}), live)
        assert live["deep"][0]["x"] is two and live["deep"][0]["n"] == 0


def test_one_object_at_two_places_takes_one_value():
    """Rows that were one object when the state was made, and several when it was saved, do not overwrite each other."""
    for row in ([0, 0], np.zeros(2), torch.zeros(2), bytearray(2)):
        state = {"rows": {"a": row, "b": [row]}, "again": row}
        first = [row] if isinstance(row, torch.Tensor) else []  # a tensor of its own entry is no part of a value
        saved = {"rows": {"b": [like(row, 2)], "a": like(row, 1)}, "again": like(row, 1 if first else 3)}
        if first:
            state["again"], saved["again"] = torch.zeros(1), torch.zeros(1)
        done = restore(save(saved), state)
        got = [state["rows"]["a"], state["rows"]["b"][0], state["again"]]
        wanted = [saved["rows"]["a"], saved["rows"]["b"][0], saved["again"]]
        assert list(map(plain, got)) == list(map(plain, wanted))
        assert sum(item is row for item in got) == 1 and len(done.notes) == (1 if first else 2), done.notes
        shared = {"rows": {"a": row, "b": [row]}}
        same = like(row, 4)
        assert not restore(save({"rows": {"a": same, "b": [same]}}), shared).notes
        assert shared["rows"]["a"] is shared["rows"]["b"][0] is row and plain(row) == plain(same)


def test_keys_that_share_a_name_keep_their_tensors():
    """1 and "1" are two keys with one name for a file: each tensor gets its own value, whatever the order of the keys."""
    one, two = torch.zeros(2), torch.zeros(2)
    state = {"d": {"1": one, 1: two, "n": 0}}
    restore(save({"d": {1: torch.full((2,), 5.0), "1": torch.full((2,), 7.0), "n": 1}}), state)
    assert one.tolist() == [7, 7] and two.tolist() == [5, 5] and state["d"]["1"] is one and state["d"][1] is two


def test_a_tensor_within_a_value_can_be_ignored():
    """By its own name: it keeps what it held, and all around it comes back."""
    both = torch.zeros(2)
    state = {"r": {"x": torch.zeros(2), "a": np.zeros(2), "s": [both, both], "n": 0}}
    ones = torch.ones(2)
    saved = save({"r": {"x": torch.ones(2), "a": np.ones(2), "s": [ones, ones], "n": 1}})
    restore(saved, state, ignore=["extra/r/x", "extra/r/a", "extra/r/s/*"])
    assert plain(state["r"]["x"]) == plain(torch.zeros(2)) and plain(state["r"]["a"]) == plain(np.zeros(2))
    assert state["r"]["s"][0] is both and both.tolist() == [0, 0] and state["r"]["n"] == 1
    restore(saved, state)
    assert both.tolist() == [1, 1] and state["r"]["x"].tolist() == [1, 1] and state["r"]["a"].tolist() == [1, 1]


def like(row: Any, n: int) -> Any:
    return torch.full((2,), float(n)) if isinstance(row, torch.Tensor) else type_of(row, n)


def type_of(row: Any, n: int) -> Any:
    return np.full(2, float(n)) if isinstance(row, np.ndarray) else type(row)([n, n])


def test_a_bytearray_that_somebody_looks_into():
    """Its length cannot change then: the same length is filled, another one is a new object, noted."""
    live = bytearray(2)
    view = memoryview(live)
    state = {"deep": [live]}
    restore(save({"deep": [bytearray(b"ab")]}), state)
    assert bytes(view) == b"ab" and state["deep"][0] is live
    assert restore(save({"deep": [bytearray(b"abc")]}), state).notes and state["deep"][0] == b"abc"


def test_a_read_only_state_takes_what_its_objects_can_take():
    """A mapping that cannot change gets its values into its objects; what these cannot take is refused, nothing touched."""
    live = MappingProxyType({"q": deque([0]), "s": {0}, "o": OrderedDict(a=0), "x": np.zeros(1)})
    restore(save({"q": deque([1]), "s": {1}, "o": OrderedDict(a=1), "x": np.ones(1)}), live)
    assert repr(dict(live)) == repr({"q": deque([1]), "s": {1}, "o": OrderedDict(a=1), "x": np.ones(1)})
    for other, kind in (((1,), "tuple"), ([1], "list"), (1, "int")):
        with pytest.raises(InvalidRequest, match=f"q: a plain {kind} cannot be restored into a read-only state"):
            TrainState(MappingProxyType({"q": live["q"]}), 0, 1).prepare(save({"q": other}).stored())
    assert live["q"] == deque([1])


def test_what_an_optimizer_keeps_in_containers_stays_in_them():
    """Lists of tensors in an optimizer's state, as SOAP and L-BFGS keep them, are filled where they are."""

    def make(n: int) -> Made:
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.param_groups[0]["plan"] = {"left": [n], "seen": deque([n])}
        optimizer.state[module.weight] = {"factors": [torch.full((2,), float(n)), None], "log": {"n": [n]}}
        return {"model": module, "optim": optimizer}

    live = make(2)
    kept, group = live["optim"].state[live["model"].weight], live["optim"].param_groups[0]
    held = kept["factors"], kept["factors"][0], kept["log"]["n"], group["plan"]["left"], group["plan"]["seen"]
    restore(save(make(1)), live)
    now = kept["factors"], kept["factors"][0], kept["log"]["n"], group["plan"]["left"], group["plan"]["seen"]
    assert all(a is b for a, b in zip(now, held, strict=True))
    assert now[1].tolist() == [1, 1] and now[2:] == ([1], [1], deque([1]))

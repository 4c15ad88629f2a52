"""An interpreter of pickles that calls nothing, within limits of memory and of work.

Classes and functions become names. A call in a pickle is looked up in a table of those that make containers, arrays and
tensors (`known_calls`), or is a class that the caller allows, and becomes a record. Objects of other classes are refused, or
become opaque, if the caller names their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from sys import getsizeof
from typing import Any

from holdfast_service.wings.convert.foreign.pickled import calls, graph
from holdfast_service.wings.convert.foreign.pickled.calls import LatinBytes, NumpyDtype, UnfilledArray, Unfit
from holdfast_service.wings.convert.foreign.pickled.described import kind_of
from holdfast_service.wings.convert.foreign.pickled.known_calls import KNOWN_CALLS
from holdfast_service.wings.convert.foreign.pickled.opcodes import OPCODES, STOP
from holdfast_service.wings.convert.foreign.pickled.stream import PickleStream
from holdfast_service.wings.convert.foreign.pickled.values import PickledBytes, PickledGlobal, PickledOpaque, PickledRecord

OPCODES_MAX = 2**24
MEMORY_BYTES_MAX = 160 * 2**20  # of all that is read, as Python counts it
STACK_MAX = 2**20
MARKS_MAX = 1000
ITEMS_MAX = 2**19  # of one dict or set: a larger one takes twice its memory for the moment in which it grows
TEXT_BYTES_MAX = 2**20  # longer ones are stepped over
_KEY_PARTS_MAX = 64
_TUPLE_KEYS_MAX = 1000  # of a pickle, which could choose them so that all have one hash, and each look-up takes long
_BETWEEN_CHECKS = 1024
_PLAIN_KEYS = frozenset((str, int, float, bool, type(None), PickledGlobal, PickledOpaque, PickledRecord))
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "torch.tensor": "torch._tensor"}
FindStorage = Callable[[Any], Any]


class PickleMachine:
    """Reads one pickle from a stream. `storages` resolves persistent ids; None: there are none. With `opaque`, what is not
    known becomes a `PickledOpaque`.
    """

    def __init__(
        self, stream: PickleStream, allowed: Collection[str], storages: FindStorage | None = None, opaque: bool = False
    ) -> None:
        self.stream: PickleStream = stream
        self.allowed, self.storages, self._opaque = allowed, storages, opaque
        self.stack: list[Any] = []
        self.texts: dict[int, tuple[str, LatinBytes]] = {}  # places of texts, by id: protocol 2 stores bytes as texts
        self.latin: set[int] = set()  # ids of those that were found to be bytes
        self.protocol = 0
        self._below: list[list[Any]] = []
        self._deep = 0  # values in `_below`
        self._memo: list[Any] = []
        self._globals: dict[str, PickledGlobal] = {}
        self._spent = self._tuple_keys = 0

    def run(self) -> Any:
        """The value; errors by file and byte."""
        try:
            for _ in range(OPCODES_MAX // _BETWEEN_CHECKS):
                if self._some():
                    return self._result()
                self._check_limits()
        except Unfit as error:
            raise self.stream.refused(str(error)) from None
        raise self.stream.limit(f"has over {OPCODES_MAX} opcodes")

    def _some(self) -> bool:
        """Interpret some opcodes; True if the last one was the end."""
        for _ in range(_BETWEEN_CHECKS):
            opcode = self.stream.opcode()
            if opcode == STOP:
                return True
            act = OPCODES.get(opcode)
            if act is None:
                raise Unfit(f"has opcode {bytes((opcode,))!r}, which tensor files of protocols 2 to 5 do not use")
            act(self)
        return False

    def _result(self) -> Any:
        value = self.pop()
        if self.stack or self._below:
            raise Unfit("ends with values that nothing contains")
        self._spent -= 9 * len(self._memo)
        self._memo.clear()
        self.texts.clear()
        self.latin.clear()
        graph.check(value, self.charge)
        return value

    def _check_limits(self) -> None:
        self.stream.check_length()
        if len(self.stack) + self._deep > STACK_MAX:
            raise self.stream.limit(f"has over {STACK_MAX} values outside containers")

    def charge(self, count: int) -> None:
        """Count so many more bytes of memory."""
        self._spent += count
        if self._spent > MEMORY_BYTES_MAX:
            raise self.stream.limit(f"needs over {MEMORY_BYTES_MAX} bytes of memory in addition to its arrays")

    def counted(self, value: Any) -> Any:
        self.charge(getsizeof(value))
        return value

    def pop(self) -> Any:
        if not self.stack:
            raise Unfit("pops a value from an empty stack")
        return self.stack.pop()

    def top(self) -> Any:
        if not self.stack:
            raise Unfit("pops a value from an empty stack")
        return self.stack[-1]

    def mark(self) -> None:
        if len(self._below) >= MARKS_MAX:
            raise Unfit(f"has over {MARKS_MAX} nested marks")
        self._below.append(self.stack)
        self._deep += len(self.stack)
        self.stack = []

    def to_mark(self) -> list[Any]:
        """Pop the values since the last mark, and the mark."""
        if not self._below:
            raise Unfit("pops values up to a missing mark")
        stack, self.stack = self.stack, self._below.pop()
        self._deep -= len(self.stack)
        return stack

    def memoize(self, index: int | None = None) -> None:
        value, memo = self.top(), self._memo
        if index is None or index == len(memo):
            self.charge(9)
            index = len(memo)
            memo.append(value)
        elif index < len(memo):
            memo[index] = value
        else:
            raise Unfit(f"stores memo entry {index} after {len(memo)} entries")
        if type(value) is UnfilledArray:
            self.charge(40)
            value.places.append(index)

    def recall(self, index: int) -> None:
        if index >= len(self._memo):
            raise Unfit(f"reads memo entry {index} of {len(self._memo)}")
        self.stack.append(self._memo[index])

    def text(self, length: int) -> None:
        """Push a text of so many bytes; a long one by its place."""
        offset = self.stream.where
        if length > TEXT_BYTES_MAX:
            self.stack.append(PickledBytes(self.stream.path, self.stream.skip(length), length))
            self.charge(200)
            return
        try:
            text = self.stream.take(length).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise Unfit("has a text that is not UTF-8") from None
        self.stack.append(self.counted(text))
        if self.protocol < 3:
            self.charge(250)
            self.texts[id(text)] = (text, LatinBytes(offset, length, len(text)))

    def payload(self, length: int) -> None:
        """Push bytes, by their place."""
        self.charge(200)
        self.stack.append(PickledBytes(self.stream.path, self.stream.skip(length), length))

    def find(self, module: str, name: str) -> PickledGlobal:
        """Push a class or function by its name; refuses those that are not in a table."""
        module = _OLD_MODULES.get(module, module)
        full = f"{module}.{name}"
        value = self._globals.get(full)
        if value is None:
            known = full in calls.NAMES or full in KNOWN_CALLS or full in self.allowed
            if not known and not self._opaque:
                raise Unfit(f"names {full[:200]!r}, which is neither a tensor nor a plain value, and is not executed")
            self.charge(400 + len(full))
            value = self._globals[full] = PickledGlobal(full)
        return value

    def call(self, function: Any, args: Any) -> Any:
        """The result of a call."""
        if type(function) is PickledOpaque:
            return self._unknown(function.name)
        if not isinstance(function, PickledGlobal) or type(args) is not tuple:
            raise Unfit("calls something that is not a function")
        known = KNOWN_CALLS.get(function.name)
        if known is not None:
            try:
                return known(self, args)
            except Unfit as error:
                if not self._opaque:
                    raise
                return self._unknown(function.name, str(error))
        if function.name in self.allowed:
            return self.record(function.name, args)
        if not self._opaque:
            raise Unfit(f"calls {function.name}, which is not allowed")
        return self._unknown(function.name)

    def _unknown(self, name: str, problem: str = "") -> PickledOpaque:
        self.charge(100 + len(problem))
        return PickledOpaque(name, problem)

    def record(self, name: str, args: tuple[Any, ...]) -> PickledRecord:
        self.charge(96)
        return PickledRecord(name, args)

    def build(self, state: Any) -> None:
        value = self.top()
        if type(value) is UnfilledArray:
            self.charge(400)
            try:
                array: Any = calls.array(self.stream.path, state)
            except Unfit as error:
                if not self._opaque:
                    raise
                array = self._unknown("numpy.ndarray", str(error))
            for index in value.places:
                if self._memo[index] is value:
                    self._memo[index] = array
            self.stack[-1] = array
        elif type(value) is NumpyDtype:
            calls.numpy_dtype_state(value, state)
        elif type(value) is PickledRecord and value.state is None:
            value.build(state)
        elif type(value) is PickledOpaque:
            return
        elif type(value) is not dict or type(state) is not dict or len(state) > 1 or "_metadata" not in state:
            raise Unfit(f"sets attributes of a {kind_of(value)}")

    def extend(self, value: Any, items: list[Any]) -> None:
        """Append to a list, or to a record's items."""
        if type(value) is PickledOpaque:
            return
        if type(value) is PickledRecord:
            value = value.items_or([])
        if type(value) is not list:
            raise Unfit(f"appends to a {kind_of(value)}")
        before = getsizeof(value)
        value += items
        self.charge(getsizeof(value) - before)

    def set_items(self, value: Any, items: list[Any]) -> None:
        """Put alternating keys and values into a dict, or into a record's items."""
        if type(value) is PickledOpaque:
            return
        if type(value) is PickledRecord:
            value = value.items_or({})
        if type(value) is not dict or len(items) % 2:
            raise Unfit(f"sets items of a {kind_of(value)}")
        if len(value) + len(items) // 2 > ITEMS_MAX:
            raise self.stream.limit(f"has a dict of over {ITEMS_MAX} items")
        before = getsizeof(value)
        for key, item in zip(items[::2], items[1::2], strict=True):
            self.check_key(key)
            if key in value:
                raise Unfit(f"has the key {str(key)[:200]!r} twice")
            value[key] = item
        self.charge(getsizeof(value) - before)

    def add_items(self, value: Any, items: list[Any]) -> None:
        if type(value) is PickledOpaque:
            return
        if type(value) is not set:
            raise Unfit(f"adds to a {kind_of(value)}")
        if len(value) + len(items) > ITEMS_MAX:
            raise self.stream.limit(f"has a set of over {ITEMS_MAX} values")
        before = getsizeof(value)
        for item in items:
            self.check_key(item)
            value.add(item)
        self.charge(getsizeof(value) - before)

    def check_key(self, key: Any) -> None:
        """Refuse a key whose lookup could be slow: a pickle can choose keys with equal hashes."""
        kind = type(key)
        if kind is str or (kind in _PLAIN_KEYS and (kind is not int or -(2**63) <= key < 2**64)):
            return
        self._tuple_keys += 1
        if kind is not tuple or len(key) > _KEY_PARTS_MAX or not all(type(part) in _PLAIN_KEYS for part in key):
            raise Unfit(f"has a key that is a {kind_of(key)}, or one that is too long")
        if self._tuple_keys > _TUPLE_KEYS_MAX:
            raise Unfit(f"has over {_TUPLE_KEYS_MAX} keys that are tuples")

    def bytes_of(self, value: Any, length_max: int) -> bytes:
        if not isinstance(value, PickledBytes | LatinBytes) or value.length > 2 * length_max:
            raise Unfit("has a number of the wrong size")
        return self.stream.again(value.offset, value.length)

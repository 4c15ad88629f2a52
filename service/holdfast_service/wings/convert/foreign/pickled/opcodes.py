"""The effect of each pickle opcode on a `PickleMachine`.

These are the opcodes of protocols 2 to 5 as CPython's own picklers write them. Those of protocols 0 and 1, of registered
extensions and of buffers outside the pickle have no entry, and are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast_service.wings.convert.foreign.pickled.calls import Unfit
from holdfast_service.wings.convert.foreign.pickled.values import PickledRecord

if TYPE_CHECKING:
    from holdfast_service.wings.convert.foreign.pickled.machine import PickleMachine

PROTOCOLS = range(2, 6)
INTEGER_BYTES_MAX = 32
NAME_BYTES_MAX = 512
STOP = ord(".")
Act = Callable[["PickleMachine"], None]


def _proto(m: PickleMachine) -> None:
    m.protocol = m.stream.number(1)
    if m.protocol not in PROTOCOLS:
        raise Unfit(f"has protocol {m.protocol}; only {PROTOCOLS.start} to {PROTOCOLS.stop - 1} can be read")


def _frame(m: PickleMachine) -> None:
    length = m.stream.number(8)
    if length > m.stream.stop - m.stream.where:
        raise m.stream.cut_off(f"a frame of {length} bytes, of which {m.stream.stop - m.stream.where} are there")


def _constant(value: Any) -> Act:
    return lambda m: m.stack.append(value)


def _signed(m: PickleMachine) -> None:
    m.stack.append(m.counted(int.from_bytes(m.stream.take(4), "little", signed=True)))


def _unsigned(width: int) -> Act:
    return lambda m: m.stack.append(m.counted(m.stream.number(width)))


def _long(width: int) -> Act:
    def act(m: PickleMachine) -> None:
        length = m.stream.number(width)
        if length > INTEGER_BYTES_MAX:
            raise Unfit(f"has an integer of {length} bytes")
        m.stack.append(m.counted(int.from_bytes(m.stream.take(length), "little", signed=True)))

    return act


def _float(m: PickleMachine) -> None:
    m.stack.append(m.counted(struct.unpack(">d", m.stream.take(8))[0]))


def _text(width: int) -> Act:
    return lambda m: m.text(m.stream.number(width))


def _payload(width: int) -> Act:
    return lambda m: m.payload(m.stream.number(width))


def _pop(m: PickleMachine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.to_mark()


def _new(kind: Callable[[], Any]) -> Act:
    return lambda m: m.stack.append(m.counted(kind()))


def _tuple(count: int) -> Act:
    def act(m: PickleMachine) -> None:
        if len(m.stack) < count:
            raise Unfit("pops values from an empty stack")
        m.stack[-count:] = [m.counted(tuple(m.stack[-count:]))]

    return act


def _tuple_of_mark(m: PickleMachine) -> None:
    values = tuple(m.to_mark())
    m.stack.append(m.counted(values))


def _frozenset(m: PickleMachine) -> None:
    values: set[Any] = set()
    m.add_items(values, m.to_mark())
    m.stack.append(m.counted(frozenset(values)))


def _append(m: PickleMachine) -> None:
    item = m.pop()
    m.extend(m.top(), [item])


def _appends(m: PickleMachine) -> None:
    items = m.to_mark()
    m.extend(m.top(), items)


def _set_item(m: PickleMachine) -> None:
    item, key = m.pop(), m.pop()
    m.set_items(m.top(), [key, item])


def _set_items(m: PickleMachine) -> None:
    items = m.to_mark()
    m.set_items(m.top(), items)


def _add_items(m: PickleMachine) -> None:
    items = m.to_mark()
    m.add_items(m.top(), items)


def _global(m: PickleMachine) -> None:
    module, name = m.stream.line(), m.stream.line()
    m.stack.append(m.find(module, name))


def _stack_global(m: PickleMachine) -> None:
    name, module = m.pop(), m.pop()
    if not (type(name) is str and type(module) is str and len(name) + len(module) <= NAME_BYTES_MAX):
        raise Unfit("gives a class name that is not text")
    m.stack.append(m.find(module, name))


def _reduce(m: PickleMachine) -> None:
    args, function = m.pop(), m.pop()
    m.stack.append(m.call(function, args))


def _new_object(m: PickleMachine) -> None:
    args, kind = m.pop(), m.pop()
    m.stack.append(m.call(kind, args))


def _new_object_ex(m: PickleMachine) -> None:
    keywords, args, kind = m.pop(), m.pop(), m.pop()
    record = m.call(kind, args)
    if keywords and (type(keywords) is not dict or type(record) is not PickledRecord):
        raise Unfit("makes a value with named arguments")
    if keywords:
        record.build(keywords)
    m.stack.append(record)


def _build(m: PickleMachine) -> None:
    state = m.pop()
    m.build(state)


def _persistent(m: PickleMachine) -> None:
    key = m.pop()
    if m.storages is None:
        raise Unfit("refers to a value outside it")
    m.charge(400)
    m.stack.append(m.storages(key))


OPCODES: dict[int, Act] = {
    0x80: _proto,
    0x95: _frame,
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord(")"): _constant(()),
    ord("J"): _signed,
    ord("K"): lambda m: m.stack.append(m.stream.number(1)),  # Python has these numbers
    ord("M"): _unsigned(2),
    0x8A: _long(1),
    0x8B: _long(4),
    ord("G"): _float,
    ord("U"): _text(1),  # Python 2's strings
    ord("T"): _text(4),
    0x8C: _text(1),
    ord("X"): _text(4),
    0x8D: _text(8),
    ord("C"): _payload(1),
    ord("B"): _payload(4),
    0x8E: _payload(8),
    0x96: _payload(8),  # bytearray
    ord("0"): _pop,
    ord("1"): lambda m: m.to_mark().clear(),
    ord("2"): lambda m: m.stack.append(m.top()),
    ord("("): lambda m: m.mark(),
    ord("]"): _new(list),
    ord("}"): _new(dict),
    0x8F: _new(set),
    0x91: _frozenset,
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("t"): _tuple_of_mark,
    ord("a"): _append,
    ord("e"): _appends,
    ord("s"): _set_item,
    ord("u"): _set_items,
    0x90: _add_items,
    ord("q"): lambda m: m.memoize(m.stream.number(1)),
    ord("r"): lambda m: m.memoize(m.stream.number(4)),
    0x94: lambda m: m.memoize(),
    ord("h"): lambda m: m.recall(m.stream.number(1)),
    ord("j"): lambda m: m.recall(m.stream.number(4)),
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _reduce,
    0x81: _new_object,
    0x92: _new_object_ex,
    ord("b"): _build,
    ord("Q"): _persistent,
}

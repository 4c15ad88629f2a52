"""The functions in pickles of tensors, by name, with their meaning for a `PickleMachine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast_service.wings.convert.foreign.pickled import calls
from holdfast_service.wings.convert.foreign.pickled.calls import LatinBytes, NumpyDtype, UnfilledArray, Unfit
from holdfast_service.wings.convert.foreign.pickled.values import PickledBytes, PickledGlobal, PickledRecord

if TYPE_CHECKING:
    from holdfast_service.wings.convert.foreign.pickled.machine import PickleMachine

Call = Callable[["PickleMachine", tuple[Any, ...]], Any]
_FACTORIES = {"builtins.list", "builtins.dict", "builtins.int", "builtins.float", "builtins.set", "collections.OrderedDict"}
_LATIN = {"latin1", "latin-1", "iso-8859-1"}
NUMBER_BYTES_MAX = 16


def _values(args: tuple[Any, ...], what: str) -> list[Any] | tuple[Any, ...]:
    """The one argument, a list or tuple; empty without one."""
    if not args:
        return ()
    if len(args) > 1 or type(args[0]) not in (list, tuple):
        raise Unfit(f"makes a {what} from something other than a list or tuple")
    values: list[Any] | tuple[Any, ...] = args[0]
    return values


def _dict(m: PickleMachine, args: tuple[Any, ...]) -> dict[Any, Any]:
    """`OrderedDict()`, or of a list of pairs, as Python 2 wrote it."""
    mapping: dict[Any, Any] = m.counted({})
    items: list[Any] = []
    for pair in _values(args, "dict"):
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise Unfit("makes a dict from something other than pairs")
        items += pair
    if items:
        m.set_items(mapping, items)
    return mapping


def _default_dict(m: PickleMachine, args: tuple[Any, ...]) -> dict[Any, Any]:
    factory = args[0] if len(args) == 1 else None
    if len(args) > 1 or (factory is not None and (type(factory) is not PickledGlobal or factory.name not in _FACTORIES)):
        raise Unfit("makes a defaultdict with a default that cannot be read")
    mapping: dict[Any, Any] = m.counted({})
    return mapping


def _counter(m: PickleMachine, args: tuple[Any, ...]) -> dict[Any, Any]:
    if len(args) != 1 or type(args[0]) is not dict:
        raise Unfit("makes a Counter from something other than a dict")
    mapping: dict[Any, Any] = args[0]
    return mapping


def _set(m: PickleMachine, args: tuple[Any, ...]) -> set[Any]:
    values: set[Any] = m.counted(set())
    m.add_items(values, list(_values(args, "set")))
    return values


def _frozen_set(m: PickleMachine, args: tuple[Any, ...]) -> frozenset[Any]:
    values: frozenset[Any] = m.counted(frozenset(_set(m, args)))
    return values


def _tuple(m: PickleMachine, args: tuple[Any, ...]) -> tuple[Any, ...]:
    values: tuple[Any, ...] = m.counted(tuple(_values(args, "tuple")))
    return values


def _list(m: PickleMachine, args: tuple[Any, ...]) -> list[Any]:
    values: list[Any] = m.counted(list(_values(args, "list")))
    return values


def _size(m: PickleMachine, args: tuple[Any, ...]) -> tuple[int, ...]:
    """`torch.Size(tuple)`."""
    return calls.check_shape(args[0] if len(args) == 1 else None)


def _complex(m: PickleMachine, args: tuple[Any, ...]) -> complex:
    if len(args) != 2 or not all(type(part) is float for part in args):
        raise Unfit("makes a complex number from something other than two floats")
    value: complex = m.counted(complex(*args))
    return value


def _bytes(m: PickleMachine, args: tuple[Any, ...]) -> PickledBytes | LatinBytes:
    """`bytes()`, and `bytearray` of bytes."""
    m.charge(200)
    if not args:
        return PickledBytes(m.stream.path, m.stream.where, 0)
    if len(args) != 1 or not isinstance(args[0], PickledBytes | LatinBytes):
        raise Unfit("makes bytes from something other than bytes")
    return args[0]


def _encode(m: PickleMachine, args: tuple[Any, ...]) -> LatinBytes:
    """`_codecs.encode(text, "latin1")`: how protocols below 3 have bytes."""
    if len(args) != 2 or type(args[1]) is not str or args[1] not in _LATIN:
        raise Unfit("encodes text in a form that pickled bytes do not have")
    text = args[0]
    m.charge(200)
    if type(text) is PickledBytes:  # a long text
        return LatinBytes(text.offset, text.length, None)
    known = m.texts.get(id(text))
    if known is None or known[0] is not text:
        raise Unfit("encodes text in a form that pickled bytes do not have")
    if id(text) not in m.latin:  # looked through once, however often it is named
        if any(ord(character) > 255 for character in text):
            raise Unfit("encodes text in a form that pickled bytes do not have")
        m.charge(40)
        m.latin.add(id(text))
    return known[1]


def _attribute(m: PickleMachine, args: tuple[Any, ...]) -> PickledRecord:
    """`getattr(Class, "NAME")`: a member of an enumeration."""
    if len(args) != 2 or type(args[0]) is not PickledGlobal or type(args[1]) is not str or args[0].name not in m.allowed:
        raise Unfit("reads an attribute, which is not allowed")
    return m.record(args[0].name, (args[1],))


def _reconstructed(m: PickleMachine, args: tuple[Any, ...]) -> PickledRecord:
    """`copyreg._reconstructor(Class, object, None)`: objects of protocols 0 and 1, and of their subclasses."""
    plain = len(args) == 3 and args[1] == PickledGlobal("builtins.object") and args[2] is None
    if not plain or type(args[0]) is not PickledGlobal or args[0].name not in m.allowed:
        raise Unfit("makes an object in a form that cannot be read")
    return m.record(args[0].name, ())


def _layout(m: PickleMachine, args: tuple[Any, ...]) -> PickledGlobal:
    if len(args) != 1 or type(args[0]) is not str:
        raise Unfit("has a tensor layout without a name")
    m.charge(100)
    return PickledGlobal(args[0])


def _device(m: PickleMachine, args: tuple[Any, ...]) -> PickledRecord:
    return m.record("torch.device", args)


def _dtype(m: PickleMachine, args: tuple[Any, ...]) -> NumpyDtype:
    m.charge(64)
    return calls.numpy_dtype(args)


def _unfilled(m: PickleMachine, args: tuple[Any, ...]) -> UnfilledArray:
    """`numpy._core.multiarray._reconstruct(ndarray, (0,), b"b")`; BUILD supplies the contents."""
    if len(args) != 3 or args[0] != PickledGlobal("numpy.ndarray"):
        raise Unfit("has an array in a form that numpy does not write")
    m.charge(200)
    return UnfilledArray()


def _from_buffer(m: PickleMachine, args: tuple[Any, ...]) -> Any:
    m.charge(400)
    return calls.from_buffer(m.stream.path, args)


def _scalar(m: PickleMachine, args: tuple[Any, ...]) -> Any:
    """`numpy._core.multiarray.scalar(dtype, bytes)`: the number."""
    if len(args) != 2 or type(args[0]) is not NumpyDtype:
        raise Unfit("has a number in a form that numpy does not write")
    dtype = args[0].of_number
    data = m.bytes_of(args[1], NUMBER_BYTES_MAX)
    if isinstance(args[1], LatinBytes):
        data = data.decode().encode("latin1")
    if len(data) != dtype.itemsize:
        raise Unfit("has a number of the wrong size")
    return m.counted(np.frombuffer(data, dtype)[0].item())


def _array_call(function: Callable[[tuple[Any, ...]], Any]) -> Call:
    def call(m: PickleMachine, args: tuple[Any, ...]) -> Any:
        m.charge(400)
        return function(args)

    return call


KNOWN_CALLS: dict[str, Call] = {
    "collections.OrderedDict": _dict,
    "collections.defaultdict": _default_dict,
    "collections.Counter": _counter,
    "builtins.dict": _dict,
    "builtins.set": _set,
    "builtins.frozenset": _frozen_set,
    "builtins.tuple": _tuple,
    "builtins.list": _list,
    "builtins.complex": _complex,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.getattr": _attribute,
    "copyreg._reconstructor": _reconstructed,
    "_codecs.encode": _encode,
    "numpy.dtype": _dtype,
    **{
        f"numpy.{core}.{name}": call
        for core in ("core", "_core")
        for name, call in (
            ("multiarray._reconstruct", _unfilled),
            ("multiarray.scalar", _scalar),
            ("numeric._frombuffer", _from_buffer),
        )
    },
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "torch._tensor._rebuild_from_type_v2": _array_call(calls.subclass),
    **{name: _array_call(function) for name, function in calls.TENSORS.items()},
}

"""The inert values of a pickle, besides Python's own containers, numbers and texts."""

from __future__ import annotations

from typing import Any, NamedTuple

from holdfast_formats.mapping.listing import StoredMember
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray


class PickledArray(NamedTuple):
    """A numpy array, a torch tensor or a storage (one dimension), by its elements' place in a file.

    The dtype has safetensors' name, the strides count elements, `offset` is the byte of the first element in `file`.
    `storage` is torch's key of its storage: arrays of one storage share bytes. It is empty for numpy's. `member` is the
    storage in a zip file, if its CRC-32 is stated there.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: str
    offset: int
    file: str
    member: StoredMember | None = None

    def stored(self, key: str) -> StoredArray:
        """The same array under a key."""
        return StoredArray(self.file, key, self.dtype, self.shape, self.offset, self.strides, self.member)


class LatinArray(NamedTuple):
    """A numpy array whose bytes are stored as text, by protocols below 3: in Latin-1, encoded as UTF-8 in `length` bytes
    from `offset` on. `strides` as of a `PickledArray`, either row-major or in Fortran's order.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    length: int
    file: str


AnyArray = PickledArray | LatinArray


class PickledBytes(NamedTuple):
    """A bytes object, or a text of over `TEXT_BYTES_MAX`, by its place in a file."""

    file: str
    offset: int
    length: int


class PickledGlobal(NamedTuple):
    """A class or function by its name, such as `torch.float32`. It was not looked up."""

    name: str


class PickledOpaque:
    """An object of a class that is not read, by the name of its class, or of the function that makes it. Its content is
    skipped. `problem` says why, if it is not for the class. Two are equal only if they are the same object.
    """

    __slots__ = ("name", "problem")

    def __init__(self, name: str, problem: str = "") -> None:
        self.name, self.problem = name, problem

    def __repr__(self) -> str:
        return f"<{self.name}>"


class PickledRecord:
    """An object of an allowed class, by name: its arguments and state, without behaviour.

    `items` are those of a subclass of dict or list. Two records are equal only if they are the same object.
    """

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args
        self.state: Any = None
        self.items: dict[Any, Any] | list[Any] | None = None

    def build(self, state: Any) -> None:
        self.state = state

    def items_or(self, empty: dict[Any, Any] | list[Any]) -> dict[Any, Any] | list[Any]:
        """Its items, to add to; `empty` ones if it has none so far."""
        self.items = empty if self.items is None else self.items
        return self.items

    def get(self, field: str, default: Any = None) -> Any:
        parts = self.state if isinstance(self.state, tuple) else (self.state,)  # attributes, and those of `__slots__`
        for part in (*parts, self.items):
            if isinstance(part, dict) and field in part:
                return part[field]
        return default

    def __repr__(self) -> str:
        return f"<{self.name}>"

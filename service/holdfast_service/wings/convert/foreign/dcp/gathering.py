"""Collects the entries of a listing, and reads pickled values into documents."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from holdfast_formats.errors import InvalidRequest, Refused, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import Decoder, ForeignPiece, ForeignTensor, PartLeftOut, RefusedPart, TensorKey
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import json_values, pickles, torch_values
from holdfast_service.wings.convert.foreign.dcp.metadata import StoredAt
from holdfast_service.wings.convert.foreign.json_values import Trail
from holdfast_service.wings.convert.foreign.pickled.calls import LatinBytes
from holdfast_service.wings.convert.foreign.pickles import (
    AnyArray,
    PickledArray,
    PickledBytes,
    PickledGlobal,
    PickledRecord,
)

BYTES_MAX = 2**20  # of a bytes object in a document; the reader cannot distinguish longer ones from texts
KEPT_BYTES_MAX = 4096  # values of so many bytes are read once: hyper-parameters are the same for many parameters
_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_DICTS = (  # Lightning's hyper-parameters
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "lightning.pytorch.utilities.parsing.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict",
)
_PATHS = tuple(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath"))
_BYTES_IO = "_io.BytesIO"
PLAIN = frozenset((*_NAMESPACES, *_DICTS, *_PATHS, _BYTES_IO))


class Unread(NamedTuple):
    """Placeholder of a value that was not read."""

    reason: str


class ValuePlace(NamedTuple):
    """The file of a value, and where its arrays are stored: as tensors `prefix/…` of a group."""

    file: str
    group: str
    prefix: str


class GatheredListing:
    """Tensors, documents, notes and refusals of a directory, collected during reading."""

    def __init__(self, files: Files, allowed: Collection[str] = PLAIN) -> None:
        self.files = files
        self.tensors: dict[TensorKey, ForeignTensor] = {}
        self.documents: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []
        self.refused: list[RefusedPart] = []
        self.left_out: list[PartLeftOut] = []
        self._allowed = allowed
        self._known: dict[bytes, Any] = {}
        self._placed = 0

    def add(self, spec: TensorSpec, pieces: tuple[ForeignPiece, ...], decoder: Decoder | None = None) -> None:
        """Add a tensor; `StateMismatch` for a name that is taken or impossible."""
        key = TensorKey(spec.group, spec.name)
        spec.check()
        if key in self.tensors:
            raise StateMismatch(f"two entries would be stored as {spec.group}/{spec.name}", tensor=spec.name)
        self.tensors[key] = ForeignTensor(spec, pieces, decoder=decoder)

    def take_back(self, held: Mapping[TensorKey, ForeignTensor]) -> None:
        """Forget the tensors that were added since there were those `held`."""
        self.tensors = dict(held)

    def document(self, group: str, key: str, value: Any) -> None:
        """Add a JSON value; `StateMismatch` for a key that is taken."""
        held = self.documents.setdefault(group, {})
        if key in held:
            raise StateMismatch(f"two values would be stored as {group}/{key}")
        held[key] = value

    def keep(self, value: Any, group: str, key: str, what: str) -> bool:
        """Add a JSON value as a document, or for an `Unread` a note that `what` was left out; whether it was added."""
        if isinstance(value, Unread):
            self.notes.append(f"{what} was left out: {value.reason}")
            return False
        self.document(group, key, value)
        return True

    def value(self, at: StoredAt) -> Any:
        """A pickled value; `Unread` with the reason if it is not plain. Damaged files are errors."""
        try:
            return pickles.read_torch(self.files, at.file, self._allowed, (at.start, at.length))
        except Refused as error:
            return Unread(error.detail)

    def encoded(self, at: StoredAt, group: str, prefix: str) -> Any:
        """A pickled value as JSON, or `Unread`; arrays in it become tensors."""
        small = at.length <= KEPT_BYTES_MAX
        data = self.files.read(at.file, at.start, at.length) if small else b""
        if data and data in self._known:
            return self._known[data]
        before = self._placed
        made = self.json(self.value(at), ValuePlace(at.file, group, prefix))
        if data and self._placed == before:  # nothing in it refers to its place in the file
            self._known[data] = made
        return made

    def json(self, value: Any, place: ValuePlace) -> Any:
        """A value as JSON; `Unread` if something in it has no plain form, or for one that is unread."""
        if isinstance(value, Unread):
            return value
        held = dict(self.tensors)
        try:
            return json_values.encode(value, lambda trail, other: self._other(trail, other, place))
        except Refused as error:
            self.tensors = held
            return Unread(error.detail)

    def _other(self, trail: Trail, value: Any, place: ValuePlace) -> Any:
        if isinstance(value, AnyArray):
            self._placed += 1
            name = _name(place.prefix, trail)
            tensor = torch_values.tensor(value, place.group, name)
            self.add(tensor.spec, tensor.pieces, tensor.decoder)
            return {"$tensor" if isinstance(value, PickledArray) and value.storage else "$array": name}
        if isinstance(value, PickledBytes | LatinBytes):
            self._placed += 1
            return json_values.encode(self._bytes(value, trail, place.file), _refuse)
        if isinstance(value, PickledGlobal) and value.name in pickles.TORCH_DTYPES:
            return {"$dtype": value.name.removeprefix("torch.")}
        if isinstance(value, PickledRecord):
            return self._record(trail, value, place)
        return _refuse(trail, value)

    def _record(self, trail: Trail, value: PickledRecord, place: ValuePlace) -> Any:
        if value.name in _NAMESPACES and isinstance(value.state, dict):
            return self._namespace(trail, value.state, place)
        if value.name == _BYTES_IO and isinstance(value.state, tuple) and value.state:
            return self._other(trail, value.state[0], place)
        if value.name in _DICTS and isinstance(value.items, dict) and not value.args and not value.state:
            return json_values.encode(value.items, lambda inner, one: self._other(inner, one, place), trail)
        if value.name in _PATHS and value.args and all(isinstance(arg, str) for arg in value.args):
            return posixpath.join(*value.args)
        if value.name == "torch.device":
            return {"$device": ":".join(map(str, value.args))}
        if value.state is None and value.items is None and all(isinstance(arg, int | str) for arg in value.args):
            return f"{value.name}({', '.join(map(repr, value.args))})"  # a member of an enumeration
        return _refuse(trail, value)

    def _namespace(self, trail: Trail, fields: dict[str, Any], place: ValuePlace) -> Any:
        """The arguments of a program: those that are not plain are left out, and named."""
        namespace: dict[str, Any] = {}
        for field, value in fields.items():
            inner = (*trail, str(field))
            try:
                namespace[str(field)] = json_values.encode(value, lambda t, v: self._other(t, v, place), inner)
            except Refused as error:
                self.notes.append(f"{place.prefix}: left out: {error.detail}")
        return json_values.ordered(namespace)

    def _bytes(self, value: PickledBytes | LatinBytes, trail: Trail, file: str) -> bytes:
        if value.length > BYTES_MAX:
            raise InvalidRequest(f"{json_values.path_of(trail)} has {value.length} bytes, over the limit of {BYTES_MAX}")
        if isinstance(value, PickledBytes):
            return self.files.read(value.file, value.offset, value.length)
        return self.files.read(file, value.offset, value.length).decode().encode("latin1")


def _name(prefix: str, trail: Trail) -> str:
    return "/".join((prefix, *(step.strip("[]").replace("/", "|") for step in trail)))


def _refuse(trail: Trail, value: Any) -> Any:
    what = f"is a {pickles.kind_of(value)}: only tensors and plain values are kept"
    raise InvalidRequest(f"{json_values.path_of(trail) or 'it'} {what}")

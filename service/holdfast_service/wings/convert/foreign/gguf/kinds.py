"""Weights in GGUF files, under Hugging Face's names and in its layout."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from holdfast_formats import dtypes
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.layout.parts import strides
from holdfast_formats.mapping.listing import FileUse, ForeignListing, ForeignPiece, ForeignTensor
from holdfast_formats.region import Box, Shape, whole
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import computed, hugging_face
from holdfast_service.wings.convert.foreign.gguf import quantised, reading
from holdfast_service.wings.convert.foreign.gguf.encoding import TYPES
from holdfast_service.wings.convert.foreign.gguf.names import ARCHITECTURES, DERIVED, Architecture
from holdfast_service.wings.convert.foreign.gguf.reading import GgufHeader, GgufTensor
from holdfast_service.wings.convert.foreign.hugging_face import TakenTensors
from holdfast_service.wings.convert.foreign.kinds import ForeignKind

GROUP = "model"
METADATA = "gguf_metadata.json"  # the asset that keeps the file's metadata: hyper-parameters and tokenizer
_FILE = re.compile(r".+\.gguf", re.IGNORECASE)
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_DTYPES = {kind: dtype for dtype, kind in TYPES.items()} | {24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_AS_IS = "keep the names and layouts of the file: --as-is"


def recognises(files: Files) -> bool:
    """A directory with GGUF files, and without weights of Hugging Face, which have the same values exactly."""
    return bool(_files(files)) and not hugging_face.recognises(files)


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """Every tensor of the file, or of all parts of one model.

    Raises `StateMismatch` for several models, and for names that have no counterpart; `CorruptManifest` and `LimitExceeded`
    for headers that are damaged, or too large.
    """
    paths = _one_model(_files(files))
    headers = {path: reading.read(files, path) for path in paths}
    metadata = headers[paths[0]].metadata
    parts, made, kinds = [], list[ForeignTensor](), Counter[str]()
    layout = None if options.as_is else _Layout.of(metadata, paths[0])
    for path, header in headers.items():
        held = [_stored(files, path, entry) for entry in header.tensors]
        reading.check_places(path, files.size(path) or 0, [(one.start, one.bytes, one.entry.name) for one in held])
        parts += held
    _check_parts(paths, headers)
    for one in parts:
        kinds[one.kind] += 1 if one.block is not None else 0
        made.append(one.tensor() if layout is None else layout.tensor(one))
    twice = next((name for name, count in Counter(one.spec.name for one in made).items() if count > 1), None)
    if twice is not None:
        raise StateMismatch(f"two tensors would have the name {twice!r}", hint=_AS_IS, tensor=twice)
    derived = [one.spec.name for one in made if one.spec.name in DERIVED] if layout is not None else []
    found = TakenTensors(tuple(one for one in made if one.spec.name not in derived))
    taken = found.noting(_notes(kinds, layout, derived, files))
    listing = hugging_face.listed(KIND.name, files, taken, [FileUse(path, "tensors") for path in paths])
    data = json.dumps(metadata, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
    return listing._replace(made_assets={METADATA: data})


class _Stored(NamedTuple):
    """A tensor of a file: `bytes` of it, and its block if it is quantised."""

    path: str
    entry: GgufTensor
    kind: str
    block: quantised.QuantisedBlock | None
    bytes: int

    @property
    def start(self) -> int:
        return self.entry.start

    def tensor(self, name: str | None = None, heads: int | None = None) -> ForeignTensor:
        """The tensor under its own or another name, with the rows of each of its heads apart."""
        name = self.entry.name if name is None else name
        if self.block is None:
            spec = TensorSpec(GROUP, name, self.kind, self.entry.shape)
            return ForeignTensor(spec, _pieces(self.path, self.start, spec, heads))
        *outer, row = self.entry.shape
        codes = TensorSpec(GROUP, name, "U8", (*outer, row // self.block.values * self.block.bytes))
        decoder = quantised.Dequantised(
            ForeignTensor(codes, _pieces(self.path, self.start, codes, heads)), self.entry.kind, self.block
        )
        return ForeignTensor(TensorSpec(GROUP, name, "F32", self.entry.shape), (), decoder=decoder)


class _Layout(NamedTuple):
    """How an architecture's tensors become those of Hugging Face."""

    path: str
    architecture: Architecture
    heads: int
    key_heads: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any], path: str) -> _Layout:
        named = metadata.get("general.architecture")
        found = next((one for one in ARCHITECTURES.values() if one.name == named), None)
        if found is None:
            raise StateMismatch(
                f"{path} is a model of the architecture {named!r}, whose names in Hugging Face are not known here",
                hint=_AS_IS,
                file=path,
            )
        heads = metadata.get(f"{named}.attention.head_count")
        key_heads = metadata.get(f"{named}.attention.head_count_kv", heads)
        if found.permuted and not (type(heads) is type(key_heads) is int and heads > 0 and key_heads > 0):
            what = f"{path} has {heads!r} and {key_heads!r} attention heads, by which rows cannot be put in order"
            raise StateMismatch(what, hint=_AS_IS, file=path)
        return cls(path, found, heads if type(heads) is int else 0, key_heads if type(key_heads) is int else 0)

    def tensor(self, one: _Stored) -> ForeignTensor:
        stored = one.entry
        if stored.name in DERIVED:
            return one.tensor()
        name = self.architecture.hugging_face_name(stored.name)
        if name is None:
            raise StateMismatch(
                f"{one.path}: {self.architecture.name} in Hugging Face has no tensor for {stored.name!r}",
                hint=_AS_IS,
                file=one.path,
                tensor=stored.name,
            )
        if not self.architecture.is_permuted(stored.name):
            tensor = one.tensor(name)
            return computed.shifted(tensor, tensor.key, -1.0) if self.architecture.is_shifted(stored.name) else tensor
        heads = self.heads if ".attn_q." in stored.name else self.key_heads
        if not stored.shape or stored.shape[0] % (2 * heads):
            what = f"{one.path}: {stored.name!r} has shape {list(stored.shape)}, which {heads} heads do not divide"
            raise StateMismatch(what, hint=_AS_IS, file=one.path, tensor=stored.name)
        return one.tensor(name, heads)


def _stored(files: Files, path: str, entry: GgufTensor) -> _Stored:
    dtype = _DTYPES.get(entry.kind)
    if dtype is not None:
        return _Stored(path, entry, dtype, None, dtypes.nbytes(dtype, prod(entry.shape), entry.name))
    block = quantised.block(entry.kind, path, entry.name)
    row = entry.shape[-1] if entry.shape else 0
    if not row or row % block.values:
        what = f"{path}: {entry.name!r} of shape {list(entry.shape)} does not consist of blocks of {block.values}"
        raise StateMismatch(what, hint="download or copy it again", file=path, tensor=entry.name)
    return _Stored(path, entry, block.name, block, prod(entry.shape) // block.values * block.bytes)


def _pieces(path: str, start: int, spec: TensorSpec, heads: int | None) -> tuple[ForeignPiece, ...]:
    """The places of a tensor's elements. Of each head the file has the rows 0, half, 1, half + 1 …"""
    if heads is None:
        return (ForeignPiece(path, start, whole(spec.shape), strides(spec.shape)),)
    rows, *rest = spec.shape
    half, row = rows // heads // 2, prod(rest)
    width, pieces = dtypes.bits(spec.dtype) // 8, []
    for head in range(heads):
        for side in (0, 1):
            box = Box((head * 2 * half + side * half, *(0 for _ in rest)), (half, *rest))
            at = start + (head * 2 * half + side) * row * width
            pieces.append(ForeignPiece(path, at, box, _doubled(box.shape)))
    return tuple(pieces)


def _doubled(shape: Shape) -> Shape:
    """The steps of every second row."""
    first, *others = strides(shape)
    return (2 * first, *others)


def _files(files: Files) -> list[str]:
    return [name for name in files.list("") if _FILE.fullmatch(name) and files.size(name) is not None]


def _one_model(paths: list[str]) -> list[str]:
    """The only file, or all parts of one; anything else is refused."""
    if not paths:
        raise InvalidRequest("there is no GGUF file in the source", hint="pass the directory of a .gguf file")
    first = _PART.fullmatch(paths[0])
    if first is None and len(paths) == 1:
        return paths
    if first is not None:
        wanted = [f"{first[1]}-{number:05}-of-{first[3]}.gguf" for number in range(1, min(int(first[3]), 2**16) + 1)]
        if paths == wanted:
            return paths
    raise StateMismatch(
        f"{paths[0]} and {len(paths) - 1} other GGUF files are not all parts of one model",
        hint="copy the files of one model to a directory of its own, all parts if it has several",
        file=paths[0],
    )


def _check_parts(paths: list[str], headers: Mapping[str, GgufHeader]) -> None:
    """`StateMismatch` if a file says that it is one of several, and the others are not there."""
    stated = headers[paths[0]].metadata.get("split.count", 0)
    if stated not in (0, len(paths)):
        what = f"{paths[0]} is one of {stated} parts, but there are {len(paths)}"
        raise StateMismatch(what, hint="download all parts", file=paths[0])


def _notes(kinds: Mapping[str, int], layout: _Layout | None, derived: Iterable[str], files: Files) -> Iterable[str]:
    counted = [f"{count} tensors of {kind}" for kind, count in sorted(kinds.items()) if count]
    if counted:
        package = f"{quantised.PACKAGE} {getattr(quantised.library(), '__version__', '')}".strip()
        yield f"dequantised to F32 by the package {package}, with the precision that quantisation left: {', '.join(counted)}"
    if layout is not None and layout.architecture.norms_shifted:
        yield "norms of a Gemma are stored plus one in GGUF, and were computed back in F32"
    if derived:
        yield f"{', '.join(derived)} follows from the configuration, and was not imported"
    yield f"the file's metadata is in {METADATA}"
    if "config.json" not in files.list(""):
        yield "there is no config.json, without which transformers does not load the model: put the model's own beside it"


KIND = ForeignKind("gguf", IMPORT_KINDS["gguf"], recognises, read, last=True)

"""The safetensors header: encode, decode, validate.

Format: README § Format of https://github.com/huggingface/safetensors (0.8): eight bytes of little-endian header length, the
header as JSON, the tensors' bytes without gap or overlap. On the library's own output `encode(decode(x)) == x`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec

from holdfast_formats import decoding, dtypes
from holdfast_formats.errors import CorruptManifest, LimitExceeded, StateMismatch

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000  # the library's own limit
DATA_ALIGNMENT_BYTES = 4096  # ours: O_DIRECT and mmap stay aligned; allowed, since the padding is spaces in the header
_SIZE_MAX = 2**63 - 1
_METADATA = "__metadata__"
_REPAIR = "restore another step; this file is damaged"


class FileTensor(NamedTuple):
    """One tensor of a file: dtype, shape in elements, bytes [start, stop) after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorColumns(NamedTuple):
    """The same of many tensors."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    starts: Sequence[int]
    stops: Sequence[int]


class Header(NamedTuple):
    """A decoded header: tensors by ascending offset, the string metadata, and the whole header's length in bytes."""

    tensors: tuple[FileTensor, ...]
    metadata: dict[str, str] | None
    header_bytes: int


def storage_order(tensors: Iterable[tuple[str, str]]) -> list[int]:
    """Positions of (name, dtype) pairs in the order in which the library stores them: dtype descending, then name."""
    listed = list(tensors)
    return sorted(range(len(listed)), key=lambda i: (-dtypes.ORDER[listed[i][1]], listed[i][0].encode()))


def encode(
    tensors: Sequence[FileTensor], metadata: Mapping[str, str] | None = None, alignment_bytes: int = DATA_ALIGNMENT_BYTES
) -> bytes:
    """The length field and the header, padded with spaces so that the data begins at a multiple of `alignment_bytes`."""
    validate(tensors)
    columns = zip(*tensors, strict=True) if tensors else ((),) * len(FileTensor._fields)
    body = body_of(TensorColumns(*columns), metadata)
    body += b" " * (-(LENGTH_BYTES + len(body)) % alignment_bytes)
    if len(body) > HEADER_BYTES_MAX:
        raise LimitExceeded(
            f"a safetensors header of {len(body)} bytes is over the format's limit of {HEADER_BYTES_MAX}",
            hint="lower file_bytes_max, so that a file holds fewer tensors",
        )
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def body_of(tensors: TensorColumns, metadata: Mapping[str, str] | None = None) -> bytes:
    """The header's JSON without padding. There are few dtypes and shapes, each of which is spelled once."""
    names, kinds, shapes, starts, stops = tensors
    forms = list(zip(kinds, shapes, strict=True))
    spelled = {of: f'"dtype":{_json(of[0])},"shape":{_json(of[1])},"data_offsets"' for of in set(forms)}
    joined = "".join(names)
    is_plain = joined.isascii() and joined.isprintable() and '"' not in joined and "\\" not in joined
    texts = [f'"{name}"' for name in names] if is_plain else list(map(_json, names))
    rows = zip(texts, map(spelled.__getitem__, forms), starts, stops, strict=True)
    parts = [f"{name}:{{{form}:[{start},{stop}]}}" for name, form, start, stop in rows]
    return f"{{{','.join(([] if metadata is None else [_about(metadata)]) + parts)}}}".encode()


def _about(metadata: Mapping[str, str]) -> str:
    return f'"{_METADATA}":{_json(dict(metadata))}'


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def decode(head: bytes, file_bytes: int, source: str = "file") -> Header:
    """Decode and validate the header of a file of `file_bytes` bytes from its first bytes.

    `head` must hold at least the whole header. Raises `CorruptManifest`, naming `source`, for a truncated file, an
    oversized header, duplicate keys, holes, overlaps, or sizes that do not follow from dtype and shape.
    """
    length = header_length(head, file_bytes, source)
    if len(head) < LENGTH_BYTES + length:
        raise _broken(source, f"is cut off inside its header ({len(head)} of {LENGTH_BYTES + length} bytes)")
    try:
        text = head[LENGTH_BYTES : LENGTH_BYTES + length].decode()
        document = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _broken(source, f"has a header that is not JSON: {error}") from error
    if not text.startswith("{"):
        raise _broken(source, "has a header that does not begin with a JSON object")
    metadata = document.pop(_METADATA, None)
    try:
        known = None if metadata is None else msgspec.convert(metadata, dict[str, str])
        tensors = [_stored(name, _convert(entry)) for name, entry in document.items()]
        tensors.sort(key=lambda t: (t.start, t.stop))
        if known and not _is_unicode("".join((*known, *known.values()))):
            raise StateMismatch("its metadata is not valid Unicode")
        end = validate(tensors)
    except (msgspec.ValidationError, UnicodeEncodeError, StateMismatch) as error:
        raise _broken(source, f"has an inconsistent header: {error}") from error
    if LENGTH_BYTES + length + end != file_bytes:
        raise _broken(source, f"has {file_bytes} bytes, but its header describes {LENGTH_BYTES + length + end}")
    return Header(tuple(tensors), known, LENGTH_BYTES + length)


def header_length(head: bytes, file_bytes: int, source: str = "file") -> int:
    """The header's length in bytes, read from the first eight; `CorruptManifest` when it is impossible."""
    if len(head) < LENGTH_BYTES:
        raise _broken(source, f"has {len(head)} bytes, too few for a safetensors file")
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > HEADER_BYTES_MAX or LENGTH_BYTES + length > file_bytes:
        raise _broken(source, f"claims a header of {length} bytes in a file of {file_bytes}")
    return length


def validate(tensors: Sequence[FileTensor]) -> int:
    """Check that the tensors tile the data from 0 on, in order, each with the length of its dtype and shape; return the
    end.
    """
    names = {tensor.name for tensor in tensors}
    if len(names) != len(tensors) or _METADATA in names or not _is_unicode("".join(names)):
        raise StateMismatch(f"tensor names must be distinct Unicode strings, and none may be {_METADATA!r}")
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}  # there are few forms, each of which is checked once
    end = 0
    for name, dtype, shape, start, stop in tensors:
        size = sizes.get((dtype, shape))
        if size is None:
            size = sizes[dtype, shape] = _checked_size(name, dtype, shape)
        if start != end or stop < start:
            raise StateMismatch(f"tensor {name!r}: bytes [{start}, {stop}) do not follow {end}")
        if stop - start != size:
            raise StateMismatch(f"tensor {name!r}: {stop - start} bytes for {dtype}{list(shape)}")
        end = stop
    return end


def _checked_size(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in dtypes.BITS:
        raise StateMismatch(f"tensor {name!r}: unknown dtype {dtype!r}")
    if any(n < 0 for n in shape):
        raise StateMismatch(f"tensor {name!r}: negative size in shape {list(shape)}")
    if prod(shape) * dtypes.BITS[dtype] > _SIZE_MAX:
        raise StateMismatch(f"tensor {name!r}: shape {list(shape)} is too large")
    return dtypes.nbytes(dtype, prod(shape), name)


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_convert = decoding.converter(_Entry)


def _stored(name: str, entry: _Entry) -> FileTensor:
    return FileTensor(name, entry.dtype, entry.shape, *entry.data_offsets)


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode the text: JSON can contain half a surrogate pair, which other languages' readers refuse."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {twice!r}")
    return document


def _broken(source: str, what: str) -> CorruptManifest:
    return CorruptManifest(f"{source} {what}", hint=_REPAIR, file=source)

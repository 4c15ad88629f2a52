"""The manifest entries of a compact checkpoint about tensors stored in fewer bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from typing import Protocol

import msgspec

from holdfast_formats.disk import codings
from holdfast_formats.errors import StateMismatch
from holdfast_formats.tensors import TensorSpec

_SHA256 = re.compile(r"[0-9a-f]{64}")


class DtypeAndShape(Protocol):
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class CodedTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor stored in fewer bytes, in the parts of `codings`: its dtype and shape, and the relative error after
    decoding: the norm of the difference divided by that of the values; 0 if lossless.
    """

    coding: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    placement: str = ""


class Compacted(msgspec.Struct, frozen=True):
    """Tensors were stored again in fewer bytes after the commit: when, by which rule, the previous bytes of the
    manifest's files, and the SHA-256 of the previous manifest.

    `tensors` and `exact` are keyed by group, then by name: the coded ones, and why others stayed as saved. `aliases`
    are those of coded tensors.
    """

    at: str
    optim: str
    bytes: int
    manifest_sha256: str
    tensors: dict[str, dict[str, CodedTensor]]
    exact: dict[str, dict[str, str]] = {}
    aliases: dict[str, dict[str, str]] = {}

    @property
    def lossy(self) -> bool:
        return any(one.coding not in codings.LOSSLESS for held in self.tensors.values() for one in held.values())

    @property
    def error(self) -> float:
        return max((one.error for held in self.tensors.values() for one in held.values()), default=0.0)


def check(compacted: Compacted, tensors: Mapping[str, Mapping[str, DtypeAndShape]], size: int) -> None:
    """`StateMismatch` for contradictions with the listed tensors, or the bytes of all files."""
    if compacted.bytes < size or not _SHA256.fullmatch(compacted.manifest_sha256) or not compacted.tensors:
        raise StateMismatch("it does not list what was compacted")
    for group, coded in compacted.tensors.items():
        held = tensors.get(group)
        if held is None:
            raise StateMismatch(f"coded tensors of group {group!r}, which is not listed")
        for name, one in coded.items():
            TensorSpec(group, name, one.dtype, one.shape).check()
            if name in held or not 0 <= one.error < inf:
                raise StateMismatch(f"coded tensor {name!r} is stored as it was too, or has no error")
            _check_parts(name, one, held)
        for alias, target in compacted.aliases.get(group, {}).items():
            if alias in held or alias in coded or target not in coded:
                raise StateMismatch(f"alias {alias!r} of {target!r} in group {group!r} does not resolve")


def _check_parts(name: str, one: CodedTensor, held: Mapping[str, DtypeAndShape]) -> None:
    for part in codings.PARTS.get(one.coding, {}).values():  # what is of a later version is refused when it is read
        stored, known = held.get(name + part.suffix), one.dtype == "F32" and one.shape
        shape = codings.part_shape(part, one.shape) if known else ()
        if not known or stored is None or (stored.dtype, stored.shape) != (part.dtype, shape):
            raise StateMismatch(f"coded tensor {name!r} has no {name + part.suffix!r} of {part.dtype}{list(shape)}")
    ties = held.get(name + codings.TIES_PART.suffix) if one.coding == "low16" else None
    if ties is not None and (ties.dtype != codings.TIES_PART.dtype or len(ties.shape) != 1):
        raise StateMismatch(f"coded tensor {name!r} has ties of {ties.dtype}{list(ties.shape)}")

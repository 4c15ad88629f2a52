"""The contents of a table's TOML: its keys, their kinds and limits. docs/rules.md explains them to authors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from holdfast_formats import toml_text
from holdfast_formats.decoding import converter
from holdfast_formats.errors import InvalidRequest

TEXT_BYTES_MAX = 256 * 1024
ENTRIES_MAX = 1000
WORDS_MAX = 64
BLOCK_MAX = 2**20

Text = Annotated[str, Meta(min_length=1, max_length=512)]
Texts = Annotated[list[Text], Meta(max_length=WORDS_MAX)]
Words = Annotated[list[Annotated[str, Meta(max_length=512, pattern="^[^{}]*$")]], Meta(max_length=WORDS_MAX)]
Dimension = Annotated[int, Meta(ge=0, le=7)]
Size = Text | Annotated[int, Meta(ge=0, le=2**53)]
Kind = Literal["qkv", "gate_up", "experts"]
Otherwise = Literal["refuse", "uneven", "replicate", "largest"]
Found = Literal["contiguous", "heads", "groups"]


class TensorRule(Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[tensors]]`: names, and how they are cut. Without `cut`, every rank of an axis holds the whole tensor."""

    name: Text | Texts
    part: Words = []
    shape: Annotated[list[Size], Meta(max_length=8)] | None = None
    cut: Dimension | None = None
    by: Literal["tp", "etp"] | None = None
    units: Size | None = None
    otherwise: Otherwise | None = None
    vocabulary: bool = False
    stage: Literal["layer", "first", "last", "every"] | None = None


class FusionRule(Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[fusions]]`: a tensor that contains others one after the other, or those of all experts stacked."""

    kind: Kind
    name: Text
    of: Annotated[list[Text], Meta(min_length=1, max_length=16)]
    part: Words = []
    dimension: Dimension = 0
    heads: Annotated[list[Size], Meta(min_length=2, max_length=2)] | None = None
    found: Found = "contiguous"
    stored: bool = False


class Tie(Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[ties]]`: two names of one tensor, if config.json's flag, or else `default`, is true."""

    alias: Text
    target: Text
    when: Text
    default: bool = False


class Synonyms(Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[synonyms]]`: names of one tensor, of which a checkpoint has one, because some programs rename when they
    save.
    """

    names: Annotated[list[Text], Meta(min_length=2, max_length=8)]
    part: Words = []


class Scales(Struct, frozen=True, forbid_unknown_fields=True):
    """`[scales]`: a weight of two dimensions may have one number per block beside it, under its name and `suffix`."""

    suffix: Text
    block: Annotated[int, Meta(ge=1, le=BLOCK_MAX)]


class Document(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern="^[a-z][a-z0-9_-]{0,63}$")]
    extends: Text | Texts = []
    architectures: Words = []
    model_types: Words = []
    marks: Annotated[list[Text | Texts], Meta(max_length=WORDS_MAX)] = []
    root: Annotated[Words, Meta(min_length=1)] | None = None
    sizes: dict[Text, Size] = {}
    tensors: Annotated[list[TensorRule], Meta(max_length=ENTRIES_MAX)] = []
    fusions: Annotated[list[FusionRule], Meta(max_length=ENTRIES_MAX)] = []
    ties: Annotated[list[Tie], Meta(max_length=ENTRIES_MAX)] = []
    synonyms: Annotated[list[Synonyms], Meta(max_length=ENTRIES_MAX)] = []
    scales: Scales | None = None


_convert = converter(Document)


def decode(text: bytes | str) -> dict[str, Any]:
    """Decode TOML text into plain values; `InvalidRequest` with the place of an error, or if it exceeds `TEXT_BYTES_MAX`."""
    data = text.encode() if isinstance(text, str) else text
    if len(data) > TEXT_BYTES_MAX:
        raise InvalidRequest(
            f"the rules file has {len(data)} bytes; at most {TEXT_BYTES_MAX} are allowed",
            hint="write {layer}, {expert}, {root} and {part} in place of single names",
        )
    try:
        return toml_text.decode(data)
    except (ValueError, RecursionError) as problem:
        raise InvalidRequest(
            f"the rules are not valid TOML: {problem}", hint="see docs/rules.md for a full example"
        ) from None


def check(values: Mapping[str, Any]) -> Document:
    """Check decoded TOML as a `Document`; `InvalidRequest` with the table and the key that is wrong, missing or unknown."""
    try:
        return _convert(dict(values))
    except (msgspec.ValidationError, RecursionError) as problem:
        name = values.get("name")
        raise InvalidRequest(
            f"rules table {name if isinstance(name, str) else '?'!r}: {problem}", hint="see docs/rules.md for every key"
        ) from None

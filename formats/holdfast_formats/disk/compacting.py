"""Compact checkpoints: the tensors of an old checkpoint that a rule stores in fewer bytes, and the resulting
checkpoint.

First and second moments of optimizers are rounded (`bf16`, `int8`) or left as they are (`exact`); full-precision
masters become the low bits that their BF16 weights lack. Tensors with unknown names and dtypes stay as saved.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple, get_args

import msgspec

from holdfast_formats import naming
from holdfast_formats.disk import codings, index
from holdfast_formats.disk.codings import MODEL, PARTS, TIES_PART, part_shape
from holdfast_formats.disk.compacted import CodedTensor, Compacted
from holdfast_formats.disk.manifests import FileEntry, Manifest, TensorEntry
from holdfast_formats.disk.packing import FilePlan, pack
from holdfast_formats.disk.read_planner import resolve
from holdfast_formats.errors import StateMismatch
from holdfast_formats.region import Shape
from holdfast_formats.tensors import TensorSpec

OptimRule = Literal["exact", "bf16", "int8"]
RULES: tuple[OptimRule, ...] = get_args(OptimRule)
OPTIM, MASTER = "optim", "master"
FIRST = frozenset({"exp_avg", "momentum_buffer"})  # first moments: of both signs
SECOND = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "acc_delta"})  # never below zero
# Sets of states of one parameter whose moments may be rounded; single numbers and integers may be beside them. A step
# subtracts, divides and compares states, so those of any other set, such as a centered RMSprop's, stay as saved.
TOGETHER = (
    frozenset({"exp_avg", "exp_avg_sq"}),
    frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    frozenset({"exp_avg", "exp_inf"}),
    frozenset({"square_avg"}),
    frozenset({"square_avg", "momentum_buffer"}),
    frozenset({"square_avg", "acc_delta"}),
)
COUNTS = frozenset({"BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"})
MAXIMUM = "max_exp_avg_sq"  # never below exp_avg_sq: only rounding each value for itself keeps that
BYTES_MIN = 1024  # of a tensor; a smaller one's entry in the manifest would take what coding it saves
ROW_MIN = 16  # elements of the last dimension, from which blocks of 8-bit codes are smaller than bfloat16
TIES_SHARE = 64  # a master of which more than one element in so many lies half-way stays whole


class CodingCandidate(NamedTuple):
    """A tensor that a rule stores in fewer bytes, if its values allow that."""

    group: str
    name: str
    coding: str
    entry: TensorEntry


class Encoded(NamedTuple):
    """A candidate whose values were examined: its coding, the error after decoding, and the number of half-way masters
    rounded up. `left`: why it stays as saved.
    """

    candidate: CodingCandidate
    error: float = 0.0
    ties: int = 0
    left: str = ""


def candidates(manifest: Manifest, rule: str) -> Iterator[CodingCandidate]:
    """The tensors that the rule is for, in the manifest's order."""
    if manifest.thinned is not None or manifest.compacted is not None:
        return
    held = manifest.tensors.get(OPTIM, {})
    chosen = _moments(manifest, rule)
    for name in filter(chosen.__contains__, held):
        yield CodingCandidate(OPTIM, name, chosen[name], held[name])
    for name, entry in manifest.tensors.get(MASTER, {}).items():
        if _weight(manifest, name, entry) and _free(manifest, MASTER, name, "low16"):
            yield CodingCandidate(MASTER, name, "low16", entry)


def parameter_of(name: str) -> str:
    """The parameter of a state in the group `optim`."""
    return name.rpartition("/")[0]


def _moments(manifest: Manifest, rule: str) -> dict[str, str]:
    """A rule's codings of optimizer states, by name: all of a parameter's, or none.

    A lone first moment is in none of the sets: Lion takes its sign, and Muon scales its smallest directions up to its
    largest, so rounding errors dominate what they see (measured: 2 and 8 % of an update by bfloat16).
    """
    states: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in manifest.tensors.get(OPTIM, {}).items() if rule != "exact" else ():
        if prod(entry.shape) > 1 and entry.dtype not in COUNTS:
            states.setdefault(parameter_of(name), {})[name.rpartition("/")[2]] = entry
    moments: dict[str, str] = {}
    for parameter, kept in states.items():
        if kept.keys() not in TOGETHER or any(one.dtype != "F32" or one.nbytes < BYTES_MIN for one in kept.values()):
            continue
        wanted = {f"{parameter}/{key}": _coding(key, rule, entry, kept) for key, entry in kept.items()}
        if all(_free(manifest, OPTIM, name, coding) for name, coding in wanted.items()):
            moments |= wanted
    return moments


def _coding(key: str, rule: str, entry: TensorEntry, kept: Collection[str]) -> str:
    if rule == "bf16" or entry.shape[-1] < ROW_MIN or (MAXIMUM in kept and key in SECOND):
        return "bf16"
    return "int8" if key in FIRST else "int8-log"


def together(encoded: Sequence[Encoded]) -> list[Encoded]:
    """The candidates, without those beside an uncoded state of the same parameter."""
    left = {parameter_of(one.candidate.name): one for one in encoded if one.left and one.candidate.group == OPTIM}

    def kept(one: Encoded) -> Encoded:
        beside = left.get(parameter_of(one.candidate.name)) if one.candidate.group == OPTIM else None
        if one.left or beside is None:
            return one
        return Encoded(one.candidate, left=f"{beside.candidate.name.rpartition('/')[2]} also stays as it is: {beside.left}")

    return [kept(one) for one in encoded]


def milder(manifest: Manifest, one: CodingCandidate) -> CodingCandidate | None:
    """The same tensor by the coding that rounds each value for itself; None if it is that, or a name is taken."""
    if one.coding not in ("int8", "int8-log") or not _free(manifest, one.group, one.name, "bf16"):
        return None
    return one._replace(coding="bf16")


def _weight(manifest: Manifest, name: str, entry: TensorEntry) -> bool:
    """Whether a master's BF16 weight exists."""
    try:
        _, weight = resolve(manifest, MODEL, name)
    except StateMismatch:
        return False
    large = entry.dtype == "F32" and len(entry.shape) > 0 and entry.nbytes >= BYTES_MIN
    return large and (weight.dtype, weight.shape) == ("BF16", entry.shape)


def _free(manifest: Manifest, group: str, name: str, coding: str) -> bool:
    """Whether no part's name is taken."""
    parts = [*PARTS[coding].values(), *([TIES_PART] if coding == "low16" else [])]
    taken = manifest.tensors[group].keys() | manifest.aliases.get(group, {}).keys()
    return not any(name + part.suffix in taken for part in parts)


def small_bytes(manifest: Manifest) -> dict[str, int]:
    """About how many bytes each rule would leave, if all its candidates can be coded; without rules that save nothing."""
    sizes: dict[str, int] = {}
    for rule in RULES:
        saved = sum(one.entry.nbytes - _nbytes(one.coding, one.entry.shape) for one in candidates(manifest, rule))
        if saved > 0:
            sizes[rule] = manifest.bytes - saved
    return sizes


def least_new_bytes(manifest: Manifest, chosen: Sequence[CodingCandidate]) -> int:
    """About how many bytes must be rewritten to code these, if all can be."""
    groups = {one.group for one in chosen}
    whole = sum(entry.nbytes for group in groups for entry in manifest.tensors[group].values())
    return whole - sum(one.entry.nbytes - _nbytes(one.coding, one.entry.shape) for one in chosen)


def _nbytes(coding: str, shape: Shape) -> int:
    return sum(TensorSpec("", "", part.dtype, part_shape(part, shape)).nbytes for part in PARTS[coding].values())


class CompactPlan(NamedTuple):
    """A compact checkpoint before it is written: files that stay, files that are written, the manifest of what stays,
    and the statement for its own manifest.
    """

    full: Manifest
    coded: Mapping[tuple[str, str], Encoded]
    stays: tuple[FileEntry, ...]
    files: tuple[FilePlan, ...]
    compacted: Compacted

    @property
    def proof(self) -> Manifest:
        """The manifest of the files that stay, for their verification."""
        groups = self.compacted.tensors
        tensors = {group: held for group, held in self.full.tensors.items() if group not in groups}
        aliases = {group: names for group, names in self.full.aliases.items() if group not in groups}
        return msgspec.structs.replace(self.full, files=self.stays, tensors=tensors, aliases=aliases)


def plan(full: Manifest, encoded: bytes, rule: str, found: Sequence[Encoded], at: str) -> CompactPlan:
    """The plan for a checkpoint with the encoded manifest `encoded`, all of whose candidates were examined.

    Raises `StateMismatch` if nothing gets smaller, or one file holds tensors of a group that stays and of one that does
    not.
    """
    what = f"{full.run}@{full.step}"
    coded = {(one.candidate.group, one.candidate.name): one for one in found if not one.left}
    groups = sorted({group for group, _ in coded})
    if not coded:
        why = "; ".join(dict.fromkeys(one.left for one in found if one.left)) or "it has no tensor that the rule applies to"
        raise StateMismatch(f"{what} cannot be compacted: {why}", hint="the checkpoint stays as it is")
    gone = {tensor.file for group in groups for tensor in full.tensors[group].values()}
    other = {tensor.file for group, held in full.tensors.items() if group not in groups for tensor in held.values()}
    if both := sorted(gone & other):
        raise StateMismatch(f"{both[0]} of {what} holds tensors of several groups", hint="the checkpoint stays as it is")
    gone |= {naming.index_file_name(group) for group in groups}
    files = pack((spec for group in groups for spec in _specs(full, group, coded)), _file_bytes(full))
    stays = tuple(file for file in full.files if file.name not in gone)
    aliases = {
        group: {alias: to for alias, to in full.aliases.get(group, {}).items() if (group, to) in coded} for group in groups
    }
    compacted = Compacted(
        at=at,
        optim=rule,
        bytes=full.bytes,
        manifest_sha256=hashlib.sha256(encoded).hexdigest(),
        tensors={group: {name: _told(coded[g, name]) for g, name in coded if g == group} for group in groups},
        exact=_left(found),
        aliases={group: names for group, names in aliases.items() if names},
    )
    return CompactPlan(full, coded, stays, tuple(files), compacted)


def _file_bytes(full: Manifest) -> int:
    """The data of its largest file. Manifests do not state the packing limit, but only a single large tensor's file
    exceeds it.
    """
    sizes: Counter[str] = Counter()
    for held in full.tensors.values():
        for entry in held.values():
            sizes[entry.file] += entry.nbytes
    return max(sizes.values(), default=1) or 1


def _specs(full: Manifest, group: str, coded: Mapping[tuple[str, str], Encoded]) -> Iterator[TensorSpec]:
    for name, entry in full.tensors[group].items():
        one = coded.get((group, name))
        if one is None:
            yield TensorSpec(group, name, entry.dtype, entry.shape)
            continue
        for part in PARTS[one.candidate.coding].values():
            yield TensorSpec(group, name + part.suffix, part.dtype, part_shape(part, entry.shape))
        if one.ties:
            yield TensorSpec(group, name + TIES_PART.suffix, TIES_PART.dtype, (one.ties,))


def _told(one: Encoded) -> CodedTensor:
    entry = one.candidate.entry
    return CodedTensor(one.candidate.coding, entry.dtype, entry.shape, one.error, entry.placement)


def _left(encoded: Sequence[Encoded]) -> dict[str, dict[str, str]]:
    left: dict[str, dict[str, str]] = {}
    for one in encoded:
        if one.left:
            left.setdefault(one.candidate.group, {})[one.candidate.name] = one.left
    return left


def finish(planned: CompactPlan, files: Sequence[FileEntry], tensors: Mapping[str, Mapping[str, TensorEntry]]) -> Manifest:
    """The manifest, from the written files' entries with the new indexes, and their tensors by group.

    Raises `StateMismatch` if it is no smaller than before.
    """
    full, groups = planned.full, planned.compacted.tensors
    held = {group: dict(tensors[group]) if group in groups else kept for group, kept in full.tensors.items()}
    aliases = {
        group: {alias: to for alias, to in names.items() if to in held[group]} for group, names in full.aliases.items()
    }
    compact = msgspec.structs.replace(
        full, files=(*planned.stays, *files), tensors=held, aliases=aliases, compacted=planned.compacted
    )
    if compact.bytes >= full.bytes:
        raise StateMismatch(
            f"{full.run}@{full.step} would have {compact.bytes} bytes for {full.bytes}", hint="the checkpoint stays as it is"
        )
    return compact


def indexes(planned: CompactPlan) -> dict[str, bytes]:
    return {
        naming.index_file_name(group): index.encode(file for file in planned.files if file.group == group)
        for group in planned.compacted.tensors
    }


def part_of(planned: CompactPlan, spec: TensorSpec) -> tuple[Encoded, str] | None:
    """The coded tensor of which a new tensor is a part, and which part; None for one stored as before."""
    for role, suffix in _SUFFIXES:
        one = planned.coded.get((spec.group, spec.name.removesuffix(suffix))) if spec.name.endswith(suffix) else None
        if one is not None and (role == codings.TIES or role in PARTS[one.candidate.coding]):
            stored = TIES_PART if role == codings.TIES else PARTS[one.candidate.coding][role]
            if stored.suffix == suffix:
                return one, role
    return None


_SUFFIXES = [(codings.TIES, TIES_PART.suffix)] + [(role, part.suffix) for of in PARTS.values() for role, part in of.items()]

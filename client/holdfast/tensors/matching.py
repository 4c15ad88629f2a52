"""Compares a live state with a checkpoint, and determines where bytes go and what is done afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from holdfast.left_out import LeftOutNote
from holdfast.tensors import casting
from holdfast.tensors.casting import Cast
from holdfast.tensors.fragments import extent, sharing
from holdfast.tensors.leaves import RANK_PREFIX, Key, LackingCopy, Leaf, OfferedLeaves, PartPlan, Selection
from holdfast.tensors.torch_dtypes import SIGNED, as_integers, torch_dtype
from holdfast_formats.errors import StateMismatch


class Overlap(NamedTuple):
    """Two pieces of live memory with bytes in common, and the leaves that are filled apart from it to compare these."""

    first: Leaf
    other: Leaf
    live: tuple[torch.Tensor, torch.Tensor]

    @property
    def text(self) -> str:
        return f"{self.other.path} overlaps {self.first.path} here"

    def is_equal(self) -> bool:
        """Whether the stored values of both agree about their common elements."""
        one, other = self.live
        if one.dtype != other.dtype:
            return False
        first, second = (leaf.pieces[0].tensor.to(one.dtype) for leaf in (self.first, self.other))
        start, width = min(one.data_ptr(), other.data_ptr()), one.element_size()
        offsets = [(live.data_ptr() - start) // width for live in self.live]
        size = max(offset + extent(live) for offset, live in zip(offsets, self.live, strict=True))
        line = torch.zeros(size, dtype=one.dtype, device=first.device)
        views = [line.as_strided(live.shape, live.stride(), at) for live, at in zip(self.live, offsets, strict=True)]
        views[0].copy_(first)
        views[1].copy_(second)
        return torch.equal(*(as_integers(held.contiguous(), SIGNED) for held in (views[0], first)))


def overlaps(filled: Iterable[Cast]) -> list[Overlap]:
    """All pairs of pieces of different leaves that share some bytes of live memory."""
    placed = [(cast, number) for cast in filled for number in range(len(cast.live.pieces))]
    overlapping = []
    for pair in sharing(cast.live.pieces[number].tensor for cast, number in placed):
        (first, one), (second, other) = placed[pair.first], placed[pair.second]
        if first is not second:
            live = first.live.pieces[one].tensor, second.live.pieces[other].tensor
            overlapping.append(Overlap(_apart(first.stored, one), _apart(second.stored, other), live))
    return overlapping


def _apart(leaf: Leaf, number: int) -> Leaf:
    piece = leaf.pieces[number]
    return leaf._replace(pieces=(piece._replace(tensor=torch.empty_like(piece.tensor)),))


_BESIDE = "extra/"  # what is neither model nor optimizer
_WEIGHTS = "model"
LISTED_MAX = 20  # names in an error's text; its members have all of them


class TiedPair(NamedTuple):
    """Two stored tensors that would go into the same memory, each in memory of its own to compare them."""

    first: Leaf
    other: Leaf

    @staticmethod
    def of(live: Leaf, other: Key, dtype: str) -> TiedPair:
        """`live` is the tensor filled from the first, and `dtype` the stored dtype of both."""
        made = torch_dtype(dtype, live.name)
        pieces = [tuple(p._replace(tensor=torch.empty_like(p.tensor, dtype=made)) for p in live.pieces) for _ in range(2)]
        first = live._replace(dtype=dtype, pieces=pieces[0])
        return TiedPair(first, first._replace(group=other[0], name=other[1], pieces=pieces[1]))

    @property
    def text(self) -> str:
        return f"{self.other.path} is {self.first.path} here"

    def is_equal(self) -> bool:
        return all(
            torch.equal(*(piece.tensor.contiguous().view(-1).view(torch.uint8) for piece in pair))
            for pair in zip(self.first.pieces, self.other.pieces, strict=True)
        )


class MatchedLeaves(NamedTuple):
    """Where the bytes of a checkpoint go.

    Fill the pieces of every leaf with the stored tensor of its name, then call `apply`. `missing` and `unexpected` are
    names `group/name`. `notes` list decisions; `apply` adds those in `late`. `casts` are filled in memory of the stored
    dtype first. `lacking` are copies that nothing fills yet, `renewed` what actions set.
    """

    leaves: tuple[Leaf, ...]
    missing: list[str]
    unexpected: list[str]
    notes: list[str]
    actions: tuple[Callable[[], None], ...]
    late: list[str]
    casts: tuple[Cast, ...] = ()
    lacking: tuple[LackingCopy, ...] = ()
    renewed: tuple[str, ...] = ()
    ties: tuple[TiedPair, ...] = ()
    strict: bool = True

    @property
    def live(self) -> Iterator[Leaf]:
        return (cast.live for cast in self.filled)

    @property
    def filled(self) -> Iterator[Cast]:
        """Every leaf with its final memory, and with the memory into which it is read."""
        apart = {id(cast.stored) for cast in self.casts}
        yield from (Cast(leaf, leaf) for leaf in self.leaves if id(leaf) not in apart)
        yield from self.casts

    def check_ties(self, fill: Callable[[Sequence[Leaf]], object]) -> None:
        """Compare stored tensors that share memory here, before anything live changes: `fill` reads them into other
        memory.

        Raises `StateMismatch` where they differ. If the restore is not strict, it notes two that are one tensor.
        """
        pairs: list[TiedPair | Overlap] = [*self.ties, *overlaps(self.filled)]
        if not pairs:
            return
        fill([leaf for pair in pairs for leaf in (pair.first, pair.other)])
        differing = [pair for pair in pairs if not pair.is_equal()]
        refused = [pair.text for pair in differing if self.strict or isinstance(pair, Overlap)]
        if refused:
            raise StateMismatch(
                f"tensors that differ in the checkpoint share memory in the live state: {_short(refused)}",
                hint="give each its own memory, exclude one with exclude=('GROUP/NAME',), or, if both are one "
                "tensor, pass strict=False to restore the first",
                mismatched=refused,
            )
        if differing:
            text = f"tensors that differ in the checkpoint are one tensor here: {_short([one.text for one in differing])}"
            self.notes.append(LeftOutNote(f"{text}: restored from the second name"))

    def apply(self) -> None:
        """Install everything but tensor memory: optimizer state, schedulers, loaders, plain values, random streams last."""
        for action in self.actions:
            action()
        self.notes.extend(self.late)


class _Comparison:
    def __init__(self, stored: OfferedLeaves, selection: Selection) -> None:
        self.stored = stored
        self.selection = selection
        self.leaves: dict[tuple[object, ...], Leaf] = {}
        self.missing: list[str] = []
        self.mismatched: list[str] = []
        self.notes: list[str] = list(stored.notes)
        self.claimed: set[Key] = set()
        self.late: list[str] = []
        self.casts: list[Cast] = []
        self.castable = 0  # of the mismatched ones
        self.conflicts: list[str] = []
        self.keepable: list[str] = []
        self.ties: list[TiedPair] = []
        self._places: dict[tuple[object, ...], Leaf] = {}
        self._taken: dict[Key, Leaf] = {}

    def take(self, plan: PartPlan) -> None:
        self.missing += plan.missing
        self.notes += plan.notes
        self.conflicts += plan.conflicts
        self.keepable += plan.keepable
        self.claimed |= plan.claimed
        for group, key in plan.documents:
            self.claimed.add((group, key))
            if self.stored.value(group, key) is None:
                self.missing.append(f"{group}/{key}")
        for leaf in plan.wanted:
            self._take_leaf(leaf, [a for a, c in plan.aliases.get(leaf.group, {}).items() if c == leaf.name])
        for group, aliases in plan.aliases.items():
            self._take_aliases(group, aliases)

    def _take_leaf(self, leaf: Leaf, aliases: Iterable[str]) -> None:
        """Find the stored tensor: under the leaf's name, a name stored as its alias, or a name tied to it in this state."""
        names = (self.stored.canonical(leaf.group, name) for name in (leaf.name, *aliases))
        other_name = next((name for name in names if name is not None), None)
        self.claimed.add(leaf.key)
        if other_name is None:
            self.missing.append(leaf.path)
            return
        self.claimed.add((leaf.group, other_name))
        dtype, shape = self.stored.spec(leaf.group, other_name) or ("nothing", ())
        cast = self.selection.cast and shape == leaf.shape and casting.possible(dtype, leaf.dtype)
        if (dtype, shape) != (leaf.dtype, leaf.shape) and not cast:
            self.castable += shape == leaf.shape and casting.possible(dtype, leaf.dtype)
            self.mismatched.append(f"{leaf.path}: stored {dtype} {list(shape)}, live {leaf.dtype} {list(leaf.shape)}")
            return
        memory = tuple((piece.box, piece.tensor.data_ptr()) for piece in leaf.pieces)
        if (leaf.group, other_name, memory) not in self.leaves:
            live = leaf._replace(name=other_name)
            place = tuple((p.tensor.data_ptr(), p.tensor.dtype, p.tensor.shape, p.tensor.stride()) for p in leaf.pieces)
            first = self._places.setdefault(place, live) if place else live
            if first is not live:  # another stored tensor goes into this memory
                self._tie(first, (leaf.group, other_name))
                return
            if cast:
                self.casts.append(casting.apart(live, dtype))
            self.leaves[leaf.group, other_name, memory] = self.casts[-1].stored if cast else live
            self._taken[leaf.group, other_name] = live

    def _tie(self, live: Leaf, other: Key) -> None:
        specs = [self.stored.spec(*key) for key in (live.key, other)]
        if specs[0] != specs[1] or specs[0] is None:
            self.mismatched.append(
                f"{'/'.join(other)}: the same tensor as {live.path} in the live state, but stored as {specs[1]}, "
                f"not {specs[0]}"
            )
        else:
            self.ties.append(TiedPair.of(live, other, specs[0][0]))

    def _take_aliases(self, group: str, aliases: dict[str, str]) -> None:
        for alias, canonical in aliases.items():
            self.claimed.add((group, alias))
            source, other = self.stored.canonical(group, canonical), self.stored.canonical(group, alias)
            if other is None and source is None:  # it is tied to a tensor that was found, and has its bytes
                self.missing.append(f"{group}/{alias}")
            elif other is not None and source is not None and source != other:
                self.claimed.add((group, other))
                live = self._taken.get((group, source))
                if live is not None:
                    self._tie(live, (group, other))

    def unexpected(self) -> list[str]:
        """Stored names of the compared groups that no live entry wants, except tensors of other ranks' processes."""
        offered = [
            (group, name)
            for names in (self.stored.specs, self.stored.aliases, self.stored.values)
            for group, entries in names.items()
            for name in entries
        ]
        return [
            f"{group}/{name}"
            for group, name in dict.fromkeys(offered)
            if (group, name) not in self.claimed and not name.startswith(RANK_PREFIX) and self.selection.takes(group, name)
        ]


def match_leaves(plans: Sequence[PartPlan], stored: OfferedLeaves, selection: Selection, strict: bool) -> MatchedLeaves:
    """Compare the plans of all parts with the checkpoint; `StateMismatch` names every mismatch."""
    comparison = _Comparison(stored, selection)
    for plan in plans:
        comparison.take(plan)
    unexpected = comparison.unexpected()
    # What another program kept besides the training goes by that program's keys. It stays in the checkpoint.
    theirs = [name for name in unexpected if stored.imported and name.startswith(_BESIDE)]
    again = _again(plans, comparison, unexpected) if stored.imported else []
    _refuse(comparison, [name for name in unexpected if name not in theirs and name not in again], strict)
    if again and strict:
        text = _listed("names of tied weights are not used", again)
        comparison.notes.append(LeftOutNote(text))
    if theirs and strict:
        text = _listed("values that another program stored are not used", theirs)
        comparison.notes.append(LeftOutNote(text))
    if not strict:
        comparison.notes += _excused(comparison, unexpected)
    idle = sorted(group for group in {*stored.specs, *stored.values} - selection.groups if stored.specs.get(group))
    if idle:
        meant = f"groups={_taken(selection)} shows that this is intended"
        text = f"groups in the checkpoint that are not restored: {', '.join(idle)} ({meant})"
        comparison.notes.append(text if selection.chosen else LeftOutNote(text))
    casts = tuple(comparison.casts)
    filling = (partial(casting.fill, casts),) if casts else ()
    actions = (*filling, *(action for plan in plans for action in plan.actions))
    return MatchedLeaves(
        tuple(comparison.leaves.values()),
        comparison.missing,
        unexpected,
        [*comparison.notes, *casting.notes(casts)],
        actions,
        comparison.late,
        casts,
        tuple(lacking for plan in plans for lacking in plan.lacking),
        ties=tuple(comparison.ties),
        strict=strict,
    )


def _again(plans: Sequence[PartPlan], comparison: _Comparison, unexpected: Sequence[str]) -> list[str]:
    """Names that an import lists for each of several tied weights, such as masters and optimizer state, where this
    state has one.
    """
    ties = {alias: name for plan in plans for alias, name in plan.aliases.get(_WEIGHTS, {}).items()}
    paths = []
    for path in unexpected:
        group, _, name = path.partition("/")
        alias = next((alias for alias in ties if name == alias or name.startswith(f"{alias}/")), None)
        if alias is not None and group != _WEIGHTS and (group, ties[alias] + name[len(alias) :]) in comparison.claimed:
            paths.append(path)
    return paths


def _excused(comparison: _Comparison, unexpected: Sequence[str]) -> list[str]:
    texts = (
        *(f"{text}: those of the first are used" for text in comparison.conflicts),
        _listed("names of the state are not in the checkpoint: their values are unchanged", comparison.missing),
        _listed("names of the checkpoint are not in the state: they are not used", unexpected),
    )
    return [LeftOutNote(text) for text in texts if text]


def _taken(selection: Selection) -> tuple[str, ...]:
    return tuple(sorted(selection.groups))


def _refuse(comparison: _Comparison, unexpected: list[str], strict: bool) -> None:
    missing, mismatched = comparison.missing, comparison.mismatched
    if not mismatched and not (strict and (missing or unexpected or comparison.conflicts)):
        return
    parts = [_listed("do not fit", mismatched)]
    if strict:
        parts += [_listed("are missing from the checkpoint", missing), _listed("are not in the live state", unexpected)]
        parts += comparison.conflicts
    raise StateMismatch(
        "the checkpoint does not fit the live state: " + "; ".join(part for part in parts if part),
        hint="build the state as it was saved, choose groups=, exclude names with exclude=, or pass strict=False (it "
        "excuses missing and unexpected names only)"
        + (
            f"; cast=True rounds floats of another dtype, which {comparison.castable} of these are"
            * bool(comparison.castable)
        )
        + f"; keep=({', '.join(map(repr, dict.fromkeys(comparison.keepable)))},) keeps the values of the live groups"
        * bool(comparison.keepable),
        mismatched=mismatched,
        missing=missing,
        unexpected=unexpected,
    )


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"{len(names)} {what} ({_short(names)})"


def _short(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED_MAX]) + ", …" * (len(names) > LISTED_MAX)

"""Leaves names out of a save, but never trained tensors, or parts of something that is only useful as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.left_out import LeftOutNote
from holdfast.state import extras, rng, state_tensors
from holdfast.state.modules import EMA, MODEL, NamedTensors, inner_names, is_trained
from holdfast.tensors.json_values import referred
from holdfast.tensors.leaves import Key, Leaf, covers, is_ignored
from holdfast_formats.errors import InvalidRequest

LISTED_MAX = 20

Texts = Mapping[str, Mapping[str, str]]


class OwnPatterns(tuple[str, ...]):
    """Patterns of an adapter, which leaves these names out on purpose: no note says so."""


def check(patterns: object, option: str) -> tuple[str, ...]:
    """The patterns of this option; `InvalidRequest` for anything but a sequence of texts."""
    if isinstance(patterns, OwnPatterns):
        return patterns
    if isinstance(patterns, str):
        raise InvalidRequest(
            f"{option} must be a sequence of patterns, not the text {patterns!r}", hint=f"{option}=({patterns!r},)"
        )
    checked = tuple(patterns) if isinstance(patterns, Iterable) else (patterns,)
    strange = [pattern for pattern in checked if not isinstance(pattern, str)]
    if strange:
        raise InvalidRequest(
            f"{option} must be a sequence of patterns over group/name, and has {strange[0]!r}",
            hint="write each pattern as text: exclude=('model/head.*',)",
        )
    return checked


def trained(named: Sequence[NamedTensors], stepped: Iterable[str]) -> dict[Key, str]:
    """Trained names by group and name, with the reason. `stepped` are the optimizers' names of parameters."""
    why: dict[Key, str] = {}
    keys: dict[str, Key] = {}
    for part in named:
        prefix = "" if part.group == MODEL else f"{part.group}."
        for name, value in part.state.tensors.items():
            key = part.group, part.prefix + name
            keys[prefix + name] = key
            if is_trained(value):
                why[key] = "it is trained (requires_grad)"
    for name in stepped:
        if name in keys:
            why[keys[name]] = "an optimizer of the state steps it"
    for part in named:
        if part.group == EMA:
            for name in part.state.tensors:
                weight = next((inner for inner in inner_names(name) if (MODEL, inner) in why), None)
                if weight is not None:
                    why[EMA, part.prefix + name] = f"{MODEL}/{weight} is trained"
    return why


def keep_trained(named: Sequence[NamedTensors], stepped: Iterable[str]) -> list[NamedTensors]:
    """The parts, where no trained tensor, and no average of one, is left out on its module's wish."""
    if not any(part.state.unsaved for part in named):
        return list(named)
    why = trained(named, stepped)
    return [
        part._replace(
            state=part.state._replace(
                unsaved=frozenset(name for name in part.state.unsaved if (part.group, part.prefix + name) not in why)
            )
        )
        for part in named
    ]


class Exclusion:
    """The names that patterns leave out of one snapshot, checked.

    Raises `InvalidRequest` for trained tensors, optimizer state, a part of an entry or of tied tensors, and a whole group.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        leaves: Sequence[Leaf],
        values: Texts,
        aliases: Texts,
        why: Mapping[Key, str],
    ) -> None:
        self._patterns = patterns
        for group in {leaf.group for leaf in leaves}:
            if is_ignored(group, patterns):
                raise InvalidRequest(
                    f"exclude= leaves out the whole group {group}", hint="select the groups to save with groups= instead"
                )
        self.texts = {(group, key) for group, kept in values.items() for key in kept if self._matches((group, key))}
        held = {leaf.key for leaf in leaves}
        self.leaves = {key for key in held if self._matches(key)}
        for key in sorted((*self.leaves, *self.texts)):
            self._refuse_trained(key, why)
        self._whole_entries(values, held)
        self._whole_ties(aliases)

    @property
    def names(self) -> list[str]:
        return sorted({f"{group}/{name}" for group, name in (*self.leaves, *self.texts)})

    def notes(self) -> tuple[str, ...]:
        """Notes on what is left out, and on patterns that match nothing."""
        names, gone = self.names, (*self.leaves, *self.texts)
        idle = [pattern for pattern in self._patterns if not any(covers(pattern, *key) for key in gone)]
        more = ", …" if len(names) > LISTED_MAX else ""
        left = LeftOutNote(f"left out by exclude=, so not in the checkpoint: {', '.join(names[:LISTED_MAX])}{more}")
        missed = f"exclude= matches no name of the state: {', '.join(idle)}"
        return tuple([left] * bool(names) + [missed] * bool(idle))

    def _matches(self, key: Key) -> bool:
        return any(covers(pattern, *key) for pattern in self._patterns)

    def _refuse_trained(self, key: Key, why: Mapping[Key, str]) -> None:
        group, name = key
        reason = why.get(key)
        if group in (state_tensors.GROUP, state_tensors.MASTER_GROUP):
            reason = "the optimizer could not continue without it"
        if reason is not None:
            raise InvalidRequest(
                f"exclude= leaves out {group}/{name}, and {reason}: its trained values would be lost",
                hint="freeze it with requires_grad_(False), leave whole groups out with groups=, or store a part of a model "
                "under its own key with Named(…, only=…)",
            )

    def _whole_entries(self, values: Texts, held: set[Key]) -> None:
        """Add everything that an excluded entry refers to. Refuse a part of one: it could not be restored."""
        streams = {key for key in held if key[0] == rng.GROUP and rng.is_stream(key[1])}
        for group, kept in values.items():
            for key, text in kept.items():
                inside = {(group, name) for name in referred(text)}
                if group == rng.GROUP and key == rng.KEY:
                    inside = streams
                if (group, key) in self.texts:
                    self.leaves |= inside & held
                elif inside & self.leaves:
                    part = min(inside & self.leaves)
                    raise InvalidRequest(
                        f"exclude= leaves out {'/'.join(part)}, which is a part of {group}/{key} and cannot be "
                        "excluded alone",
                        hint=f"exclude all of {group}/{key}, or no part of it",
                    )

    def _whole_ties(self, aliases: Texts) -> None:
        for group, tied in aliases.items():
            for alias, canonical in tied.items():
                named, other = self._matches((group, canonical)), self._matches((group, alias))
                if named != other:
                    out, kept = (canonical, alias) if named else (alias, canonical)
                    raise InvalidRequest(
                        f"exclude= leaves out {group}/{out}, and {group}/{kept} is the same tensor",
                        hint="exclude both names, or none",
                    )


def is_extra_alone(exclusion: Exclusion) -> bool:
    """Whether only entries of the group `extra` are left out."""
    return all(group == extras.GROUP for group, _ in exclusion.leaves)

"""The parameters of a Paddle optimizer, divided into those that it steps alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from holdfast.integrations.paddle.fleet.sharding import OptimizerSharding, Stepped, SteppedGroup
from holdfast.integrations.paddle.watch import stopped

Decay = tuple[float, float]  # of L2 and of L1
Likeness = tuple[float, bool, Decay | None]


class ParameterPart(NamedTuple):
    """Parameters of the user's group of this number that are stepped alike; on every rank those with the same `key`.

    `given` is Paddle's own group, None if it has one list. `multiple` is that of the learning rate, and `own` the decay that
    the parameters have of their own by `ParamAttr(regularizer=…)`.
    """

    number: int
    given: dict[str, Any] | None
    members: list[Stepped]
    multiple: float
    decays: bool
    own: Decay | None

    @property
    def key(self) -> str:
        return json.dumps([self.number, self.multiple, self.decays, self.own])


class _Seen(NamedTuple):
    """What parameters of one group may differ in, in their order, and whether they are taken."""

    taken: list[bool]
    multiples: list[float]
    decays: list[bool]
    own: list[Decay | None]


class ParameterParts:
    """An optimizer's groups, divided further by what single parameters and functions such as `apply_decay_param_fun` and
    `lr_ratio` say: the identical list as long as nothing of that changes.
    """

    def __init__(self, sharding: OptimizerSharding, has_state: Callable[[Stepped], bool]) -> None:
        """Frozen parameters without state are left out."""
        self._sharding, self._has_state = sharding, has_state
        self._groups: list[SteppedGroup] = []  # what `_parts` was made of
        self._seen: list[_Seen] = []
        self._others: list[str] = []
        self._parts: list[ParameterPart] = []

    def now(self, others: list[str]) -> list[ParameterPart]:
        """`others` are keys of parts of other ranks, which this one may have no parameter of."""
        groups = self._sharding.groups()
        seen = [self._look(group.members) for group in groups]
        if groups is not self._groups or seen != self._seen or others != self._others:
            self._parts = [
                part for number, group in enumerate(groups) for part in _parts(number, group, seen[number], others)
            ]
            self._groups, self._seen, self._others = groups, seen, others
        return self._parts

    def _look(self, members: Sequence[Stepped]) -> _Seen:
        parameters = [one.kept for one in members]
        ratio = getattr(self._sharding.inner, "_lr_ratio", None)
        decays = getattr(self._sharding.inner, "_apply_decay_param_fun", None)
        multiples = [1.0 if (held := one.optimize_attr) is None else held.get("learning_rate", 1.0) for one in parameters]
        if ratio is not None:
            multiples = [float(one) * float(ratio(parameter)) for one, parameter in zip(multiples, parameters, strict=True)]
        frozen = stopped([one.parameter for one in members])
        return _Seen(
            [not still or self._has_state(one) for still, one in zip(frozen, members, strict=True)],
            [float(one) for one in multiples],
            [decays is None or bool(decays(one.name)) for one in parameters],
            [None if (own := one.regularizer) is None else _decay_of(own) for one in parameters],
        )


def l1_of(decay: Any) -> float:
    """The coefficient of an L1 decay; 0 of anything else."""
    from paddle.regularizer import L1Decay

    return float(decay._coeff) if isinstance(decay, L1Decay) else 0.0


def _decay_of(own: Any) -> Decay:
    from paddle.regularizer import L2Decay

    return float(own._coeff) if isinstance(own, L2Decay) else 0.0, l1_of(own)


def _parts(number: int, group: SteppedGroup, seen: _Seen, others: Sequence[str]) -> Iterator[ParameterPart]:
    found: dict[Likeness, list[Stepped]] = {}
    alike = zip(seen.multiples, seen.decays, seen.own, strict=True)
    for taken, member, likeness in zip(seen.taken, group.members, alike, strict=True):
        if taken:
            found.setdefault(likeness, []).append(member)
    for other, multiple, decays, own in map(json.loads, others):
        if other == number:
            found.setdefault((multiple, decays, own and tuple(own)), [])
    for likeness, members in found.items():
        yield ParameterPart(number, group.given, members, *likeness)

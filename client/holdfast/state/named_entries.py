"""Leaves and values under an adapter's names, as an entry of the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.tensors.fragments import Storable
from holdfast.tensors.leaves import Content, Key, OfferedLeaves, PartPlan, Selection
from holdfast_formats.errors import InvalidRequest


class NamedEntry(dict[str, Any]):
    """Tensors that an adapter saves as they are now. Live objects may share their memory, because the adapter restores them
    by itself.
    """


class NamedSnapshot:
    """The contents of one save of an adapter. With such an entry no random streams are stored, which may be of another
    moment.

    `groups` are all that any rank stores in. `tensors` and `values`, which are JSON texts, are by group and name. To save
    again, put a new one into the state.
    """

    def __init__(self, groups: frozenset[str], tensors: Mapping[Key, Storable], values: Mapping[Key, str]) -> None:
        foreign = sorted({group for group, _ in (*tensors, *values)} - groups)
        if foreign:
            raise InvalidRequest(
                f"the groups {', '.join(foreign)} are not among those of the save: {sorted(groups)}",
                hint="add them to groups",
            )
        self.groups, self._tensors, self._values = groups, tensors, values

    def collect(self, content: Content) -> None:
        for (group, name), value in self._tensors.items():
            content.add(group, name, value)
        for (group, key), text in self._values.items():
            content.add_value(group, key, text)

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan:
        """Refuse: an adapter restores its own contents."""
        raise InvalidRequest("this state is only saved by a Checkpointer", hint="load it with the adapter that saved it")

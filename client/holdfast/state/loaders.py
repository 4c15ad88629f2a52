"""Data loaders of a state: their own random generators, and the order of their restoration.

A loader with a generator of its own draws from it when its iterator is made, as torchdata's StatefulDataLoader does. So
restored iterators are made first, and all generators are set after that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from holdfast.left_out import LeftOutNote
from holdfast.state.extras import GROUP, Stateful
from holdfast.state.streams import HeldGenerator
from holdfast.tensors.leaves import Content, OfferedLeaves, PartPlan, Selection

_SAMPLERS = ("sampler", "batch_sampler.sampler")
_STATELESS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)  # those of torch; torchdata has others


class LoaderGenerator(NamedTuple):
    """A loader's generator that is no entry of the state: saved with the loader automatically, for each rank."""

    key: str
    stream: Stateful

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP})

    def collect(self, content: Content) -> None:
        self.stream.collect(content)

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan:
        """Want the generator's state. A checkpoint with the loader but without its generator is noted."""
        if stored.value(GROUP, self.stream.key) is not None or not selection.takes(GROUP, self.key):
            return self.stream.plan(stored, selection)
        note = LeftOutNote(f"the checkpoint has no state of the generator of {GROUP}/{self.key}: it keeps its own")
        return PartPlan(notes=[note] if stored.value(GROUP, self.key) is not None else [])


class LoaderIterators(NamedTuple):
    """Loaders by key. Before any generator is set, restored loaders are asked for their state: if they make their iterator
    for that, they draw from generators, as the interrupted training had.
    """

    loaders: Mapping[str, Any]

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP})

    def collect(self, content: Content) -> None:
        """The loaders are entries of their own."""

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan:
        return PartPlan(actions=[loader.state_dict for key, loader in self.loaders.items() if selection.takes(GROUP, key)])


def is_loader(target: Any) -> bool:
    return hasattr(type(target), "__iter__")


def own_generator(key: str, loader: Any, state: Mapping[str, Any], rank: int) -> LoaderGenerator | None:
    """A loader's generator, unless it is an entry of the state itself."""
    generator = _attribute(loader, "generator")
    if not isinstance(generator, torch.Generator) or any(value is generator for value in state.values()):
        return None
    name = f"{key}/generator"
    return LoaderGenerator(key, Stateful(name, HeldGenerator(name, generator), rank))


def note_of(key: str, loader: Any) -> LeftOutNote | None:
    """A note on the order that a loader's torch sampler draws for an epoch, which is not saved."""
    samplers = (_attribute(loader, path) for path in _SAMPLERS)
    sampler = next((one for one in samplers if isinstance(one, _STATELESS)), None)
    if sampler is None or callable(_attribute(sampler, "state_dict")):
        return None
    return LeftOutNote(
        f"{GROUP}/{key} shuffles by a {type(sampler).__name__} of torch, which has no state: after a restore, the "
        "rest of an interrupted epoch has other rows. Save between epochs, or give torchdata's StatefulDataLoader "
        "shuffle=True instead of this sampler"
    )


def _attribute(value: Any, path: str) -> Any:
    for name in path.split("."):
        try:
            value = getattr(value, name, None)
        except Exception:  # a property of another class may raise anything
            return None
    return value

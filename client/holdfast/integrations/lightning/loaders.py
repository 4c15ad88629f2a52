"""The data loaders of a Trainer: which of them keep a position, and how to leave out what was trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.integrations.lightning import framework


class LeavingOut:
    """In the place of a loader's sampler while one iterator is made: leaves out so many batches, and reads no rows."""

    def __init__(self, loader: Any) -> None:
        """torch refuses to set a sampler, hence `vars`. `batches` is set when the iterator is made that leaves them out."""
        self._loader, self.batches = loader, 0
        self._name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        self._inner = vars(loader)[self._name]
        self._made: _Indices | None = None
        vars(loader)[self._name] = self

    def __iter__(self) -> Iterator[Any]:
        self._made = _Indices(iter(self._inner), self)
        return self._made

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def take(self) -> int:
        """How many batches are still to be left out; none when asked again.

        Counted when the first is asked for: with workers, torch makes two iterators of the sampler, and uses the second.
        """
        batches, self.batches = self.batches, 0
        return batches

    def end(self) -> int:
        """Leave out now what is not left out yet, and give the loader its sampler back.

        Returns how many batches are left: none, unless the loader has not asked its sampler for an iterator.
        """
        if self._made is not None:
            self._made.leave_out()
        vars(self._loader)[self._name] = self._inner
        return self.batches


class _Indices(Iterator[Any]):
    def __init__(self, inner: Iterator[Any], owner: LeavingOut) -> None:
        self._inner, self._owner = inner, owner

    def __next__(self) -> Any:
        self.leave_out()
        return next(self._inner)

    def leave_out(self) -> None:
        for _ in range(self._owner.take()):
            next(self._inner, None)


def is_stateful(loader: object) -> bool:
    """Whether a loader keeps its own position."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def has_indices(loader: object) -> bool:
    """Whether rows can be left out without reading them."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and not is_stateful(loader)


def is_warm(loader: Any) -> bool:
    """Whether persistent workers are there, so that no seed is drawn for an epoch's."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is not None


def distributed_over(loader: Any) -> Any | None:
    """What Lightning's distributed sampler goes over, where the loader had a sampler that is not torch's own."""
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        over = getattr(sampler, "dataset", None)
        if hasattr(over, "_sampler") and hasattr(over, "reset"):
            return over
    return None


class SameOrder:
    """While iterators are made: a sampler with a generator of its own gives the same order each time that it is asked.

    A StatefulDataLoader asks several times when it takes up a position, and each time would be another epoch's order.
    """

    def __init__(self, over: Any) -> None:
        self._over, self._inner = over, over._sampler
        self._state = self._inner.generator.get_state()
        over._sampler = self

    def __iter__(self) -> Iterator[Any]:
        self._inner.generator.set_state(self._state)
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)

    def end(self) -> None:
        """Let the sampler go on from order to order."""
        self._over._sampler = self._inner

    @property
    def generator(self) -> torch.Generator:
        found: torch.Generator = self._inner.generator
        return found


def has_cycled(combined: Any, batches: int) -> bool:
    """Whether after so many batches a loader has begun again, because others are longer."""
    sizes = [framework.fabric("utilities.data").sized_len(loader) for loader in combined.flattened]
    shortest = min((size for size in sizes if size is not None), default=None)
    return len(sizes) > 1 and combined._mode == "max_size_cycle" and shortest is not None and batches > shortest


def generators(combined: Any) -> list[torch.Generator]:
    """The generators that loaders and samplers draw from, besides the process's own; `combined` is None before the first."""
    found: list[torch.Generator] = []
    for loader in combined.flattened if combined is not None else ():
        batches = getattr(loader, "batch_sampler", None)
        hidden = getattr(distributed_over(loader), "_sampler", None)
        for place in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None), hidden):
            generator = getattr(place, "generator", None)
            if isinstance(generator, torch.Generator) and all(generator is not one for one in found):
                found.append(generator)
    return found

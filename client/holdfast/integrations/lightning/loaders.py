"""A Trainer's data loaders: which of them keep a position, and how to skip trained batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.integrations.lightning import framework


class LeavingOut:
    """Replaces a loader's sampler for one iterator: skips so many batches without reading rows."""

    def __init__(self, loader: Any) -> None:
        """torch refuses to set a sampler, hence `vars`. `batches` is set with the iterator that skips them."""
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
        """The number of batches still to skip, once; then 0.

        Called with the first batch: with workers, torch makes two iterators of the sampler, and uses the second.
        """
        batches, self.batches = self.batches, 0
        return batches

    def end(self) -> int:
        """Skip the remaining batches now, and restore the loader's sampler.

        Returns how many are left: 0, unless the loader has not requested an iterator of its sampler.
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
    """Whether rows can be skipped without reading them."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and not is_stateful(loader)


def is_warm(loader: Any) -> bool:
    """Whether persistent workers exist, so that an epoch draws no seed for them."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is not None


def distributed_over(loader: Any) -> Any | None:
    """The sampler inside Lightning's distributed sampler, if it is not one of torch's own."""
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        over = getattr(sampler, "dataset", None)
        if hasattr(over, "_sampler") and hasattr(over, "reset"):
            return over
    return None


class SameOrder:
    """While iterators are made, a sampler with its own generator repeats the same order.

    A StatefulDataLoader makes several iterators to restore a position, each of which would draw another epoch's order.
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
        self._over._sampler = self._inner

    @property
    def generator(self) -> torch.Generator:
        inner_generator: torch.Generator = self._inner.generator
        return inner_generator


def has_cycled(combined: Any, batches: int) -> bool:
    """Whether a loader has restarted after so many batches, because others are longer."""
    sizes = [framework.fabric("utilities.data").sized_len(loader) for loader in combined.flattened]
    shortest = min((size for size in sizes if size is not None), default=None)
    return len(sizes) > 1 and combined._mode == "max_size_cycle" and shortest is not None and batches > shortest


def generators(combined: Any) -> list[torch.Generator]:
    """Generators of loaders and samplers, besides the process's own; `combined` is None before the first epoch."""
    found: list[torch.Generator] = []
    for loader in combined.flattened if combined is not None else ():
        batches = getattr(loader, "batch_sampler", None)
        hidden = getattr(distributed_over(loader), "_sampler", None)
        for place in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None), hidden):
            generator = getattr(place, "generator", None)
            if isinstance(generator, torch.Generator) and all(generator is not one for one in found):
                found.append(generator)
    return found

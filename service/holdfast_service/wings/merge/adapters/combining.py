"""Adapters combined into one, as PEFT's `add_weighted_adapter` combines them: its `linear`, `cat`, `svd`, `ties`,
`dare_linear`, `dare_ties` and `magnitude_prune`.

A module's A and B are small, and are computed whole. Arithmetic is F32 in PEFT's order, but for `svd`, which is exact in
float64: a product of rank r has r singular values, so matrices of rank × rank are factorised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import InvalidRequest, LimitExceeded, StateMismatch
from holdfast_formats.mapping.listing import FetchBox, ForeignTensor
from holdfast_formats.region import Box, whole
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.merge.adapters import config, tensors
from holdfast_service.wings.merge.adapters.applying import AdapterParts
from holdfast_service.wings.merge.adapters.config import AdapterConfig
from holdfast_service.wings.merge.adapters.tensors import LoraPair
from holdfast_service.wings.merge.draws import Draws

Floats = NDArray[np.float32]
MODULE_BYTES_MAX = 2**29  # of all adapters' A and B of one module, in F32
_SAME_RANKS = ("linear", "ties", "dare_linear", "dare_ties", "magnitude_prune")
_ELECTING, _DRAWING = ("ties", "dare_ties"), ("dare_linear", "dare_ties")
_CHOICE = ("layers_to_transform", "layers_pattern", "exclude_modules")  # which of the target_modules have a product
_ALONE = "merge each adapter into its base by itself, as MODEL+ADAPTER"


class Combination(NamedTuple):
    """How adapters are combined: PEFT's `combination_type` and its words. `rank`: that of `svd`, 0 for the largest."""

    method: str
    density: float = 1.0
    majority: str = "total"
    rank: int = 0
    seed: int = 0


class WeightedPair(NamedTuple):
    """An adapter's pair of a module, its weight in the combination, and the scale of its product."""

    pair: LoraPair
    weight: float
    scale: float
    number: int  # of the adapter in the recipe, which its draws depend on


class CombinedAdapter(NamedTuple):
    """The tensors of a combination by PEFT's names, and its configuration."""

    tensors: Mapping[str, ForeignTensor]
    config: bytes


class ReadAdapter(NamedTuple):
    """An adapter that is combined: only products."""

    name: str
    terms: AdapterConfig
    document: Mapping[str, Any]
    pairs: Mapping[str, LoraPair]

    @property
    def rank(self) -> int:
        return max(self.terms.rank, *(int(one.value) for one in self.terms.ranks), 1)


def read(adapters: Sequence[AdapterParts]) -> list[ReadAdapter]:
    """The adapters that a combination is made of. `StateMismatch` for one that is more than products of modules."""
    found = []
    for one in adapters:
        terms, parts = config.read(one.config, one.name), tensors.sort(one.tensors, one.name)
        beside = [*parts.replaced, *parts.tokens, *(key for key, pair in parts.pairs.items() if pair.bias is not None)]
        for what, name in (
            ("use_dora", terms.dora and "its magnitudes"),
            ("target_parameters", ", ".join(terms.parameters)),
            ("tensors that are no products", beside[0] if beside else ""),
        ):
            if name:
                raise StateMismatch(
                    f"{one.name} cannot be combined with other adapters: it has {what}: {name}",
                    hint=_ALONE,
                    file=config.NAME,
                )
        for module, pair in parts.pairs.items():
            rank = terms.terms(module).rank
            if pair.low.spec.shape[:1] != (rank,) or pair.high.spec.shape[1:2] != (rank,):
                what = f"its {config.NAME} has rank {rank} for {module!r}, but {pair.low.spec.name!r} has another"
                config.refuse(one.name, what, pair.low.spec.name)
        found.append(ReadAdapter(one.name, terms, json.loads(one.config), parts.pairs))
    return found


def combined(adapters: Sequence[ReadAdapter], how: Combination, weights: Mapping[str, Sequence[float]]) -> CombinedAdapter:
    """Combine adapters; `weights` are by module, in their order.

    Raises `StateMismatch` for adapters of different modules' sizes or ranks, `LimitExceeded` for ones that are too large.
    """
    if how.method in _DRAWING and not how.density:
        raise InvalidRequest(f"{how.method} with density 0 would divide by it", hint="give a density above 0, at most 1")
    if len(adapters) == 1:
        how = how._replace(method="linear")  # as in PEFT
    rank = _rank(adapters, how)
    made: dict[str, ForeignTensor] = {}
    for module in dict.fromkeys(module for one in adapters for module in one.pairs):
        shares = [
            WeightedPair(one.pairs[module], weight, one.terms.terms(module).scale, number)
            for number, (one, weight) in enumerate(zip(adapters, weights[module], strict=True))
            if module in one.pairs
        ]
        for part in _combined(module, shares, how, rank):
            made[part.spec.name] = part
    return CombinedAdapter(made, _config(adapters, rank))


def _rank(adapters: Sequence[ReadAdapter], how: Combination) -> int:
    ranks = [one.rank for one in adapters]
    if how.method in _SAME_RANKS:
        for one in adapters:
            uneven = next((pair for pair in one.pairs.values() if pair.low.spec.shape[0] != ranks[0]), None)
            if one.rank != ranks[0] or uneven is not None:
                raise StateMismatch(
                    f"{how.method} combines adapters of one rank; {adapters[0].name} has {ranks[0]}, and {one.name} "
                    f"{one.rank if uneven is None else uneven.low.spec.shape[0]}",
                    hint="use merge_method: cat or svd",
                    file=config.NAME,
                )
    return sum(ranks) if how.method == "cat" else (how.rank or max(ranks)) if how.method == "svd" else ranks[0]


def _combined(
    module: str, shares: Sequence[WeightedPair], how: Combination, rank: int
) -> tuple[ForeignTensor, ForeignTensor]:
    first = shares[0].pair
    low, high = (rank, *first.low.spec.shape[1:]), (first.high.spec.shape[0], rank, *first.high.spec.shape[2:])
    for share in shares:
        one, other = share.pair.low.spec, share.pair.high.spec
        if one.shape[1:] != low[1:] or (other.shape[0], *other.shape[2:]) != (high[0], *high[2:]):
            raise StateMismatch(
                f"{one.name!r} has shape {list(one.shape)} in one adapter, and {list(first.low.spec.shape)} in another",
                hint="combine adapters of one model",
                tensor=one.name,
            )
    if 4 * sum(prod(share.pair.low.spec.shape) + prod(share.pair.high.spec.shape) for share in shares) > MODULE_BYTES_MAX:
        raise LimitExceeded(f"the adapters of {module!r} have over {MODULE_BYTES_MAX} bytes together", hint=_ALONE)
    both = _Module(tuple(shares), how, rank)
    return _tensor(first.low, low, CombinedHalf(both, 0)), _tensor(first.high, high, CombinedHalf(both, 1))


def _tensor(like: ForeignTensor, shape: tuple[int, ...], decoder: CombinedHalf) -> ForeignTensor:
    return ForeignTensor(TensorSpec(like.spec.group, like.spec.name, "F32", shape), (), decoder=decoder)


class _Module:
    """A module's A and B, computed together when the first of them is written, and kept until both are."""

    def __init__(self, shares: tuple[WeightedPair, ...], how: Combination, rank: int) -> None:
        self.shares, self.how, self.rank = shares, how, rank
        self._made: list[Floats | None] = []

    def half(self, number: int, fetch: FetchBox) -> Floats:
        if not self._made or self._made[number] is None:
            self._made = [*self._compute(fetch)]
        found = self._made[number]
        assert found is not None
        return found

    def forget(self, number: int) -> None:
        if self._made:
            self._made[number] = None

    def _compute(self, fetch: FetchBox) -> tuple[Floats, Floats]:
        lows = [self._fetched(share.pair.low, share.number, fetch) for share in self.shares]
        highs = [self._fetched(share.pair.high, share.number, fetch) for share in self.shares]
        if self.how.method == "cat":
            scaled = [
                low * np.float32(share.weight) * np.float32(share.scale)
                for low, share in zip(lows, self.shares, strict=True)
            ]
            return _padded(np.concatenate(scaled), self.rank, 0), _padded(np.concatenate(highs, axis=1), self.rank, 1)
        factors = [share.weight * share.scale for share in self.shares]
        if self.how.method == "svd":
            return _factorised(lows, highs, factors, self.rank)
        roots = np.asarray([sqrt(abs(factor)) for factor in factors], np.float32)
        signs = np.asarray([1 if factor >= 0 else -1 for factor in factors], np.float32)
        return _mixed(lows, roots * signs, self.how), _mixed(highs, roots, self.how)

    def _fetched(self, stored: ForeignTensor, number: int, fetch: FetchBox) -> Floats:
        """An adapter's matrix, pruned as the method says."""
        values, how = fetch(stored, whole(stored.spec.shape)).astype(np.float32), self.how
        if how.density >= 1:
            return values
        if how.method not in _DRAWING:
            return _pruned(values, how.density)
        drawn = Draws(how.seed, number, stored.spec.name).below(how.density, 0, values.size).reshape(values.shape)
        return values * drawn / np.float32(how.density)


def _padded(values: Floats, rank: int, axis: int) -> Floats:
    after = [(0, rank - size if place == axis else 0) for place, size in enumerate(values.shape)]
    return np.pad(values, after)


def _mixed(parts: Sequence[Floats], weights: Floats, how: Combination) -> Floats:
    if how.method not in _ELECTING:
        return _sum([part * weight for part, weight in zip(parts, weights, strict=True)])
    votes = _sum(parts) if how.majority == "total" else _sum([np.sign(part) for part in parts])
    elected = np.where(votes >= 0, np.float32(1), np.float32(-1))
    masks = [np.sign(part) == elected for part in parts]
    total = _sum([part * weight * mask for part, weight, mask in zip(parts, weights, masks, strict=True)])
    count = np.maximum(np.sum(masks, axis=0), 1).astype(np.float32)
    divided: Floats = total / count
    return divided


def _sum(parts: Sequence[Floats]) -> Floats:
    made = parts[0].copy()
    for part in parts[1:]:
        made += part
    return made


def _pruned(values: Floats, density: float) -> Floats:
    """The largest elements; of equal ones the first."""
    flat, kept = values.ravel(), np.zeros(values.size, np.bool_)
    kept[np.argsort(-np.abs(flat), kind="stable")[: int(density * flat.size)]] = True
    pruned: Floats = np.where(kept, flat, np.float32(0)).reshape(values.shape)
    return pruned


def _factorised(
    lows: Sequence[Floats], highs: Sequence[Floats], factors: Sequence[float], rank: int
) -> tuple[Floats, Floats]:
    """The best product of a rank for the sum of products: U·S and V. Of each column the largest element is positive."""
    low_shape, high_shape = lows[0].shape[1:], highs[0].shape
    wide = np.concatenate([low.reshape(low.shape[0], -1).astype(np.float64) for low in lows])
    tall = np.concatenate(
        [high.reshape(high_shape[0], -1).astype(np.float64) * factor for high, factor in zip(highs, factors, strict=True)],
        axis=1,
    )
    left, upper = np.linalg.qr(tall)
    right, lower = np.linalg.qr(wide.T)
    u, values, v = np.linalg.svd(upper @ lower.T)
    columns, rows = (left @ u)[:, :rank] * values[:rank], (v @ right.T)[:rank]
    turned = np.sign(columns[np.abs(columns).argmax(axis=0), range(columns.shape[1])])
    turned[turned == 0] = 1
    low, high = (rows * turned[:, None]).astype(np.float32), (columns * turned).astype(np.float32)
    return (
        _padded(low, rank, 0).reshape(rank, *low_shape),
        _padded(high, rank, 1).reshape(high_shape[0], rank, *high_shape[2:]),
    )


class CombinedHalf(NamedTuple):
    """A or B of a combined module."""

    module: _Module
    number: int

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return tuple(half for share in self.module.shares for half in (share.pair.low, share.pair.high))

    @property
    def terms(self) -> object:
        weights = [(share.weight, share.scale, share.number) for share in self.module.shares]
        return tuple(self.module.how), self.module.rank, weights, self.number

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        made = self.module.half(self.number, fetch)
        if box.stop == made.shape:  # tensors are written in order: this half is done
            self.module.forget(self.number)
        return made[box.slices]


def _config(adapters: Sequence[ReadAdapter], rank: int) -> bytes:
    """The first adapter's configuration with the result's rank, a scale of one, and the modules of all."""
    targets = [one.document.get("target_modules") for one in adapters]
    if all(isinstance(one, list) for one in targets) and not any(
        one.document.get(key) for one in adapters for key in _CHOICE
    ):
        together = sorted({name for one in targets for name in one or ()})
    else:  # each chooses modules in its own way; their names choose the same
        together = sorted({module for one in adapters for module in one.pairs})
    changed = {"r": rank, "lora_alpha": rank, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    changed |= dict.fromkeys(_CHOICE)
    document = {**adapters[0].document, **changed, "target_modules": together}
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def rank_of(value: float) -> int:
    """The rank that a recipe gives; `InvalidRequest` unless it is a whole number."""
    if value != int(value) or not 0 <= value <= 2**16:
        raise InvalidRequest(f"rank {value:g} is no whole number", hint="leave it out for the largest of the adapters'")
    return int(value)

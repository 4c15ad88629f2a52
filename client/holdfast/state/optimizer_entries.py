"""Finds the optimizers of a state, with the names of the parameters that they step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from holdfast.state import optimizer_shards, optimizer_wrappers
from holdfast.state.extras import GROUP as EXTRA
from holdfast.state.hyper_parameters import FirstRates
from holdfast.state.modules import EMA, MODEL, NamedTensors, is_tensor, parameter_names, tied
from holdfast.state.named import refuse_left_out
from holdfast.state.optimizer_shards import OptimizerShards, ShardedOptimizer
from holdfast.state.optimizers import KeyedOptimizers
from holdfast.state.partitioned.owners import RestoredForAll
from holdfast.state.state_tensors import MASTER_GROUP as MASTER
from holdfast.tensors.fragments import Storable
from holdfast_formats.errors import InvalidRequest

OptimizerEntry = KeyedOptimizers | ShardedOptimizer


class KnownOfOptimizers(NamedTuple):
    """What is remembered of a state's optimizers: initial learning rates, and state that was restored for all ranks."""

    rates: FirstRates
    for_all: RestoredForAll


def optimizers_of(
    state: Mapping[str, Any], collections: Sequence[NamedTensors], divided: bool, known: KnownOfOptimizers
) -> list[OptimizerEntry]:
    """Every optimizer of a state whose other entries are `collections`; `divided`: a layout divides plain tensors among
    ranks. `known` outlasts this reading.

    Refuses a parameter with two owners or no name.
    """
    optimizer_entries: list[OptimizerEntry] = []
    owners: dict[str, str] = {}
    for key, value in state.items():
        if isinstance(value, nn.Module) or is_tensor(value) or not optimizer_wrappers.is_optimizer(value):
            continue
        optimizer: OptimizerEntry
        if isinstance(value, OptimizerShards):
            _refuse_layout(key, divided)
            optimizer = optimizer_shards.read(key, value, _by_name(collections))
        else:
            optimizer = _torch_optimizers(key, value, state, collections, known)
        for name in optimizer.parameter_names():
            if name in owners:
                raise InvalidRequest(
                    f"the parameter {name} is in two optimizers: {owners[name]} and {key}",
                    hint="give the parameter to one of them",
                )
            owners[name] = key
        optimizer_entries.append(optimizer)
    return optimizer_entries


def _torch_optimizers(
    key: str, value: Any, state: Mapping[str, Any], collections: Sequence[NamedTensors], known: KnownOfOptimizers
) -> KeyedOptimizers:
    if type(value).__name__ == "ZeroRedundancyOptimizer":
        raise InvalidRequest(
            f"{key}: ZeroRedundancyOptimizer does not expose its shards", hint="shard with fully_shard (FSDP2)"
        )
    names: dict[int, tuple[str, Storable]] = {}
    for prefix, tensors in _weights(collections):
        names = {**parameter_names(tensors, prefix), **names}
    stored = [tensor for part in collections for tensor in part.tensors()]
    innermost = optimizer_wrappers.check(key, value, state, stored).optimizers
    refuse_left_out(key, innermost, names, state)
    optimizer_state = KeyedOptimizers(key, innermost, names, known.rates, known.for_all)
    known.rates.look(optimizer_state.groups_of_parameters())
    return optimizer_state


def _weights(collections: Sequence[NamedTensors]) -> Iterator[tuple[str, Mapping[str, Storable]]]:
    """The tensors that an optimizer may step, those of the model first, each collection with the prefix of its names."""
    for part in sorted(collections, key=lambda part: (part.group != MODEL, part.group == MASTER)):
        if part.group not in (EMA, EXTRA):
            yield "" if part.group in (MODEL, MASTER) else f"{part.group}.", part.state.tensors


def _by_name(collections: Sequence[NamedTensors]) -> dict[str, Storable]:
    storables: dict[str, Storable] = {}
    for prefix, tensors in _weights(collections):
        aliases = tied(tensors)
        storables = {**{prefix + name: value for name, value in tensors.items() if name not in aliases}, **storables}
    return storables


def _refuse_layout(key: str, divided: bool) -> None:
    if divided:
        raise InvalidRequest(
            f"{key}: OptimizerShards describes its shards by the names of whole tensors, which layout= splits",
            hint='declare replicas alone, layout="dp=…", and pass the model\'s tensors as Fragments too',
        )

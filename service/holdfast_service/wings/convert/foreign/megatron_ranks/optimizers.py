"""The optimizer in Megatron's files by rank, which has numbers in place of names.

Megatron numbers the parameters of a rank group by group, each in the order of the module: one group for matrices, and one
without weight decay (`wd_mult` 0) for the rest. The distributed optimizer (`distrib_optim.pt`) has them in one flat buffer,
the last one first, each from a multiple of 64 elements on. Shapes and lengths must fit, and the first values of each master
must be those of its weight; else the optimizer is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.errors import CheckpointError, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.layout.parts import strides
from holdfast_formats.mapping import optimizer_state, reading
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_formats.region import Box
from holdfast_service.wings.convert.foreign import pickles, torch_values
from holdfast_service.wings.convert.foreign.computed import scalar
from holdfast_service.wings.convert.foreign.megatron_ranks.joining import PartName, Parts, RankFile, joined
from holdfast_service.wings.convert.foreign.pickles import PickledArray, read_torch
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray

KEY, FLAT = "optimizer", "distrib_optim.pt"
MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
WAY_ON = "import only the weights: --weights-only; or convert it with Megatron: --ckpt-convert-format torch_dist"
_MASTER, _MASTER_KEY = "master", "master_param"  # as the trainer's library calls Megatron's copies
_FLAT_KINDS = {"param": _MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_ALIGNMENT = 64  # elements from whose multiples parameters begin in a buffer
_COMPARED = 64  # first elements of a master and its weight
_STEP = "step"
_COALESCED, _LENGTH = "buckets_coalesced", "numel_unpadded"
_OWN = ("params", _STEP)  # of a group, besides hyper-parameters

Weights = Mapping[PartName, StoredArray]


class NumberedState(NamedTuple):
    """A rank's state by kind and parameter, parameters and hyper-parameters by group, and the steps by parameter."""

    kinds: Mapping[str, Mapping[PartName, StoredArray]]
    groups: Sequence[tuple[Sequence[PartName], Mapping[str, Any]]]
    steps: Mapping[PartName, float]


class RankOptimizer(NamedTuple):
    """What a rank's files hold of the optimizer: a value, and the file of the distributed optimizer, if there is one."""

    value: Any
    path: str
    flat: str | None


class WholeNames(NamedTuple):
    """The names of parameters in the whole model, by stage and name there, and for each of these the imported name."""

    names: Mapping[tuple[int, PartName], str]
    whole: Mapping[str, str]

    def of(self, place: RankFile, key: PartName) -> str:
        return self.whole[self.names[place.stage, key]]


def read(files: Files, held: RankOptimizer, weights: Weights) -> NumberedState:
    """A rank's state by name; `StateMismatch`, by the key, for what does not fit the weights."""
    reader = _Reader(files, held, weights)
    state = reader.flat() if held.flat is not None else reader.by_number()
    reader.check_masters(state.kinds[_MASTER])
    narrow = {key: one for key, one in state.kinds[_MASTER].items() if weights[key].dtype != one.dtype}
    return state._replace(kinds={**state.kinds, _MASTER: narrow})  # of F32 weights, the master is the weight


def tensors(states: Mapping[RankFile, NumberedState], naming: WholeNames) -> Iterator[ForeignTensor]:
    """Masters, moments and steps of all ranks, joined as the weights are."""
    for kind in dict.fromkeys(kind for state in states.values() for kind in state.kinds):
        parts: Parts = {place: state.kinds.get(kind, {}) for place, state in states.items()}
        group, after = (optimizer_state.MASTER_GROUP, "") if kind == _MASTER else (optimizer_state.GROUP, f"/{kind}")
        yield from joined(parts, naming.names, group, {name: f"{one}{after}" for name, one in naming.whole.items()})
    steps = {naming.of(place, key): step for place, state in states.items() for key, step in state.steps.items()}
    for name, step in steps.items():
        yield scalar(TensorKey(optimizer_state.GROUP, f"{name}/{_STEP}"), step)


def document(states: Mapping[RankFile, NumberedState], naming: WholeNames) -> dict[str, Any]:
    """The optimizer's groups, by their numbers, which are the same on all ranks."""
    first, masters = next(iter(states.values())), dict[str, None]()
    found: list[dict[str, None]] = [{} for _ in first.groups]
    for place, state in states.items():
        if len(state.groups) != len(found):
            what = f"{place.path}: the optimizer has {len(state.groups)} groups, but {len(found)} on other ranks"
            raise StateMismatch(what, hint=WAY_ON, file=place.path, tensor=KEY)
        for group, (members, _) in zip(found, state.groups, strict=True):
            group |= dict.fromkeys(naming.of(place, key) for key in members)
        masters |= dict.fromkeys(naming.of(place, key) for key in state.kinds[_MASTER])
    made = optimizer_state.document([(list(group), hyper) for group, (_, hyper) in zip(found, first.groups, strict=True)])
    made["masters"] = {_MASTER_KEY: list(masters)} if masters else {}
    return made


class _Reader:
    """Reads one rank's state."""

    def __init__(self, files: Files, held: RankOptimizer, weights: Weights) -> None:
        self._files, self._path, self._flat, self._weights = files, held.path, held.flat, weights
        inner = held.value.get(KEY) if isinstance(held.value, dict) else None
        self._value = held.value if inner is None else inner
        self._masters = next((held.value[key] for key in MASTERS if key in held.value), None) if inner is not None else None
        groups = self._value.get("param_groups") if isinstance(self._value, dict) else None
        if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
            raise self._refused("has no parameter groups, as of several optimizers")
        self._groups: list[dict[str, Any]] = groups

    def by_number(self) -> NumberedState:
        state = self._value.get("state")
        numbers: list[Any] = [group.get("params") for group in self._groups]
        if not isinstance(state, dict) or not all(isinstance(one, list) for one in numbers):
            raise self._refused("has no state by numbers")
        grouped = self._grouped([len(one) for one in numbers])
        kinds: dict[str, dict[PartName, StoredArray]] = {_MASTER: {}}
        steps: dict[PartName, float] = {}
        for members, own, group in zip(grouped, numbers, self._groups, strict=True):
            for key, number in zip(members, own, strict=True):
                held = state.get(number)
                if not isinstance(held, dict):
                    raise self._refused(f"has no state of parameter {number}, {key.name!r}")
                for kind, array in held.items():
                    if kind != _STEP:
                        kinds.setdefault(str(kind), {})[key] = self._array(key, str(kind), array)
                steps[key] = self._step(held.get(_STEP, group.get(_STEP)))
        for members, masters in zip(grouped, self._master_groups(), strict=True):
            narrow = [key for key in members if self._weights[key].dtype != "F32"]
            if len(narrow) != len(masters):
                raise self._refused(f"has {len(masters)} masters in a group with {len(narrow)} weights of 16 bits")
            kinds[_MASTER] |= {key: self._array(key, _MASTER, one) for key, one in zip(narrow, masters, strict=True)}
        return NumberedState(kinds, self._with_hyper(grouped), steps)

    def flat(self) -> NumberedState:
        """The state in the buffers of the distributed optimizer, one for each dtype of weights."""
        path = str(self._flat)
        value = read_torch(self._files, path, opaque=True)
        buffers = [one for key, one in value.items() if key != _COALESCED] if isinstance(value, dict) else []
        if not buffers or value.get(_COALESCED) is not True:
            raise self._refused("is not in whole buffers", path)
        kinds: dict[str, dict[PartName, StoredArray]] = {kind: {} for kind in _FLAT_KINDS.values()}
        waiting = dict(self._weights)
        for buffer in buffers:
            for of_dtypes, held in buffer.items() if isinstance(buffer, dict) else ():
                dtype = pickles.TORCH_DTYPES.get(getattr(of_dtypes[0], "name", "")) if isinstance(of_dtypes, tuple) else None
                members = [key for key in reversed(waiting) if waiting[key].dtype == dtype]
                self._cut(held, members, kinds)
                for key in members:
                    del waiting[key]
        if waiting:
            raise self._refused(f"has no state of {next(iter(waiting)).name!r}", path)
        grouped = self._grouped(None)
        steps = {
            key: self._step(group.get(_STEP))
            for members, group in zip(grouped, self._groups, strict=True)
            for key in members
        }
        return NumberedState(kinds, self._with_hyper(grouped), steps)

    def check_masters(self, masters: Mapping[PartName, StoredArray]) -> None:
        """Compare the first values of each master and its weight."""
        for key, master in masters.items():
            weight = self._weights[key]
            with np.errstate(over="ignore", invalid="ignore"):
                found = self._first(master).astype(dtypes.to_numpy(weight.dtype))
            if found.tobytes() != self._first(weight).tobytes():
                raise self._refused(f"has another parameter in the place of {key.name!r}", master.file)

    def _master_groups(self) -> list[list[Any]]:
        masters = [[] for _ in self._groups] if self._masters is None else self._masters
        fits = isinstance(masters, list) and len(masters) == len(self._groups)
        if not fits or not all(isinstance(group, list) for group in masters):
            raise self._refused("does not have a list of masters for each of its groups")
        return masters

    def _grouped(self, lengths: Sequence[int] | None) -> list[list[PartName]]:
        """The parameters of each group, in Megatron's order. `lengths` are their numbers, if the file has them."""
        held = list(self._weights)
        filled = [n for n, length in enumerate(lengths or [1] * len(self._groups)) if length]
        decayed = [self._groups[n].get("wd_mult", 1.0) != 0 for n in filled]
        made: list[list[PartName]] = [[] for _ in self._groups]
        if len(filled) == 1:
            made[filled[0]] = held
        elif sorted(decayed) == [False, True]:
            for number, is_decayed in zip(filled, decayed, strict=True):
                made[number] = [key for key in held if self._is_decayed(key) == is_decayed]
        else:
            raise self._refused(f"has {len(filled)} groups of parameters, which their weight decay does not tell apart")
        if lengths is not None and [len(one) for one in made] != list(lengths):
            raise self._refused(
                f"has groups of {list(lengths)} parameters, but the weights are {[len(one) for one in made]}"
            )
        return made

    def _is_decayed(self, key: PartName) -> bool:
        return len(self._weights[key].shape) > 1 and not key.name.endswith(".bias")

    def _with_hyper(self, grouped: Sequence[Sequence[PartName]]) -> list[tuple[Sequence[PartName], Mapping[str, Any]]]:
        hyper = (
            {str(key): torch_values.plain(one, self._path, str(key)) for key, one in group.items() if key not in _OWN}
            for group in self._groups
        )
        return list(zip(grouped, hyper, strict=True))

    def _array(self, key: PartName, kind: str, value: Any) -> StoredArray:
        weight = self._weights[key]
        if not isinstance(value, PickledArray) or value.dtype != "F32" or value.shape != weight.shape:
            what = f"has no F32 {kind!r} of shape {list(weight.shape)} in the place of {key.name!r}"
            raise self._refused(what)
        return value.stored(f"{key.name}/{kind}")

    def _cut(self, held: Any, members: Sequence[PartName], kinds: Mapping[str, dict[PartName, StoredArray]]) -> None:
        """Cut one buffer into its parameters."""
        path, at, starts = str(self._flat), 0, list[int]()
        for key in members:
            at += -at % _ALIGNMENT
            starts.append(at)
            at += prod(self._weights[key].shape)
        if not isinstance(held, dict) or held.get(_LENGTH) != at:
            stated = held.get(_LENGTH) if isinstance(held, dict) else None
            raise self._refused(f"has a buffer of {stated} elements, not of {at}: it has several buckets", path)
        for kind, made in _FLAT_KINDS.items():
            array = held.get(kind)
            if not isinstance(array, PickledArray) or (array.dtype, array.shape, array.strides) != ("F32", (at,), (1,)):
                raise self._refused(f"has no flat F32 {kind!r} of {at} elements", path)
            for key, start in zip(members, starts, strict=True):
                shape = self._weights[key].shape
                stored = array.stored(f"{key.name}/{kind}")
                kinds[made][key] = stored._replace(shape=shape, strides=strides(shape), start=stored.start + start * 4)

    def _step(self, value: Any) -> float:
        if isinstance(value, PickledArray) and prod(value.shape) == 1:
            value = reading.fetched(self._files, value.stored(_STEP).tensor(KEY, _STEP)).item()
        if type(value) not in (int, float):
            raise self._refused("has no number of steps")
        return float(value)

    def _first(self, array: StoredArray) -> NDArray[Any]:
        """The first elements of the first row."""
        shape = array.shape
        row = (*(1 for _ in shape[:-1]), *(min(length, _COMPARED) for length in shape[-1:]))
        return reading.fetched(self._files, array.tensor(KEY, array.key), Box((0,) * len(shape), row))

    def _refused(self, what: str, path: str = "") -> CheckpointError:
        path = path or self._path
        return StateMismatch(f"{path}: the optimizer {what}", hint=WAY_ON, file=path, tensor=KEY)

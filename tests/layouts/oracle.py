"""What every rank of a layout holds, worked out as one would by hand: nested loops, `np.split`, `np.concatenate`.

Nothing here is shared with the product, which must come to the same.
"""

from __future__ import annotations

from itertools import product
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .models import HEADS, VOCABULARY, Arrays, Model, Tensor

Array = NDArray[Any]


class World(NamedTuple):
    """A layout in plain numbers; `splits` are the layers of each virtual stage."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0  # 0: as tp
    sharding: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    order: str = "tp-cp-ep-sharding-dp-pp"
    stage: int = 0
    method: str = ""
    align: int = 1
    vocabulary: int = 0
    qkv: str = ""
    gate_up: str = ""
    experts: str = ""
    splits: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.sharding * self.dp * self.pp

    @property
    def text(self) -> str:
        """The layout in the product's language."""
        found = [
            f"{axis}={getattr(self, axis)}" for axis in ("tp", "cp", "ep", "etp", "dp", "vpp") if getattr(self, axis) > 1
        ]
        if self.etp == 1 and self.tp > 1:
            found.append("etp=1")
        if self.pp > 1:
            found.append(f"pp={self.pp}" + (":" + "/".join(map(str, self.splits)) if self.splits else ""))
        if self.sharding > 1 or self.stage:
            options = [f"stage{self.stage}"] + [self.method] * bool(self.method)
            options += [f"align={self.align}"] * (self.align > 1)
            found.append(":".join([f"sharding={self.sharding}", *options]))
        found += [f"{k}={getattr(self, k)}" for k in ("vocabulary", "qkv", "gate_up", "experts") if getattr(self, k)]
        if self.order != World().order:
            found.append(f"order={self.order}")
        return ",".join(found).replace("vocabulary=", "vocab=")


def _grid(sizes: dict[str, int], order: str, rank: int) -> dict[str, int]:
    """The coordinate of a rank when the first axis of `order` varies fastest."""
    names = [name for name in order.split("-") if name in sizes]
    for number, place in enumerate(product(*(range(sizes[name]) for name in reversed(names)))):
        if number == rank:
            return dict(zip(reversed(names), place, strict=True))
    raise AssertionError(rank)


def coordinates(world: World, rank: int) -> dict[str, int]:
    """Of the dense grid, and of the experts'."""
    dense = _grid({a: getattr(world, a) for a in ("tp", "cp", "sharding", "dp", "pp")}, world.order, rank)
    etp = world.etp or world.tp
    edp = world.ranks // world.pp // (etp * world.ep)
    order = world.order.replace("sharding-", "") if "sharding-dp" in world.order else world.order
    order = order.replace("tp", "etp", 1).replace("-cp", "").replace("dp", "edp", 1)
    experts = _grid({"etp": etp, "ep": world.ep, "edp": edp, "pp": world.pp}, order, rank)
    assert experts["pp"] == dense["pp"]
    esharding = edp // gcd(edp, world.dp)
    return {**dense, "etp": experts["etp"], "ep": experts["ep"], "esharding": experts["edp"] % esharding}


def stage_of(world: World, model: Model, stage: int | str) -> int | None:
    """The pipeline stage of a layer, the first or the last; None for what every stage holds."""
    if stage == "every":
        return None
    if isinstance(stage, str):
        return 0 if stage == "first" else world.pp - 1
    virtual = world.pp * world.vpp
    splits = world.splits or tuple(model.layers // virtual + (i < model.layers % virtual) for i in range(virtual))
    ends = np.cumsum(splits)
    return int(np.searchsorted(ends, stage, side="right")) % world.pp


def cut(array: Array, tensor: Tensor, parts: int, index: int, multiple: int = 0) -> Array:
    """Tensor parallelism: one of `parts` parts; heads that are too few are held by several ranks."""
    dimension = tensor.dimension
    if not tensor.cut:
        return array
    if tensor.cut == VOCABULARY:
        rows = -(-len(array) // (multiple * parts)) * multiple * parts if multiple else len(array)
        array = np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])
        if rows % parts:  # torch.chunk
            step = -(-rows // parts)
            return array[min(step * index, rows) : min(step * (index + 1), rows)]
    if tensor.cut == HEADS and tensor.heads % parts:
        shared = gcd(tensor.heads, parts)
        return np.split(array, shared, axis=dimension)[index * shared // parts]
    return np.split(array, parts, axis=dimension)[index]


def model_tensors(world: World, model: Model, arrays: Arrays, rank: int) -> tuple[Arrays, Arrays]:
    """A rank's tensors after pipeline, expert and tensor parallelism, in the layout's forms: dense ones, and experts'."""
    at = coordinates(world, rank)
    dense: Arrays = {}
    experts: Arrays = {}
    for name, array in arrays.items():
        tensor = model.tensors[name]
        if stage_of(world, model, tensor.stage) not in (None, at["pp"]):
            continue
        if tensor.expert is not None:
            if tensor.expert // (model.experts // world.ep) == at["ep"]:
                experts[name] = cut(array, tensor, world.etp or world.tp, at["etp"])
        else:
            dense[name] = cut(array, tensor, world.tp, at["tp"], world.vocabulary)
    return _joined(world, dense), _stacked(world, experts)


def _joined(world: World, tensors: Arrays) -> Arrays:
    found: Arrays = {}
    for name, array in tensors.items():
        if world.qkv not in ("", "split") and "self_attn.q_proj" in name:
            q, k, v = (tensors[name.replace("q_proj", p)] for p in ("q_proj", "k_proj", "v_proj"))
            groups = 1
            if world.qkv in ("groups", "heads"):
                groups = len(k) // 4  # heads of width 4
            pieces = [np.split(each, groups) for each in (q, k, v)]
            joined = np.concatenate([piece[group] for group in range(groups) for piece in pieces])
            found[name.replace("q_proj", "qkv_proj")] = joined
        elif world.gate_up not in ("", "split") and "mlp.gate_proj" in name:
            found[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([array, tensors[name.replace("gate_", "up_")]])
        elif not (world.qkv not in ("", "split") and ("k_proj" in name or "v_proj" in name)) and not (
            world.gate_up not in ("", "split") and "mlp.up_proj" in name
        ):
            found[name] = array
    return found


def _stacked(world: World, tensors: Arrays) -> Arrays:
    if world.experts != "stacked":
        return tensors
    found: dict[str, list[Array]] = {}
    for name, array in tensors.items():
        head, _, rest = name.partition(".experts.")
        kind = rest.partition(".")[2]
        if kind == "gate_proj.weight":
            up = tensors[name.replace("gate_proj", "up_proj")]
            found.setdefault(f"{head}.experts.gate_up_proj", []).append(np.concatenate([array, up]))
        elif kind == "down_proj.weight":
            found.setdefault(f"{head}.experts.down_proj", []).append(array)
    return {name: np.stack(listed) for name, listed in found.items()}


def shared(world: World, tensors: Arrays, index: int, count: int) -> Arrays:
    """What one sharding rank keeps; empty shards are left out."""
    if count == 1 or not tensors:
        return tensors
    method = world.method or ("dim0" if world.stage == 3 else "whole")
    found: Arrays = {}
    if method == "dim0":
        for name, array in tensors.items():
            step = -(-len(array) // count)
            found[name] = array[step * index : step * (index + 1)]
    elif method == "whole":
        loads = [0] * count
        owners = {}
        for name, array in sorted(tensors.items(), key=lambda item: -item[1].size):  # the largest first
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += array.nbytes
        found = {name: array for name, array in tensors.items() if owners[name] == index}
    else:
        units = [list(tensors)] if method == "flat" else _units(tensors)
        for unit in units:
            found |= _flat_shares(world, {name: tensors[name] for name in unit}, index, count, method)
    return {name: array for name, array in found.items() if array.size}


def _units(tensors: Arrays) -> list[list[str]]:
    units: dict[str, list[str]] = {}
    for name in tensors:
        parts = name.split(".")
        units.setdefault(next((part for part in parts if part.isdigit()), ""), []).append(name)
    return list(units.values())


def _flat_shares(world: World, tensors: Arrays, index: int, count: int, method: str) -> Arrays:
    align = world.align if method == "flat" else 1
    place, at = {}, 0
    for name, array in tensors.items():
        at = -(-at // align) * align
        place[name] = at
        at += array.size
    share = -(-at // (count * align)) * align
    low, high = share * index, share * (index + 1)
    return {
        name: array.reshape(-1)[max(low - place[name], 0) : max(high - place[name], 0)] for name, array in tensors.items()
    }


def held(world: World, model: Model, arrays: Arrays, rank: int, group: str = "model") -> Arrays:
    """What a rank holds of a group whose tensors are named like the model's."""
    at = coordinates(world, rank)
    dense, experts = model_tensors(world, model, arrays, rank)
    if world.stage >= {"model": 3, "ema": 3}.get(group, 1):
        edp = world.ranks // world.pp // ((world.etp or world.tp) * world.ep)
        dense = shared(world, dense, at["sharding"], world.sharding)
        experts = shared(world, experts, at["esharding"], edp // gcd(edp, world.dp))
    return {**dense, **experts}

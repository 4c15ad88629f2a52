"""Every named pair: saved by the ranks of one layout through the real planner and writer, loaded by those of another.

What a rank holds is said by `oracle`, on both sides. Model, master weights and optimizer state are saved together.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load

from holdfast_formats.digest import digest
from holdfast_formats.layout import parts, rules
from holdfast_formats.layout.declared import declare
from holdfast_formats.layout.language import Layout, parse
from holdfast_formats.layout.rank_tensors import LayoutHoldings
from holdfast_formats.naming import Place
from holdfast_formats.region import Box
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment
from holdfast_service.control.checkpoints.planner import plan
from holdfast_service.daemon.writing.writer import write
from holdfast_service.storage import MemoryTier, PosixStore
from tests.local_tensors import fill

from . import oracle
from .matrix import LAYOUTS, MODELS, PAIRS, Pair
from .models import Arrays, Model
from .oracle import World

GROUPS = ("model", "master", "optim")
KEYS = ("exp_avg", "exp_avg_sq")


def source(model: Model, group: str) -> Arrays:
    """The whole tensors of a group; an optimizer keeps two of each parameter's shape, and a step."""
    if group != "optim":
        return model.arrays(GROUPS.index(group))
    found = {f"{name}/{key}": array for seed, key in enumerate(KEYS, 5) for name, array in model.arrays(seed).items()}
    return found | {f"{name}/step": np.array(7, np.float32) for name in model.tensors}


def expected(world: World, model: Model, rank: int, group: str) -> Arrays:
    """What a rank holds of a group, by the oracle."""
    if group != "optim":
        return oracle.held(world, model, model.arrays(GROUPS.index(group)), rank, group)
    found: Arrays = {}
    for seed, key in enumerate(KEYS, 5):
        held = oracle.held(world, model, model.arrays(seed), rank, group)
        found |= {f"{name}/{key}": array for name, array in held.items()}
        found |= {f"{name}/step": np.array(7, np.float32) for name in held}
    return found


def rules_of(model: Model) -> rules.Rules:
    return rules.choose(model.config, model.tensors)


class Saved(NamedTuple):
    """The files of a save, and the tensors in them by group."""

    digests: dict[str, str]
    tensors: dict[str, Arrays]


@cache
def saved(model_name: str, layout_name: str) -> Saved:
    """Save every group in a layout: each rank declares what it holds, the planner tiles, the writer writes."""
    model, world = MODELS[model_name], LAYOUTS[model_name][layout_name]
    layout = parse(world.text)
    tables, slots = zip(*(_slot(model, world, layout, rank) for rank in range(world.ranks)), strict=True)
    tier = MemoryTier()
    staged = PosixStore(tier).begin(Place("run", 1, 1))
    write(staged, plan(tables), dict(enumerate(slots)), "node")
    digests: dict[str, str] = {}
    tensors: dict[str, Arrays] = {group: {} for group in GROUPS}
    for name in tier.list(staged.place.path):
        if name.endswith(".safetensors"):
            data = bytes(tier.read(f"{staged.place.path}/{name}"))
            digests[name] = digest(data)
            tensors[name.partition("-")[0].partition(".")[0]] |= load(data)
    return Saved(digests, tensors)


def _slot(model: Model, world: World, layout: Layout, rank: int) -> tuple[SlotTable, np.ndarray]:
    """One rank's slot: the boxes of stored tensors that its local tensors are, and the table that says so."""
    fragments: list[StagedFragment] = []
    data = bytearray()
    for group in GROUPS:
        held = expected(world, model, rank, group)
        specs = {name: ("F32", array.shape) for name, array in held.items()}
        everything = oracle.held(world._replace(stage=0), model, model.arrays(), rank)
        declared = declare(layout, rank, rules_of(model), group, specs, everything)
        for name, each in declared.items():
            memory = np.ascontiguousarray(held[name]).reshape(-1)
            boxes: dict[str, list[tuple[Box, bytes]]] = {}
            for part in each.local.parts:
                boxes.setdefault(part.tensor, []).append((part.box, parts.view(memory, part).tobytes()))
            for tensor, pieces in boxes.items():
                fragments.append(StagedFragment(each.specs[tensor], tuple(box for box, _ in pieces), len(data)))
                data += b"".join(octets for _, octets in pieces)
    table = SlotTable("r", 1, 1, rank, world.ranks, GROUPS, tuple(_once(fragments)), {group: {} for group in GROUPS}, {})
    return table, np.frombuffer(bytes(data), np.uint8)


def _once(fragments: list[StagedFragment]) -> list[StagedFragment]:
    """An optimizer's fused scalar is declared once a stored tensor."""
    seen: set[tuple[str, str, tuple[Box, ...]]] = set()
    kept = []
    for fragment in fragments:
        key = (fragment.spec.group, fragment.spec.name, fragment.boxes)
        if key not in seen:
            seen.add(key)
            kept.append(fragment)
    return kept


@cache
def loaded(model_name: str, layout_name: str) -> list[dict[str, parts.LocalTensor]]:
    """What every rank of a layout wants, group by group, of what is stored."""
    model, world = MODELS[model_name], LAYOUTS[model_name][layout_name]
    layout = parse(world.text)
    holdings = [
        LayoutHoldings(layout, g, {n: ("F32", a.shape) for n, a in source(model, g).items()}, rules_of(model))
        for g in GROUPS
    ]
    return [
        {f"{g}/{t.name}": t for g, holding in zip(GROUPS, holdings, strict=True) for t in holding.of(rank).tensors}
        for rank in range(world.ranks)
    ]


def test_there_are_enough_pairs() -> None:
    """At least 150, each with a name of its own."""
    assert len({str(pair) for pair in PAIRS}) == len(PAIRS) >= 150


@pytest.mark.parametrize(("model", "layout"), [(m, n) for m, names in LAYOUTS.items() for n in names])
def test_the_files_do_not_depend_on_the_layout(model: str, layout: str) -> None:
    """Saved from any layout, every file is byte for byte what one rank alone would have saved."""
    assert saved(model, layout).digests == saved(model, "single").digests
    for group in GROUPS:
        whole = source(MODELS[model], group)
        assert saved(model, layout).tensors[group].keys() == whole.keys()
        assert all(np.array_equal(saved(model, layout).tensors[group][name], array) for name, array in whole.items())


def _right(pair: Pair) -> None:
    """Every rank of a layout gets exactly what slicing the source tensors by hand gives it."""
    model, world = MODELS[pair.model], LAYOUTS[pair.model][pair.loaded]
    stored = saved(pair.model, pair.saved).tensors
    for rank, wanted in enumerate(loaded(pair.model, pair.loaded)):
        for group in GROUPS:
            held = expected(world, model, rank, group)
            mine = {path.partition("/")[2]: t for path, t in wanted.items() if path.startswith(group + "/")}
            assert mine.keys() == held.keys(), f"{pair}: rank {rank}, {group}"
            for name, array in held.items():
                assert np.array_equal(fill(mine[name], stored[group]), array), f"{pair}: rank {rank}, {group}/{name}"


@pytest.mark.parametrize(("model", "layout"), [(m, n) for m, names in LAYOUTS.items() for n in names])
def test_saved_in_any_layout_loaded_in_another(model: str, layout: str) -> None:
    """Every rank of a layout gets its own from what each of the others has saved. The same bytes are loaded once."""
    right: set[frozenset[tuple[str, str]]] = set()
    for pair in (pair for pair in PAIRS if (pair.model, pair.loaded) == (model, layout)):
        files = frozenset(saved(model, pair.saved).digests.items())
        if files not in right:
            _right(pair)
            right.add(files)

"""Random layouts over random rules and checkpoints: refused by name, or every element is held and nothing else.

What a local tensor means is said by `parts.view` alone. Whether the boxes are what frameworks mean, `tests/layouts` shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast_formats.errors import CheckpointError
from holdfast_formats.layout import parts, rules
from holdfast_formats.layout.elements import Specs, compose
from holdfast_formats.layout.language import FORMS, Layout, parse
from holdfast_formats.layout.parts import LocalTensor
from holdfast_formats.layout.rank_tensors import LayoutHoldings
from holdfast_formats.region import Shape, check_box
from tests.local_tensors import fill

RANKS_MAX = 16
OTHERWISE = ("refuse", "uneven", "replicate", "largest")
Arrays = Mapping[str, NDArray[Any]]


class Checkpoint(NamedTuple):
    """What is stored of a group, and a table and config that tell of it."""

    group: str
    specs: Specs
    table: dict[str, Any]
    config: dict[str, int] | None

    @property
    def rules(self) -> rules.Rules:
        return rules.choose(self.config, self.specs, extra=self.table)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any mesh of at most 16 ranks with any way to shard; sizes are mostly powers of two."""
    size = st.sampled_from([1, 1, 2, 2, 3, 4])
    sizes = {axis: 1 for axis in ("tp", "cp", "dp", "pp", "sharding")}
    for axis in draw(st.permutations(sorted(sizes))):
        wanted = draw(size)
        sizes[axis] = wanted if prod(sizes.values()) * wanted <= RANKS_MAX else 1
    said = {axis: str(n) for axis, n in sizes.items()}
    ranks = sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["sharding"]
    said["etp"] = str(draw(st.sampled_from([n for n in (1, sizes["tp"]) if ranks % n == 0])))
    said["ep"] = str(draw(st.sampled_from([n for n in (1, 2, 4, 8) if ranks // int(said["etp"]) % n == 0])))
    said["order"] = draw(st.sampled_from(["tp-cp-ep-sharding-dp-pp", "tp-ep-cp-dp-sharding-pp", "pp-tp-cp-ep-sharding-dp"]))
    said["sharding"] += draw(
        st.sampled_from(["", ":stage1", ":stage2:whole:sort=none", ":stage3", ":stage3:whole"])
        | st.builds(
            ":stage{}:flat:align={}:pad={}:bucket={}".format, *map(st.sampled_from, ([1, 3], [1, 4], [0, 8], [0, 9]))
        )
        | st.sampled_from([":stage1:dim0", ":stage3:flat-param:align=4", ":stage1:flat-param"])
    )
    said |= {kind: draw(st.sampled_from(forms)) for kind, forms in FORMS.items() if draw(st.booleans())}
    if draw(st.booleans()):
        said["vocab"] = str(draw(st.sampled_from([1, 4, 6])))
    try:
        return parse(",".join(f"{key}={value}" for key, value in said.items()))
    except CheckpointError:  # an order in which stages of experts and of dense layers differ
        return parse(",".join(f"{key}={value}" for key, value in said.items() if key != "order"))


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    """A model of a few layers whose rules are random, stored with any of its tensors fused; or its optimizer's state."""
    side = st.sampled_from([2, 4, 4, 6])
    kv_heads, width, hidden, inter = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(side), draw(side)
    sizes = {
        "layers": draw(st.integers(1, 3)),
        "experts": draw(st.sampled_from([1, 2, 4])),
        "hidden": hidden,
        "inter": inter,
        "vocabulary": draw(st.integers(1, 9)),
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.sampled_from([1, 2])),
        "width": width,
    }
    table = draw(_tables())
    config = {f"n_{name}": size for name, size in sizes.items()}
    known = rules.choose(config, [], extra=table)
    specs: dict[str, tuple[str, Shape]] = {}
    for name in _names(sizes):
        rule = known.rule(name)
        assert rule is not None and rule.shape is not None
        specs[name] = ("F32", rule.shape)
    for fusion in dict.fromkeys(f for name in list(specs) for f in known.fusions(name)):
        if draw(st.booleans()) and all(part in specs for part in fusion.of):
            count = len(fusion.of) // sizes["experts"] if fusion.stacked else len(fusion.of)
            shapes = tuple(specs[part][1] for part in fusion.of[:count])
            with suppress(CheckpointError):  # one key/value head for several queries is not interleaved head by head
                specs[fusion.name] = ("F32", compose(fusion, fusion.name, "", "F32", shapes).shape)
            for part in fusion.of if fusion.name in specs else ():
                del specs[part]
    specs = {name: specs[name] for name in draw(st.permutations(sorted(specs)))}
    if draw(st.booleans()):
        specs["unknown"] = ("F32", (3,))
    group = draw(st.sampled_from(["model", "optim", "master"]))
    if group == "optim":
        specs = {f"{name}/{key}": spec for name, spec in specs.items() for key, spec in (("m", spec), ("n", ("F32", ())))}
    return Checkpoint(group, specs, table, config if draw(st.integers(0, 3)) else draw(st.sampled_from([None, {}])))


def _names(sizes: Mapping[str, int]) -> list[str]:
    inside = ["q", "k", "v", "o", "gate", "up", "norm"]
    inside += [f"experts.{e}.{part}" for e in range(sizes["experts"]) for part in ("gate", "up", "down")]
    return ["embed", *(f"layers.{layer}.{name}" for layer in range(sizes["layers"]) for name in inside), "head"]


@st.composite
def _tables(draw: st.DrawFn) -> dict[str, Any]:
    """A rules file: shapes that fit each other, anything else as it comes."""
    names = ("layers", "experts", "hidden", "inter", "vocabulary", "kv_heads", "heads", "width")

    def tensor(name: str, shape: list[str], cut: int | None, units: str = "", **more: Any) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": name, "shape": shape, **more}
        cut = draw(st.sampled_from([cut, cut, cut, None, len(shape) - 1]))
        if cut is None:
            entry.pop("vocabulary", None)
        else:
            entry |= {"cut": cut, "otherwise": draw(st.sampled_from(OTHERWISE))}
            entry |= {"units": units} if units and cut == 0 and draw(st.integers(0, 3)) else {}
            if cut:
                entry.pop("vocabulary", None)
        return entry

    layer = "layers.{layer}."
    expert = layer + "experts.{expert}."
    entries = [
        tensor("embed", ["vocabulary", "hidden"], 0, stage="first", vocabulary=draw(st.booleans())),
        tensor("head", ["vocabulary", "hidden"], 0, stage=draw(st.sampled_from(["last", "every"])), vocabulary=True),
        tensor(layer + "q", ["heads * width", "hidden"], 0, "heads"),
        *(tensor(layer + part, ["kv_heads * width", "hidden"], 0, "kv_heads") for part in ("k", "v")),
        tensor(layer + "o", ["hidden", "heads * width"], 1),
        *(tensor(layer + part, ["inter", "hidden"], 0) for part in ("gate", "up")),
        {"name": layer + "norm", "shape": ["hidden"]},
        *(tensor(expert + part, ["inter", "hidden"], 0) for part in ("gate", "up")),
        tensor(expert + "down", ["hidden", "inter"], 1),
    ]
    fusions: list[dict[str, Any]] = []
    if draw(st.booleans()):
        found = draw(st.sampled_from(["contiguous", "heads", "groups"]))
        of = [layer + part for part in "qkv"]
        fusions.append({"kind": "qkv", "name": layer + "qkv", "of": of, "heads": ["heads", "kv_heads"], "found": found})
    if draw(st.booleans()):
        fusions.append({"kind": "gate_up", "name": layer + "gate_up", "of": [layer + "gate", layer + "up"]})
    if draw(st.booleans()):
        of = [expert + part for part in draw(st.sampled_from([("gate", "up"), ("gate",)]))]
        fusions.append({"kind": "experts", "name": layer + "experts.stack", "of": of, "dimension": draw(st.integers(0, 1))})
        fusions.append({"kind": "experts", "name": layer + "experts.down_stack", "of": [expert + "down"]})
    return {"name": "random", "sizes": {n: f"n_{n}" for n in names}, "tensors": entries, "fusions": fusions}


def arrays_of(specs: Specs) -> dict[str, NDArray[Any]]:
    """Values that occur once and are not zero, but for a fused scalar, which stands for several that are equal."""
    found, first = {}, 1
    for name, (_, shape) in specs.items():
        size = prod(shape)
        found[name] = np.full((), 7, np.float32) if not shape else np.arange(first, first + size, dtype=np.float32)
        found[name] = found[name].reshape(shape)
        first += size
    return found


def scatter(held: Sequence[Sequence[tuple[LocalTensor, NDArray[Any]]]], specs: Specs) -> dict[str, NDArray[Any]]:
    """The stored tensors out of what all ranks hold: every element from somebody, the same from everybody who has it."""
    found = {name: np.zeros(shape, np.float32) for name, (_, shape) in specs.items()}
    for local, memory in (each for rank in held for each in rank):
        for part in local.parts:
            value, there = parts.view(memory.reshape(-1), part), found[part.tensor][part.box.slices]
            assert np.all((there == 0) | (there == value)), f"{local.name}: replicas differ, or parts overlap"
            found[part.tensor][part.box.slices] = value
    for name, array in found.items():
        assert np.all(array != 0), f"nobody holds all of {name}"
    return found


def filled(ranks: Sequence[Sequence[LocalTensor]], arrays: Arrays) -> list[list[tuple[LocalTensor, NDArray[Any]]]]:
    for local in (local for rank in ranks for local in rank):
        for part in local.parts:  # memory behind a local tensor is not to be written to
            check_box(part.box, arrays[part.tensor].shape, part.tensor)
            assert 0 <= part.start < part.stop <= local.volume, f"{local.name}: {part} lies outside {local.shape}"
    return [[(local, fill(local, arrays)) for local in rank] for rank in ranks]


def hold(checkpoint: Checkpoint, layout: Layout) -> list[tuple[LocalTensor, ...]] | None:
    """What all ranks hold; None where the layout does not fit. Nothing but an error of ours says that."""
    try:
        holding = LayoutHoldings(layout, checkpoint.group, checkpoint.specs, checkpoint.rules)
        ranks = [holding.of(rank) for rank in range(layout.mesh.world)]
    except CheckpointError as refused:
        event(f"refused: {type(refused).__name__}")
        return None
    event("held")
    for rank, held in enumerate(ranks):
        assert len({tensor.name for tensor in held.tensors}) == len(held.tensors)
        share = holding.share(rank)
        assert share == (len(held.tensors), sum(4 * tensor.volume for tensor in held.tensors))
    return [held.tensors for held in ranks]


@given(checkpoints(), layouts(), layouts())
def test_a_layout_is_refused_or_holds_every_element(checkpoint: Checkpoint, first: Layout, second: Layout) -> None:
    """Ranks hold what is stored, all of it, and zeros only behind a vocabulary that the layout pads; from one layout to
    another and back is the identity.
    """
    arrays = arrays_of(checkpoint.specs)
    worlds = [ranks for layout in (first, second) if (ranks := hold(checkpoint, layout)) is not None]
    saved: Arrays = arrays
    for ranks in worlds:
        saved = scatter(filled(ranks, saved), checkpoint.specs)
        assert all(np.array_equal(saved[name], array) for name, array in arrays.items())
    for (local, before), (_, after) in zip(
        (each for rank in filled(worlds[0] if worlds else [], arrays) for each in rank),
        (each for rank in filled(worlds[0] if worlds else [], saved) for each in rank),
        strict=True,
    ):
        assert np.array_equal(before, after)
        if np.any(before == 0):
            assert local.name.partition("/")[0] in ("embed", "head") and (first.vocabulary or second.vocabulary)

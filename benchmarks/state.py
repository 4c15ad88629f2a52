"""The state that every peer saves and loads: random, known by its digests, and changed the moment a save allows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod, sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

FULL_BYTES = 2_180_233_216  # 2.03 GiB: 155 730 944 parameters of 14 bytes
LAYERS, WIDTH, INNER, KEYS, VOCABULARY = 8, 1024, 2816, 256, 32_000
COPIES = {"model": torch.bfloat16, "master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
PARTS = 2  # a global tensor's digests: one for each half of its rows, so that one and two ranks can check their own
CHANGE_EVERY_BYTES = 2**16
FILL_THREADS = 2


class Shape(NamedTuple):
    """A tensor as one rank holds it."""

    name: str  # group/name
    dtype: torch.dtype
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.dims) * self.dtype.itemsize


class State(NamedTuple):
    """This rank's rows of every global tensor: rank r of w holds the r-th of w equal blocks along the first dimension."""

    tensors: dict[str, torch.Tensor]
    rank: int
    world: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def llama(state_bytes: int = FULL_BYTES) -> list[Shape]:
    """300 tensors of a small Llama, its masters and moments, scaled to about `state_bytes` a rank."""
    scale = sqrt(state_bytes / FULL_BYTES)
    width, inner, keys = (max(int(n * scale) // 16 * 16, 16) for n in (WIDTH, INNER, KEYS))
    rows = max(int(VOCABULARY * scale) // 16 * 16, 16)
    weights: list[tuple[str, tuple[int, ...]]] = [("embed_tokens.weight", (rows, width))]
    for layer in range(LAYERS):
        block = {"q_proj": (width, width), "k_proj": (keys, width), "v_proj": (keys, width), "o_proj": (width, width)}
        block |= {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
        weights += [(f"layers.{layer}.{name}.weight", dims) for name, dims in block.items()]
        weights += [(f"layers.{layer}.{name}.weight", (width,)) for name in ("input_norm", "post_norm")]
    weights += [("norm.weight", (width,)), ("lm_head.weight", (rows, width))]
    return [Shape(f"{group}/{name}", dtype, dims) for group, dtype in COPIES.items() for name, dims in weights]


def small(count: int) -> list[Shape]:
    """`count` tensors of a kilobyte or less, four groups of them: what costs per tensor shows."""
    names = [f"experts.{number}.scale" for number in range(count // len(COPIES))]
    return [Shape(f"{group}/{name}", dtype, (256,)) for group, dtype in COPIES.items() for name in names]


def allocate(shapes: Sequence[Shape], rank: int, world: int, saved_world: int) -> State:
    """This rank's part of a state of which `saved_world` ranks hold `shapes` each; the memory is touched."""
    tensors = {}
    for shape in shapes:
        rows = shape.dims[0] * saved_world
        if rows % world:
            raise ValueError(f"{shape.name}: {rows} rows cannot be dealt to {world} ranks")
        tensors[shape.name] = torch.zeros((rows // world, *shape.dims[1:]), dtype=shape.dtype)
    return State(tensors, rank, world)


def fill(state: State, seed: int) -> None:
    """Random bits everywhere: incompressible, and nowhere the same twice."""

    def draw(item: tuple[int, torch.Tensor]) -> None:
        number, tensor = item
        raw = _bytes(tensor)
        words = np.random.Generator(np.random.SFC64([seed, state.rank, number])).integers
        raw[:] = words(0, 2**64, size=-(-len(raw) // 8), dtype=np.uint64).view(np.uint8)[: len(raw)]

    with ThreadPoolExecutor(FILL_THREADS) as pool:
        list(pool.map(draw, enumerate(state.tensors.values())))


def change(state: State) -> None:
    """What an optimizer does as far as a save can see: every tensor changes in place, in every 64 KiB of it."""
    with torch.no_grad():
        for tensor in state.tensors.values():
            tensor.view(-1).view(torch.uint8)[::CHANGE_EVERY_BYTES].add_(1)


def digests(state: State) -> dict[str, str]:
    """A digest of every byte that this rank holds, by the halves of the global tensors."""
    parts = PARTS // state.world
    found = {}
    for name, tensor in state.tensors.items():
        for number, rows in enumerate(tensor.chunk(parts)):
            found[f"{name}#{state.rank * parts + number}"] = xxhash.xxh3_64_hexdigest(_bytes(rows))
    return found


def wrong(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """The names whose values are not what was saved."""
    return sorted({key.partition("#")[0] for key, digest in found.items() if expected.get(key) != digest})


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().view(-1).view(torch.uint8).numpy()

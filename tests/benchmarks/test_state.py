"""The state: as large as it says, random, and known by digests that every number of ranks can check."""

from __future__ import annotations

import torch

from benchmarks.state import FULL_BYTES, Shape, allocate, change, digests, fill, llama, small, wrong

SHAPES = [
    Shape("model/a", torch.bfloat16, (6, 3)),
    Shape("master/a", torch.float32, (6, 3)),
    Shape("master/b", torch.float32, (4,)),
]


def test_the_full_state() -> None:
    """300 tensors of 2.03 GiB a rank."""
    shapes = llama()
    assert len(shapes) == 300
    assert sum(shape.nbytes for shape in shapes) == FULL_BYTES


def test_a_smaller_state_keeps_its_shape() -> None:
    """As many tensors, and about as many bytes as were asked for."""
    shapes = llama(64 * 2**20)
    assert len(shapes) == 300
    assert 0.8 < sum(shape.nbytes for shape in shapes) / (64 * 2**20) < 1.05


def test_many_small_tensors() -> None:
    """Exactly as many as were asked for, each of a kilobyte at most."""
    shapes = small(20_000)
    assert len(shapes) == 20_000 and max(shape.nbytes for shape in shapes) == 1024


def test_a_change_reaches_every_tensor() -> None:
    """Once or several times: no tensor has the digest that it had before."""
    state = allocate(SHAPES, 0, 1, 1)
    fill(state, 1)
    before = digests(state)
    for _ in range(3):
        change(state)
        assert wrong(before, digests(state)) == ["master/a", "master/b", "model/a"]


def test_what_one_rank_saved_two_can_check() -> None:
    """Two ranks hold the halves of what one held, and their digests are those that the one wrote down."""
    whole = allocate(SHAPES, 0, 1, 1)
    fill(whole, 1)
    for rank in range(2):
        part = allocate(SHAPES, rank, 2, 1)
        for name, tensor in part.tensors.items():
            tensor.copy_(whole.tensors[name].chunk(2)[rank])
        assert wrong(digests(whole), digests(part)) == []
        change(part)
        assert len(wrong(digests(whole), digests(part))) == len(SHAPES)


def test_fillings_differ() -> None:
    """By seed and by rank."""
    found = []
    for seed, rank in ((1, 0), (2, 0), (1, 1)):
        state = allocate(SHAPES, rank, 2, 2)
        fill(state, seed)
        found.append({key.partition("#")[0]: value for key, value in digests(state).items()})
    assert found[0] != found[1] and found[0] != found[2]

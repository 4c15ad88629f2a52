"""The random streams of a process, saved and continued."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from holdfast.state import rng
from holdfast.state.train_state import TrainState
from holdfast_formats.errors import CorruptManifest
from holdfast_formats.layout.successors import SavedRankChoice
from tests.client.checkpoint_in_memory import Checkpoint, restore, save


@pytest.fixture(autouse=True)
def _own_streams():
    """What a test draws and seeds stays in the test."""
    before = rng.capture()
    yield
    rng.install(before)


def draw() -> tuple:
    """A few values of every stream, with the kinds of draws that keep a remainder."""
    return (
        random.gauss(0, 1),
        random.random(),
        float(np.random.standard_normal()),
        int(np.random.randint(2**31)),
        torch.randn(3).tolist(),
        torch.randint(2**31, (1,)).item(),
    )


def saved_streams(world: int) -> tuple[Checkpoint, list[tuple]]:
    """A checkpoint of ranks with other seeds, and what each of them draws next."""
    snapshots, expected = [], []
    for rank in range(world):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        snapshots.append(TrainState({}, rank, world).snapshot())
        expected.append(draw())
    return Checkpoint(*snapshots), expected


def test_streams_go_on_where_they_were_saved():
    """After a restore every stream draws what it would have drawn next, pending gaussians included."""
    draw()
    checkpoint = save({})
    expected = draw()
    draw()
    restore(checkpoint, {})
    assert draw() == expected


def test_a_snapshot_is_a_copy():
    """Drawing after the snapshot does not change what is saved."""
    snapshot = TrainState({}, 0, 1).snapshot()
    expected = draw()
    restore(Checkpoint(snapshot), {})
    assert draw() == expected


def test_another_bit_generator_of_numpy():
    """numpy's global stream may have been given another generator; it is saved as numbers."""
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        checkpoint = save({})
        expected = draw()
        restore(checkpoint, {})
        assert draw() == expected
    finally:
        np.random.set_bit_generator(before)


def test_every_rank_continues_its_own_stream():
    """Each rank of the saved world gets its own streams back, also in a smaller world."""
    checkpoint, expected = saved_streams(3)
    for rank in (1, 0):
        restoration = TrainState({}, rank, 2).prepare(checkpoint.stored(rank))
        checkpoint.fill(restoration)
        restoration.apply()
        assert draw() == expected[rank] and not restoration.notes


def test_ranks_of_a_larger_world_draw_differently():
    """A rank that was not saved continues a mixed stream: the same on every restore, another on every rank, and noted."""
    checkpoint = Checkpoint(*(TrainState({}, rank, 2).snapshot() for rank in range(2)))
    drawn = {}
    for rank in (0, 1, 2, 3, 4, 2):
        restoration = TrainState({}, rank, 5).prepare(checkpoint.stored(rank))
        checkpoint.fill(restoration)
        restoration.apply()
        assert bool(restoration.notes) == (rank >= 2)
        assert all(f"those of rank {rank % 2}," in note for note in restoration.notes)
        values = draw()
        assert drawn.setdefault(rank, values) == values
    for kind in range(6):
        assert len({repr(drawn[rank][kind]) for rank in (0, 2, 3, 4)}) == 4


def test_a_checkpoint_without_streams_is_noted():
    """Streams that nobody saved stay as they are, even when names are compared strictly."""
    checkpoint = save({}, groups=())
    expected = (rng.capture().tensors["torch"]).clone()
    restoration = restore(checkpoint, {})
    assert "no random states" in restoration.notes[0] and not restoration.missing
    assert torch.equal(torch.get_rng_state(), expected)


def test_streams_can_be_ignored():
    """The pattern extra/rng leaves the streams alone."""
    checkpoint = save({})
    drawn = draw()
    restore(checkpoint, {}, ignore=["extra/rng"])
    assert draw() != drawn


def test_streams_that_cannot_be_continued_are_refused():
    """A stream of a wrong form is a named error."""
    streams = rng.capture()
    with pytest.raises(CorruptManifest, match="random states"):
        rng.Random().go_on_from(streams._replace(tensors={**streams.tensors, "python": torch.zeros(3, dtype=torch.int64)}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_streams_go_on():
    """Every CUDA device's stream is saved and continued; a larger world's ranks draw differently."""
    torch.rand(3, device="cuda")
    checkpoint = save({})
    expected = torch.rand(3, device="cuda")
    restore(checkpoint, {})
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    restoration = TrainState({}, 1, 2).prepare(checkpoint.stored(1))
    checkpoint.fill(restoration)
    restoration.apply()
    assert not torch.equal(torch.rand(3, device="cuda"), expected)


def test_streams_follow_the_place():
    """Where layouts say whose streams they are, a rank goes on with them as they are, or mixed where nobody stood there."""
    checkpoint, expected = saved_streams(2)
    for heir in (SavedRankChoice(1, True), SavedRankChoice(1, False)):
        stored = checkpoint.stored(1)._replace(stream=heir)
        restoration = TrainState({}, 2, 4).prepare(stored)
        checkpoint.fill(restoration)
        restoration.apply()
        assert (draw() == expected[1]) == heir.exact
        assert ("its counterpart in the saved layout" in restoration.notes[0]) == heir.exact
        assert "rank 2" in restoration.notes[0] and "rank 1" in restoration.notes[0]

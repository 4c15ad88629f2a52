"""The random streams of a process, saved and continued."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from holdfast.left_out import LeftOutNote
from holdfast.state import rng
from holdfast.state.streams import FurtherStreams
from holdfast.state.train_state import TrainState
from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.layout.successors import Mixing, SavedRankChoice
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


class Dice(FurtherStreams):
    """The streams of a framework: it counts."""

    name = "dice"

    def __init__(self, count: int = 0, size: int = 6, begun: Sequence[str] = ()) -> None:
        self.count, self.size, self._begun = count, size, list(begun)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count, "size": self.size}

    def refuse_unfit(self, stored: dict[str, int]) -> None:
        if stored["size"] != self.size:
            raise StateMismatch("the dice have another size")

    def load_state_dict(self, stored: dict[str, int]) -> None:
        self.count = stored["count"]

    def absent(self, stored: dict[str, int]) -> list[str]:
        return [name for name in stored if name not in self.state_dict()]

    def begun(self, stored: dict[str, int]) -> list[str]:
        return self._begun

    def mixed(self, stored: dict[str, int], number: int) -> dict[str, int]:
        return {**stored, "count": stored["count"] + 100 * number}


def test_streams_of_a_framework_go_on():
    """Also once more; and in a larger world each rank has others."""
    live = Dice()
    checkpoint = Checkpoint(*(TrainState({"dice": Dice(rank + 5)}, rank, 2).snapshot() for rank in range(2)))
    found = set()
    for rank in range(4):
        state = TrainState({"dice": live}, rank, 4)
        restoration = state.prepare(checkpoint.stored(rank))
        checkpoint.fill(restoration)
        restoration.apply()
        found.add(live.count)
        assert (live.count == rank + 5) == (rank < 2)
        restored, live.count = live.count, 0
        state.random.install_again()
        assert live.count == restored
    assert len(found) == 4


def test_streams_that_only_one_side_has_are_noted():
    """A state without them, and a checkpoint without them; those that do not fit are refused before anything changes."""
    notes = restore(save({"dice": Dice(5)}), {}).notes
    assert [note for note in notes if "not restored: dice" in note] and all(isinstance(note, LeftOutNote) for note in notes)
    live = Dice(5)
    (note,) = restore(save({}), {"dice": live}).notes
    assert "no random states of dice" in note and isinstance(note, LeftOutNote) and live.count == 5
    checkpoint = save({"dice": Dice(size=20)})
    draw()
    before = torch.get_rng_state()
    with pytest.raises(StateMismatch, match="another size"):
        restore(checkpoint, {"dice": live})
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cuda_device_that_is_gone_is_noted():
    """Its stream is in the checkpoint, and this process cannot continue it."""
    snapshot = TrainState({}, 0, 1).snapshot()
    stream = next(leaf for leaf in snapshot.leaves if leaf.name.endswith("/torch"))
    gone = stream._replace(name=stream.name.replace("/torch", "/cuda.99"))
    (note,) = restore(Checkpoint(snapshot._replace(leaves=(*snapshot.leaves, gone))), {}).notes
    assert "cuda.99" in note and isinstance(note, LeftOutNote)


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
    alike, apart = Mixing(), Mixing(3, 3)
    drawn = []
    for heir in (SavedRankChoice(1, True), SavedRankChoice(1, False, alike), SavedRankChoice(1, False, apart)):
        for rank in (2, 3):
            stored = checkpoint.stored(1)._replace(stream=heir)
            restoration = TrainState({}, rank, 4).prepare(stored)
            checkpoint.fill(restoration)
            restoration.apply()
            drawn.append(draw())
            assert (drawn[-1] == expected[1]) == (heir.mixing == alike)
            assert ("its counterpart in the saved layout" in restoration.notes[0]) == (heir.mixing == alike)
            assert f"rank {rank}" in restoration.notes[0] and "rank 1" in restoration.notes[0]
    assert drawn[-2] == drawn[-1]  # two ranks of one tensor-parallel group


def test_a_new_stage_draws_the_same_rows():
    """Only streams of devices, and of frameworks, are others there."""
    checkpoint = Checkpoint(TrainState({"dice": Dice(5)}, 0, 1).snapshot())
    expected = draw()
    live = Dice()
    stored = checkpoint.stored(0)._replace(stream=SavedRankChoice(0, False, Mixing(None, 1)))
    restoration = TrainState({"dice": live}, 1, 2).prepare(stored)
    checkpoint.fill(restoration)
    restoration.apply()
    assert draw() == expected and live.count == 105
    assert any("mixes those of devices" in note for note in restoration.notes)


def test_streams_that_begin_as_seeded_are_told():
    """Those that a framework cannot continue in another form of parallelism."""
    (note,) = restore(save({"dice": Dice(5)}), {"dice": Dice(begun=["dice count"])}).notes
    assert "dice count go on as this process seeded them" in note and isinstance(note, LeftOutNote)

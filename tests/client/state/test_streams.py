"""Random streams in the state: what is drawn after a restore is what was drawn after the save, to the bit, on each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.state.train_state import TrainState
from holdfast_formats.errors import StateMismatch
from tests.client.checkpoint_in_memory import Checkpoint, restore, save


class Tracker:
    """As Megatron's CudaRNGStatesTracker: named states that are replaced at each use."""

    def __init__(self, seeds: dict[str, int], as_generators: bool = False) -> None:
        made = {name: torch.Generator().manual_seed(seed) for name, seed in seeds.items()}
        self.states: dict[str, Any] = made if as_generators else {name: one.get_state() for name, one in made.items()}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        if not states:
            raise ValueError("no states")
        self.states = states

    def draw(self, name: str) -> torch.Tensor:
        state = self.states[name]
        if isinstance(state, torch.Generator):
            return torch.rand(4, generator=state)
        generator = torch.Generator()
        generator.set_state(state)
        drawn = torch.rand(4, generator=generator)
        self.states[name] = generator.get_state()
        return drawn


class PaddleLike:
    """As Paddle's RNGStatesTracker."""

    def __init__(self, seed: int) -> None:
        self.tracker = Tracker({"global_seed": seed, "local_seed": seed + 1})

    def get_states_tracker(self) -> dict[str, Any]:
        return self.tracker.get_states()

    def set_states_tracker(self, states: dict[str, Any]) -> None:
        self.tracker.set_states(states)

    def draw(self, name: str) -> torch.Tensor:
        return self.tracker.draw(name)


def test_a_generator_goes_on_where_it_was() -> None:
    """In place, whoever else holds it; what was drawn before the save is not drawn again."""
    saved, live = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    torch.rand(7, generator=saved)
    checkpoint = save({"shuffle": saved})
    expected = torch.rand(5, generator=saved)
    held_elsewhere = live
    restore(checkpoint, {"shuffle": live})
    assert torch.equal(torch.rand(5, generator=held_elsewhere), expected)


def test_a_save_is_of_its_moment() -> None:
    """What is drawn after the snapshot is not in it."""
    generator = torch.Generator().manual_seed(1)
    snapshot = TrainState({"g": generator, "t": Tracker({"a": 1})}, 0, 1).snapshot()
    before = generator.get_state()
    torch.rand(1000, generator=generator)
    leaf = next(leaf for leaf in snapshot.leaves if leaf.name.startswith("ranks/00000/g/"))
    assert torch.equal(leaf.pieces[0].tensor, before)


@pytest.mark.parametrize("as_generators", [False, True], ids=["states", "generators"])
def test_a_tracker_goes_on_with_all_streams(as_generators: bool) -> None:
    """Streams as tensors, and streams as generators, which stay the same objects."""
    saved = Tracker({"model-parallel-rng": 3, "data": 4}, as_generators)
    live = Tracker({"model-parallel-rng": 5, "data": 6}, as_generators)
    for name in ("data", "data", "model-parallel-rng"):
        saved.draw(name)
    checkpoint = save({"rng_tracker": saved})
    expected = [saved.draw(name) for name in ("data", "model-parallel-rng", "data")]
    objects = dict(live.states)
    restore(checkpoint, {"rng_tracker": live})
    assert all(torch.equal(live.draw(n), e) for n, e in zip(("data", "model-parallel-rng", "data"), expected, strict=True))
    assert not as_generators or all(live.states[name] is objects[name] for name in objects)


def test_a_tracker_with_the_names_of_paddle() -> None:
    """`get_states_tracker` and `set_states_tracker` mean the same."""
    saved, live = PaddleLike(1), PaddleLike(9)
    saved.draw("local_seed")
    checkpoint = save({"tracker": saved})
    expected = saved.draw("local_seed")
    restore(checkpoint, {"tracker": live})
    assert torch.equal(live.draw("local_seed"), expected)


def test_each_rank_has_its_own() -> None:
    """Two ranks with different streams go on with their own."""
    saved = [torch.Generator().manual_seed(rank) for rank in (0, 1)]
    checkpoint = Checkpoint(*(TrainState({"g": one}, rank, 2).snapshot() for rank, one in enumerate(saved)))
    for rank, one in enumerate(saved):
        live = torch.Generator().manual_seed(99)
        restoration = TrainState({"g": live}, rank, 2).prepare(checkpoint.stored(rank))
        checkpoint.fill(restoration)
        restoration.apply()
        assert torch.equal(live.get_state(), one.get_state())


def test_what_does_not_fit_is_refused_by_name() -> None:
    """Before anything changes where that can be seen; a tracker's own refusal is told as one."""
    live = torch.Generator().manual_seed(2)
    before = live.get_state()
    with pytest.raises(StateMismatch, match=r"^g: the checkpoint has no state of a torch.Generator"):
        TrainState({"g": live}, 0, 1).prepare(save({"g": {"seed": 1}}).stored())
    elsewhere = save({"g": live})
    text = elsewhere.state.replace(b'"cpu"', b'"cuda"')
    assert text != elsewhere.state
    elsewhere.state = text
    with pytest.raises(StateMismatch, match=r"^g: the saved generator was on cuda"):
        TrainState({"g": live}, 0, 1).prepare(elsewhere.stored())
    with pytest.raises(StateMismatch, match=r"tracker: Tracker.set_states\(\) does not take"):
        restore(save({"tracker": Tracker({})}), {"tracker": Tracker({"a": 1})})
    assert torch.equal(live.get_state(), before)


def test_a_generator_can_be_left_as_it_is() -> None:
    """`ignore` leaves the live stream alone."""
    live = torch.Generator().manual_seed(2)
    before = live.get_state()
    restore(save({"g": torch.Generator().manual_seed(1)}), {"g": live}, ignore=["extra/g"])
    assert torch.equal(live.get_state(), before)

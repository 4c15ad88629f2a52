"""What `save_state()` wrote is imported whole: all models, optimizers, schedulers, registered objects, random streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.state import rng
from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.foreign.trainers.accelerate import KIND
from tests.wings.convert.foreign.trainers import directories


class Registered:
    def __init__(self) -> None:
        self.held: dict[str, Any] = {"seen": 0, "sums": torch.zeros(3)}

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.held = held


def read(place: Path) -> ForeignListing:
    files = hub_snapshot.opened(place)
    assert choose(files, None, KINDS) is KIND
    return KIND.read(files, ReadOptions())


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_training_goes_on_bit_for_bit(tmp_path: Path, safe: bool, prefix: str) -> None:
    """Two optimizers are numbered one after the other; names are those without DDP and compile()."""
    place = directories.accelerate(tmp_path, safe=safe, prefix=prefix)
    streams = rng.capture()
    listing = read(place)
    module, second = directories.model(), nn.Linear(1, 2)
    optimizer, other = directories.optimizer(module), torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    scheduler, registered = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100), Registered()
    state = {
        "model": module,
        "model_1": second,
        "optim": [optimizer, other],
        "scheduler": scheduler,
        "registered": registered,
        "accelerate": {"step": 5},
    }
    torch.rand(3)
    found = directories.resumed(hub_snapshot.opened(place), listing, state)
    assert not found.missing and not found.unexpected
    assert state["accelerate"] == {"step": 0, "optimizer_steps": directories.STEP}
    assert registered.held["seen"] == 9 and registered.held["sums"].tolist() == [0, 1, 2]
    assert all(torch.equal(value, streams.tensors[name]) for name, value in rng.capture().tensors.items())
    assert all("momentum_buffer" in other.state[one] for one in second.parameters())
    original = directories.trained()
    for held in (original, (module, optimizer, scheduler)):
        held[1].zero_grad()
        held[0](torch.ones(2, 3)).square().sum().backward()
        held[1].step()
    assert scheduler.state_dict() == original[2].state_dict()
    assert all(torch.equal(a, b) for a, b in zip(original[0].parameters(), module.parameters(), strict=True))


def test_every_file_is_listed(tmp_path: Path) -> None:
    place = directories.accelerate(tmp_path, ranks=2, **{"sampler.bin": Registered, "dl_state_dict_1.bin": {}})
    listing = read(place)
    uses = {use.file: use for use in listing.files}
    assert sorted(uses) == sorted(path.name for path in tmp_path.iterdir())
    assert {name for name, use in uses.items() if use.use == "unused"} == {"sampler.bin", "dl_state_dict_1.bin"}
    assert listing.step == directories.STEP
    assert sorted(listing.rank_documents) == [0, 1]


def test_a_state_without_counts_has_no_step(tmp_path: Path) -> None:
    """SGD counts no steps: the adapter takes the number of the checkpoint."""
    place = directories.accelerate(tmp_path)
    other = torch.load(place / "optimizer_1.bin")
    for name in ("optimizer_1.bin", "model_1.safetensors"):
        (place / name).unlink()
    torch.save({**other, "state": {}}, place / "optimizer.bin")
    listing = read(place)
    assert listing.step is None
    assert listing.documents["extra"]["accelerate"] == {"step": 0}


@pytest.mark.parametrize(
    ("name", "said"),
    [("model.safetensors", "files of other ranks or objects are missing"), ("optimizer.bin", "objects are missing")],
)
def test_incomplete_directories_are_refused(tmp_path: Path, name: str, said: str) -> None:
    place = directories.accelerate(tmp_path)
    (place / name).unlink()
    with pytest.raises(StateMismatch, match=said):
        read(place)


def test_what_is_refused_can_be_left_out(tmp_path: Path) -> None:
    """Optimizers and random states of all ranks together, registered objects one by one."""
    place = directories.accelerate(tmp_path, ranks=2, **{"custom_checkpoint_0.pkl": torch.strided})
    torch.save([1], place / "optimizer_1.bin")
    torch.save({}, place / "random_states_1.pkl")
    names = ("optimizer.bin", "optimizer_1.bin", "random_states_0.pkl", "random_states_1.pkl", "custom_checkpoint_0.pkl")
    with pytest.raises(StateMismatch) as refused:
        read(place)
    assert all(f"--leave-out {name}" in refused.value.hint for name in names)
    listing = KIND.read(hub_snapshot.opened(place), ReadOptions(leave_out=names))
    assert listing.documents["extra"].keys() == {"accelerate", "scheduler"} and not listing.rank_documents
    assert {key.group for key in listing.tensors} == {"model", "model_1"}


def test_without_weights(tmp_path: Path) -> None:
    place = directories.accelerate(tmp_path)
    for name in ("model.safetensors", "model_1.safetensors"):
        (place / name).unlink()
    with pytest.raises(StateMismatch, match=r"neither model\.safetensors nor"):
        read(place)

"""Lightning's `.ckpt` becomes what its adapter resumes from: weights, optimizers, and one document of everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.listing import ForeignListing, TensorKey
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert.foreign.torch_weights import FILE_KIND
from tests.wings.convert.foreign.trainers import directories


def saved(**changed: Any) -> dict[str, Any]:
    module, optimizer, scheduler = directories.trained()
    return {
        "pytorch-lightning_version": "2.6.6",
        "state_dict": module.state_dict(),
        "epoch": 1,
        "global_step": directories.STEP,
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"Checkpoint{'monitor': None}": {"score": torch.tensor(0.5)}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
        "hyper_parameters": {"width": 4},
    } | changed


def read(place: Path, value: Any, **options: Any) -> ForeignListing:
    torch.save(value, place / "last.ckpt")
    return FILE_KIND.read(hub_snapshot.opened(place), ReadOptions(**options))


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Two groups have numbers alone; the document is Lightning's dictionary, with the number of optimizers."""
    listing = read(tmp_path, saved())
    assert listing.step == directories.STEP
    module, document = directories.model(), _Document()
    optimizer = directories.optimizer(module)
    live = {"model": module, "optim": [optimizer], "lightning": document}
    found = directories.resumed(hub_snapshot.opened(tmp_path), listing, live)
    assert not found.missing and not found.unexpected
    original = directories.trained()
    assert document.held.pop("callbacks")["Checkpoint{'monitor': None}"]["score"] == 0.5
    assert document.held == {
        "pytorch-lightning_version": "2.6.6",
        "epoch": 1,
        "global_step": directories.STEP,
        "loops": {"fit_loop": {"state_dict": {}}},
        "optimizer_states": 1,
        "lr_schedulers": [original[2].state_dict()],
        "hyper_parameters": {"width": 4},
        "holdfast_weights": None,
    }
    for one, made in ((original[0], original[1]), (module, optimizer)):
        made.zero_grad()
        one(torch.ones(2, 3)).square().sum().backward()
        made.step()
    assert all(torch.equal(a, b) for a, b in zip(original[0].parameters(), module.parameters(), strict=True))


def test_numbers_of_one_optimizer_and_of_several(tmp_path: Path) -> None:
    """Parameters of equal shapes keep their numbers, through all optimizers; without any there is nothing."""
    module = directories.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    listing = read(tmp_path, saved(optimizer_states=[optimizer.state_dict()]))
    assert TensorKey("optim", "0/momentum_buffer") in listing.tensors
    assert optimizer_state.is_numbered(listing.documents["optim"]["optim"])
    several = read(tmp_path, saved(optimizer_states=[optimizer.state_dict()] * 2))
    assert TensorKey("optim", "11/momentum_buffer") in several.tensors
    assert several.documents["extra"]["lightning"]["optimizer_states"] == 2
    without = {key: value for key, value in saved().items() if key != "optimizer_states"}
    assert "optim" not in read(tmp_path, without).documents


def test_what_cannot_be_kept_is_refused_by_key(tmp_path: Path) -> None:
    value = saved(hyper_parameters={"kind": torch.strided}, optimizer_states=[{"state": 1, "param_groups": 2}])
    with pytest.raises(StateMismatch) as refused:
        read(tmp_path, value)
    assert "--leave-out hyper_parameters" in refused.value.hint and "--leave-out optimizer_states" in refused.value.hint
    listing = read(tmp_path, value, leave_out=("hyper_parameters", "optimizer_states"))
    document = listing.documents["extra"]["lightning"]
    assert document["epoch"] == 1 and "hyper_parameters" not in document and "optimizer_states" not in document


class _Document:
    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.held = held

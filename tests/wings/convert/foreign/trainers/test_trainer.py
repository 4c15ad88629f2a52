"""A Trainer's checkpoint is imported whole, and training goes on from it as from the program that wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from holdfast.state import rng
from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.mapping import reading
from holdfast_formats.mapping.listing import ForeignListing, TensorKey
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert import mapping
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.foreign.trainers.trainer import KIND
from tests.wings.convert.foreign.trainers import directories


def read(place: Path, **options: Any) -> ForeignListing:
    files = hub_snapshot.opened(place)
    assert choose(files, None, KINDS) is KIND
    return KIND.read(files, ReadOptions(**options))


def train(module: Any, optimizer: Any, scheduler: Any) -> None:
    for number in range(3):
        optimizer.zero_grad()
        module(torch.full((2, 3), 0.5 + number)).square().sum().backward()
        optimizer.step()
        scheduler.step()


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Weights, moments, schedule, scaler and random streams, of parameters that have numbers alone."""
    place = directories.trainer(tmp_path)
    streams = rng.capture()  # those of the file
    listing = read(place)
    module = directories.model()
    optimizer = directories.optimizer(module)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    scaler = _Held({"scale": 1.0})
    torch.rand(3)
    live = {"model": module, "optim": optimizer, "scheduler": scheduler, "scaler": scaler}
    found = directories.resumed(hub_snapshot.opened(place), listing, live)
    assert not found.missing and not found.unexpected
    assert scaler.held == {"scale": 1024.0, "_growth_tracker": 3}
    assert all(torch.equal(value, streams.tensors[name]) for name, value in rng.capture().tensors.items())
    original = directories.trained()
    train(*original)
    train(module, optimizer, scheduler)
    assert all(torch.equal(a, b) for a, b in zip(original[0].parameters(), module.parameters(), strict=True))
    assert scheduler.state_dict() == original[2].state_dict()


def test_every_file_is_listed(tmp_path: Path) -> None:
    """What is no state of the training is an asset, or says why it is not used."""
    listing = read(directories.trainer(tmp_path))
    uses = {use.file: use for use in listing.files}
    assert sorted(uses) == sorted(path.name for path in tmp_path.iterdir())
    assert {name: use.use for name, use in uses.items() if use.use != "asset"} == {
        "model.safetensors": "tensors",
        "optimizer.pt": "tensors",
        "scheduler.pt": "state",
        "scaler.pt": "state",
        "rng_state.pth": "state",
        "training_args.bin": "unused",
    }
    assert "Python objects" in uses["training_args.bin"].reason
    assert set(listing.assets) == {"config.json", "trainer_state.json"}
    assert listing.step == directories.STEP and listing.kind == "trainer"
    assert any("numbers its 6 parameters" in note for note in listing.notes)


def test_each_rank_has_its_own_streams(tmp_path: Path) -> None:
    place = directories.trainer(tmp_path, ranks=3)
    torch.save({**directories.drawn(), "cpu": torch.get_rng_state().fill_(1)}, place / "rng_state_2.pth")
    listing = read(place)
    names = {key.name for key in listing.tensors if key.group == "extra"}
    assert {name.split("/")[1] for name in names} == {"00000", "00001", "00002"}
    assert sorted(listing.rank_documents) == [0, 1, 2]
    assert set(listing.documents_of(listing.documents)[2]["extra"]) == {"scheduler", "scaler", "rng"}
    third = listing.tensors[TensorKey("extra", "ranks/00002/rng/torch")]
    assert set(reading.fetched(hub_snapshot.opened(place), third).tolist()) == {1}
    (place / "rng_state_1.pth").unlink()
    with pytest.raises(StateMismatch, match="files of other ranks"):
        read(place)


def test_an_adapter_goes_to_the_group_of_a_trainers_adapter(tmp_path: Path) -> None:
    place = directories.trainer(tmp_path, weights=False)
    save_file({"base_model.model.q.lora_A.weight": torch.ones(2, 2)}, place / "adapter_model.safetensors", {"format": "pt"})
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    listing = read(place)
    assert TensorKey("adapter_model", "base_model.model.q.lora_A.weight") in listing.tensors
    assert "adapter_config.json" in listing.assets


def test_weights_in_torch_files(tmp_path: Path) -> None:
    place = directories.trainer(tmp_path, weights=False)
    with pytest.raises(StateMismatch, match="no weights beside"):
        read(place)
    torch.save(directories.model().state_dict(), place / "pytorch_model.bin")
    assert {key.name for key in read(place).tensors if key.group == "model"} == set(directories.model().state_dict())


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """Without an optimizer a Trainer cannot resume; an incomplete state is refused."""
    place = directories.trainer(tmp_path, optimizer=None)
    assert any("no optimizer.pt" in note for note in read(place).notes)
    (place / "trainer_state.json").write_text("{}")
    with pytest.raises(CorruptManifest, match="no global_step"):
        read(place)


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt"])
def test_objects_are_refused_by_file(tmp_path: Path, file: str) -> None:
    """Nothing is unpickled: what is no plain value names its file, and the option that goes on without it."""
    place = directories.trainer(tmp_path)
    torch.save({"state": _Held({}), "param_groups": []}, place / file)
    with pytest.raises(StateMismatch) as refused:
        read(place)
    assert refused.value.members["file"] == file
    assert f"--leave-out {file}" in refused.value.hint and "--weights-only" in refused.value.hint
    without = read(place, leave_out=(file,))
    assert {use.file: use.use for use in without.files}[file] == "unused"
    assert {key.group for key in read(place, weights_only=True).tensors} == {"model"}


def test_a_program_needs_names(tmp_path: Path) -> None:
    place = directories.trainer(tmp_path)
    with pytest.raises(StateMismatch, match="numbers in place of parameter names") as refused:
        mapping.mapped(hub_snapshot.opened(place), read(place), "(.*) -> $1")
    assert "without --program" in refused.value.hint


class _Held:
    """An object with a state."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.held = held

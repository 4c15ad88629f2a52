"""Directories as a Trainer and Accelerate write them, made by torch and safetensors alone."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from holdfast.state.train_state import MatchedLeaves, OfferedLeaves, TrainState
from holdfast_formats.disk import state_json
from holdfast_formats.files import Files
from holdfast_formats.mapping import reading
from holdfast_formats.mapping.listing import ForeignListing, TensorKey

STEP = 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 3))


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Matrices first, then vectors, as a Trainer groups them."""
    matrices = [one for one in module.parameters() if one.dim() > 1]
    vectors = [one for one in module.parameters() if one.dim() == 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)


def trained(steps: int = STEP) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    module = model()
    made = optimizer(module)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, 100)
    for number in range(steps):
        made.zero_grad()
        module(torch.full((2, 3), 0.5 + number)).square().sum().backward()
        made.step()
        scheduler.step()
    return module, made, scheduler


def drawn() -> dict[str, Any]:
    """The random states of this process, each in the middle of its stream."""
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    random.gauss(0, 1)
    np.random.standard_normal(3)
    torch.rand(3)
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}


def trainer(directory: Path, ranks: int = 1, weights: bool = True, **changed: Any) -> Path:
    """`checkpoint-4`; `changed` are other values of files, by the beginnings of their names, None for no file."""
    directory.mkdir(parents=True, exist_ok=True)
    module, made, scheduler = trained()
    if weights:
        save_file(module.state_dict(), directory / "model.safetensors", {"format": "pt"})
    pickled = {
        "optimizer.pt": changed.get("optimizer", made.state_dict()),
        "scheduler.pt": changed.get("scheduler", scheduler.state_dict()),
        "scaler.pt": changed.get("scaler", {"scale": 1024.0, "_growth_tracker": 3}),
        "training_args.bin": changed.get("training_args", Path("a")),
    }
    for rank in range(ranks):
        name = "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"
        pickled[name] = {**drawn(), **changed.get("rng_state", {})}
    for name, value in pickled.items():
        if value is not None:
            torch.save(value, directory / name)
    state = changed.get("trainer_state", {"global_step": STEP, "epoch": 0.5, "log_history": [{"loss": float("nan")}]})
    (directory / "trainer_state.json").write_text(json.dumps(state))
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return directory


def accelerate(directory: Path, ranks: int = 1, safe: bool = True, prefix: str = "", **changed: Any) -> Path:
    """`save_state()` of two models and optimizers, a scheduler and a registered object."""
    directory.mkdir(parents=True, exist_ok=True)
    module, made, scheduler = trained()
    second = nn.Linear(1, 2)
    other = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    second(torch.ones(1, 1)).sum().backward()
    other.step()
    for name, one in (("model", module), ("model_1", second)):
        held = {prefix + key: value for key, value in one.state_dict().items()}
        if safe:
            save_file(held, directory / f"{name}.safetensors", {"format": "pt"})
        else:
            torch.save(held, directory / f"pytorch_{name}.bin")
    states = drawn()
    random_states = {
        "step": 0,
        "random_state": states["python"],
        "numpy_random_seed": states["numpy"],
        "torch_manual_seed": states["cpu"],
    }
    pickled = {
        "optimizer.bin": made.state_dict(),
        "optimizer_1.bin": other.state_dict(),
        "scheduler.bin": scheduler.state_dict(),
        "custom_checkpoint_0.pkl": {"seen": 9, "sums": torch.arange(3.0)},
        **{f"random_states_{rank}.pkl": random_states for rank in range(ranks)},
        **changed,
    }
    for name, value in pickled.items():
        if value is not None:
            torch.save(value, directory / name)
    return directory


def resumed(files: Files, listing: ForeignListing, state: Mapping[str, Any], rank: int = 0, world: int = 1) -> MatchedLeaves:
    """Restore a listing into live objects of a rank, as a restore of the imported checkpoint does."""
    encoded = {
        number: {group: {key: json.dumps(value) for key, value in held.items()} for group, held in documents.items()}
        for number, documents in listing.documents_of(listing.documents).items()
    }
    groups = sorted({key.group for key in listing.tensors} | {group for held in encoded.values() for group in held})
    values = state_json.for_rank(state_json.merge(1, {}, groups, encoded), rank).values
    specs: dict[str, dict[str, Any]] = {group: {} for group in groups}
    for key, tensor in listing.tensors.items():
        specs[key.group][key.name] = (tensor.spec.dtype, tensor.spec.shape)
    found = TrainState(state, rank, world).prepare(OfferedLeaves(specs, {}, values, imported=True))
    for leaf in found.leaves:
        whole = torch.from_numpy(np.array(reading.fetched(files, listing.tensors[TensorKey(*leaf.key)])))
        for piece in leaf.pieces:
            cut = tuple(slice(at, at + size) for at, size in zip(piece.box.offset, piece.box.shape, strict=True))
            with torch.no_grad():
                piece.tensor.copy_(whole[cut])
    found.apply()
    return found

"""Files of everyday trainings: each key has its place, and what has none is refused by its key."""

from __future__ import annotations

import argparse
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from torch import nn

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping import optimizer_state, reading
from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert.foreign.torch_weights import FILE_KIND


class Config:
    """An object that no reader takes for a value."""


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with a buffer, and an optimizer of two groups, as most trainings have it."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def read(directory: Path, value: Any, *leave_out: str) -> ForeignListing:
    torch.save(value, directory / "last.ckpt")
    return FILE_KIND.read(hub_snapshot.opened(directory), ReadOptions(leave_out=leave_out))


def names(listing: ForeignListing, group: str) -> set[str]:
    return {key.name for key in listing.tensors if key.group == group}


def check(directory: Path, listing: ForeignListing, group: str, wanted: dict[str, torch.Tensor]) -> None:
    """The group has these tensors, bit for bit."""
    held = {key.name: one for key, one in listing.tensors.items() if key.group == group}
    assert held.keys() == wanted.keys()
    for name, tensor in wanted.items():
        found = reading.fetched(hub_snapshot.opened(directory), held[name])
        assert found.tobytes() == tensor.detach().numpy().tobytes(), name


def prefixed(model: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": one for name, one in model.state_dict().items()}


FORMS: dict[str, Any] = {
    "lightning": lambda m, o: {
        "state_dict": m.state_dict(),
        "optimizer_states": [o.state_dict()],
        "lr_schedulers": [{"last_epoch": 3, "_step_count": 4}],
        "epoch": 1,
        "global_step": 5,
        "pytorch-lightning_version": "2.6.0",
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5)}},
        "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 1}}}},
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.1, "path": PurePosixPath("/data/x"), "args": argparse.Namespace(width=3)},
    },
    "nanogpt": lambda m, o: {
        "model": prefixed(m, "_orig_mod."),
        "optimizer": o.state_dict(),
        "model_args": {"n_layer": 2, "bias": False},
        "iter_num": 5,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out"},
    },
    "timm": lambda m, o: {
        "epoch": 3,
        "arch": "resnet18",
        "state_dict": m.state_dict(),
        "state_dict_ema": prefixed(m, "module."),
        "optimizer": o.state_dict(),
        "version": 2,
        "args": argparse.Namespace(lr=0.1, amp=True),
        "metric": 71.5,
    },
    "open_clip": lambda m, o: {
        "epoch": 2,
        "name": "run",
        "state_dict": prefixed(m, "module."),
        "optimizer": o.state_dict(),
        "scaler": {"scale": 65536.0, "growth_factor": 2.0},
    },
    "wrapped twice": lambda m, o: {
        "model_state_dict": prefixed(m, "module._orig_mod."),
        "optimizer_state_dict": o.state_dict(),
    },
    "torchtune": lambda m, o: {"model": m.state_dict(), "optimizer": o.state_dict(), "epochs_run": 1, "seed": 3, "rng": 4},
}
STEPS = {"lightning": 5, "nanogpt": 5}
VALUES = {
    "lightning": "lightning",
    "nanogpt": "model_args iter_num best_val_loss config",
    "timm": "epoch arch version args metric",
    "open_clip": "epoch name scaler",
    "torchtune": "epochs_run seed rng_",
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(tmp_path: Path, form: str) -> None:
    """Weights by their own names, the optimizer in its order, and everything else as values."""
    model, optimizer = trained()
    listing = read(tmp_path, FORMS[form](model, optimizer))
    check(tmp_path, listing, "model", model.state_dict())
    moments = {f"{n}/{k}": one for n, held in optimizer.state_dict()["state"].items() for k, one in held.items()}
    check(tmp_path, listing, "optim", moments)
    (document,) = listing.documents["optim"].values()
    assert optimizer_state.is_numbered(document)
    assert listing.documents.get("extra", {}).keys() == set(VALUES.get(form, "").split()) and listing.step == STEPS.get(form)
    assert any("was removed" in note for note in listing.notes) is (form in ("nanogpt", "open_clip", "wrapped twice"))
    check(tmp_path, listing, "ema", model.state_dict() if form == "timm" else {})


def test_values_of_lightning(tmp_path: Path) -> None:
    """Hyper-parameters may be paths and a program's arguments; one that is an object is left out by its own name."""
    model, optimizer = trained()
    value = FORMS["lightning"](model, optimizer)
    held = read(tmp_path, value).documents["extra"]["lightning"]
    assert held["hyper_parameters"] == {"$keys": ["lr", "path", "args"], "lr": 0.1, "path": "/data/x", "args": {"width": 3}}
    value["hyper_parameters"]["cfg"] = Config()
    with pytest.raises(StateMismatch, match=r"'hyper_parameters', which cannot be kept: cfg is a .*Config"):
        read(tmp_path, value)
    listing = read(tmp_path, value, "hyper_parameters.cfg")
    assert listing.documents["extra"]["lightning"] == held and [part.what for part in listing.left_out] == [
        "hyper_parameters.cfg"
    ]


def test_two_models(tmp_path: Path) -> None:
    """Each under its own key, without one that says which is the model, is a group of that name."""
    model, _ = trained()
    other = {name: one * 2 for name, one in model.state_dict().items()}
    listing = read(tmp_path, {"actor": model.state_dict(), "critic": other, "epoch": 3})
    check(tmp_path, listing, "actor", model.state_dict())
    check(tmp_path, listing, "critic", other)
    assert listing.documents == {"extra": {"epoch": 3}}
    check(tmp_path, read(tmp_path, {"net": model.state_dict(), "epoch": 3}), "model", model.state_dict())


@pytest.mark.parametrize(
    "key", ["ema", "model_ema", "ema_state_dict", "state_dict_ema", "ema_model", "ema_model_state_dict"]
)
def test_averages(tmp_path: Path, key: str) -> None:
    """An average has the model's names; tensors of other names are in group extra."""
    model, _ = trained()
    average = {name: one + 1 for name, one in model.state_dict().items()}
    check(tmp_path, read(tmp_path, {"model": model.state_dict(), key: average}), "ema", average)
    listing = read(tmp_path, {"model": model.state_dict(), key: {"decay": torch.ones(2)}})
    assert names(listing, "extra") == {f"{key}/decay"} and not names(listing, "ema")


def test_averages_of_torch(tmp_path: Path) -> None:
    """AveragedModel counts its updates beside the names: the count is in group extra."""
    model, _ = trained()
    average = torch.optim.swa_utils.AveragedModel(model)
    listing = read(tmp_path, {"model": model.state_dict(), "ema_model": average.state_dict()})
    check(tmp_path, listing, "ema", average.module.state_dict())
    check(tmp_path, listing, "extra", {"ema_model/n_averaged": average.n_averaged})


def test_numbers_as_names(tmp_path: Path) -> None:
    """Tensors by number are named by its digits; a number that is a name too is refused."""
    tensors = {0: torch.ones(2), 1: torch.zeros(3), "-1": torch.ones(1)}
    for value in (tensors, {"model": tensors}):
        check(tmp_path, read(tmp_path, value), "model", {str(key): one for key, one in tensors.items()})
    with pytest.raises(StateMismatch, match="has the number 1 and the text '1' as names") as error:
        read(tmp_path, {**tensors, "1": torch.ones(1)})
    assert "--leave-out 1" in error.value.hint
    assert names(read(tmp_path, {**tensors, "1": torch.ones(1)}, "1"), "model") == {"0", "-1"}


@pytest.mark.parametrize(
    ("value", "said", "hint"),
    [
        ({(0, 1): torch.ones(1), "a": torch.ones(1)}, r"has the key \(0, 1\), which is not a name", "f'{key}_': tensor"),
        ({0: {"w": torch.ones(1)}, 1: {"w": torch.ones(1)}}, "has no tensors in model: 0 is a dict", "{'NAME': tensor}"),
        ({"state": {}, "param_groups": []}, "holds the state dict of an optimizer", "'optimizer': optimizer.state_dict()"),
        ([torch.ones(1)], "holds a list, not a state dict", "{'NAME': tensor}"),
        (nn.Linear(1, 1), "holds a torch.nn.modules.linear.Linear object", "torch.save(model.state_dict(), FILE)"),
        ({"model": nn.Linear(1, 1), "ema": nn.Linear(1, 1)}, "object as 'model'", "saved['model'].state_dict()"),
        ({"-x": 3, "w.w": torch.ones(1)}, "has '-x', which is a int", "--leave-out=-x"),
    ],
    ids=lambda part: "",
)
def test_what_is_no_state_dict(tmp_path: Path, value: Any, said: str, hint: str) -> None:
    """Is refused with the line of code, or the option, that helps."""
    with pytest.raises(StateMismatch, match=said) as error:
        read(tmp_path, value)
    assert hint in error.value.hint


def test_tensors_beside_the_model(tmp_path: Path) -> None:
    """A random state is a tensor of group extra; a file of nothing but tensors is a model."""
    listing = read(tmp_path, {"model": {"w": torch.ones(2)}, "rng_state": torch.get_rng_state(), "cuda": [torch.ones(3)]})
    assert names(listing, "extra") == {"rng_state", "cuda/0"} and listing.documents["extra"]["cuda"] == [
        {"$tensor": "cuda/0"}
    ]
    assert names(read(tmp_path, {"w": torch.ones(2), "v": torch.ones(())}), "model") == {"w", "v"}

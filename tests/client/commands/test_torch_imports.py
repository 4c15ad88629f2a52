"""A training goes on from a torch file or a DCP directory of another program: the next steps are those of the original."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from holdfast import Checkpointer
from tests.kit.commands import call, call_json
from tests.wings.convert.foreign.dcp.saving import save_ranks

pytestmark = pytest.mark.usefixtures("forked_programs", "no_service")
STEPS = 4


class Config:
    """An object that no reader takes for a value."""


class Training:
    """A model, an optimizer of two groups with a schedule, and the losses of its steps."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        decayed = [one for one in self.model.parameters() if one.dim() > 1]
        others = [one for one in self.model.parameters() if one.dim() < 2]
        self.optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.05)

    def losses(self, first: int) -> list[float]:
        found = []
        for step in range(first, first + STEPS):
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            loss = self.model(batch).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            found.append(loss.item())
        return found


def lightning(training: Training, place: Path) -> tuple[Path, list[str]]:
    value = {
        "state_dict": training.model.state_dict(),
        "optimizer_states": [training.optimizer.state_dict()],
        "lr_schedulers": [],
        "epoch": 1,
        "global_step": STEPS,
        "pytorch-lightning_version": "2.6.0",
        "loops": {},
        "hyper_parameters": {"cfg": Config()},
    }
    torch.save(value, place / "last.ckpt")
    (place / "events.pt").write_bytes(b"another file of the directory")
    return place / "last.ckpt", ["--leave-out", "hyper_parameters.cfg"]


def nanogpt(training: Training, place: Path) -> tuple[Path, list[str]]:
    weights = {f"_orig_mod.{name}": one for name, one in training.model.state_dict().items()}
    torch.save({"model": weights, "optimizer": training.optimizer.state_dict(), "iter_num": STEPS}, place / "ckpt.pt")
    return place / "ckpt.pt", []


def flat(training: Training, place: Path) -> tuple[Path, list[str]]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(training.model, training.optimizer, options=options)
    save_ranks(place / "dcp", [{**weights, **state}])
    return place / "dcp", []


def titan(training: Training, place: Path) -> tuple[Path, list[str]]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(training.model, training.optimizer, options=options)
    save_ranks(place / "dcp", [{**weights, "optimizer": state, "train_state": {"step": torch.tensor(STEPS)}}])
    return place / "dcp", []


def named(training: Training, place: Path) -> tuple[Path, list[str]]:
    weights, state = get_state_dict(training.model, training.optimizer)
    torch.save({"model": weights, "optimizer": state}, place / "named.pt")
    return place / "named.pt", []


@pytest.mark.parametrize("form", [lightning, nanogpt, flat, titan, named])
def test_a_training_goes_on(tmp_path: Path, form: Any) -> None:
    """The losses of the next steps are equal, bit for bit, after a plain `restore()` in another program."""
    original, root = Training(1), tmp_path / "root"
    original.losses(0)
    source, options = form(original, tmp_path)
    done = call_json("import", source, f"mine@{STEPS}", "--root", root, *options)
    assert [part["what"] for part in done["source"].get("left_out", ())] == options[1:]
    training = Training(7)
    with Checkpointer("mine", {"model": training.model, "optimizer": training.optimizer}, at=str(root)) as checkpointer:
        assert checkpointer.restore() == STEPS
    assert training.losses(STEPS) == original.losses(STEPS)


def test_two_models(tmp_path: Path) -> None:
    """Each is restored under its own key."""
    actor, critic = Training(1).model, Training(2).model
    for name, directory in (("a", True), ("b", False)):
        value = {"actor": actor.state_dict(), "critic": critic.state_dict(), "epoch": 3}
        if directory:
            save_ranks(tmp_path / name, [copy.deepcopy(value)])
        else:
            torch.save(value, tmp_path / name)
            (tmp_path / name).rename(tmp_path / f"{name}.pt")
        source = tmp_path / (name if directory else f"{name}.pt")
        assert call("import", source, f"{name}@3", "--root", tmp_path / "root").exit_code == 0
        state = {"actor": Training(5).model, "critic": Training(6).model}
        with Checkpointer(name, state, at=str(tmp_path / "root")) as checkpointer:
            assert checkpointer.restore() == 3
        for made, wanted in ((state["actor"], actor), (state["critic"], critic)):
            assert all(torch.equal(one, wanted.state_dict()[key]) for key, one in made.state_dict().items())

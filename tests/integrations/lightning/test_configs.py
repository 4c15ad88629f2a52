"""Hyper-parameters that are OmegaConf's containers: saved, and containers again for what reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import omegaconf
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf

from holdfast.integrations.lightning import HoldfastCheckpointIO, configs, load_from_checkpoint
from tests.daemons import RunningDaemon
from tests.integrations.lightning.models import Small, equal, loader, saves, trainer
from tests.kit.daemons import own_daemon

CONFIG = {"rate": 0.125, "blocks": [1, {"deep": True}], "same": "${rate}", "missing": "???"}


daemon = own_daemon(listen="none")


class Whole(Small):
    """All of its hyper-parameters are one container, as in `save_hyperparameters(config)`."""

    def __init__(self, rate: float, blocks: Any, same: float, missing: Any = None) -> None:
        super(Small, self).__init__()
        self.save_hyperparameters(OmegaConf.create({key: value for key, value in CONFIG.items() if key != "missing"}))
        self.net = torch.nn.Linear(4, 2)


class Inside(Small):
    """A container is among them, whose values are read as attributes."""

    def __init__(self, config: DictConfig, rate: float = 0.5) -> None:
        super(Small, self).__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, 2)
        self.deep = config.blocks[1].deep


@pytest.mark.parametrize("way", ["callback", "plugin"])
def test_a_module_is_made_anew_from_a_container(daemon: RunningDaemon, tmp_path: Path, way: str) -> None:
    """As from Lightning's own file: with interpolations, missing values and flags."""
    config = OmegaConf.create(CONFIG)
    OmegaConf.set_struct(config, True)
    module, path = Inside(config), tmp_path / "end.ckpt"
    plain = trainer(tmp_path / "own")
    plain.fit(module, loader())
    plain.save_checkpoint(tmp_path / "own.ckpt")
    own = Inside.load_from_checkpoint(tmp_path / "own.ckpt", weights_only=False)
    if way == "callback":
        fitting = trainer(tmp_path, saves(daemon, "callback"))
    else:
        plugin = HoldfastCheckpointIO("plugin", at=daemon.socket)
        fitting = trainer(tmp_path, ModelCheckpoint(tmp_path, save_top_k=0), plugins=[plugin])
    fitting.fit(module, loader())
    fitting.save_checkpoint(path)
    for again in (load_from_checkpoint(Inside, path), own):
        assert again.deep is True and type(again.hparams["config"]) is DictConfig
        assert OmegaConf.to_container(again.hparams["config"], resolve=False) == CONFIG
        assert OmegaConf.is_struct(again.hparams["config"]) is True
    assert equal(load_from_checkpoint(Inside, path).weights(), module.weights())


def test_hyper_parameters_that_are_one_container(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Their class is stored by its name; training goes on from them."""
    module, fitting = Whole(0.125, [], 0.125), trainer(tmp_path, saves(daemon, "whole"))
    fitting.fit(module, loader())
    fitting.save_checkpoint(tmp_path / "end.ckpt")
    again = load_from_checkpoint(Whole, tmp_path / "end.ckpt", missing=1)
    assert type(again.hparams) is DictConfig and again.hparams.rate == again.hparams.same == 0.125
    on = Whole(0.125, [], 0.125)
    trainer(tmp_path / "on", saves(daemon, "whole"), max_epochs=2).fit(on, loader(), ckpt_path="last")


def test_what_is_no_container_is_left_alone() -> None:
    """Also where OmegaConf is loaded: the very objects."""
    given: dict[str, Any] = {"a": {"b": [1, (2, {"c": torch.ones(1)})]}, "kind": int}
    assert all(configs.shown(configs.stored(given))[key] is value for key, value in given.items())
    assert configs.stored({"kind": omegaconf.ListConfig}) == {"kind": {"holdfast_omegaconf_kind": "ListConfig"}}

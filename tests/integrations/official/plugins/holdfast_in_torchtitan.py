"""Puts Holdfast's checkpoint manager in the place of torchtitan's, a pytest plugin. Each folder has its own run."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from typing import Any

import pytest

from holdfast.integrations.torchtitan import HoldfastCheckpointConfig, HoldfastCheckpointManager

AT = os.environ["HOLDFAST_OFFICIAL"]


@dataclass(kw_only=True, slots=True)
class Options(HoldfastCheckpointConfig):
    """Takes the option of torchtitan's manager that says how it writes, too."""

    async_mode: str = "disabled"


class Manager(HoldfastCheckpointManager):
    """Its run is that of the folder."""

    Config = Options

    def __init__(self, config: Options, **given: Any) -> None:
        place = os.path.join(given["base_folder"], config.folder)
        config.run, config.at = f"test-{zlib.crc32(place.encode()):08x}", AT
        super().__init__(config, **given)


@pytest.fixture(autouse=True)
def holdfast_instead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request.module, "CheckpointManager", Manager)

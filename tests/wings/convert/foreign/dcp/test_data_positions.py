"""torchtitan's pickled positions in the data become values; what is not plain stays as it is, and is told."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.dcp import kinds
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def listed(place: Path, **positions: Any) -> ForeignListing:
    """A checkpoint as torchtitan saves it, of which each data-parallel rank has pickled its position."""
    pickled = {name: value if type(value) is bytes else pickle.dumps(value) for name, value in positions.items()}
    state = {"layers.0.weight": torch.ones(2), "dataloader": {**pickled, "world_size": len(positions)}}
    dcp.save(state, checkpoint_id=place, no_dist=True)
    return kinds.read_dcp(DirectoryFiles(place), ReadOptions())


def test_each_ranks_position(tmp_path: Path) -> None:
    """Under the keys of the adapter, beside torchtitan's own value, which an export needs."""
    listing = listed(tmp_path, dp_rank_0={"epoch": 1, "seen": (2, b"x")}, dp_rank_1={"epoch": 1, "seen": None})
    extra = listing.documents["extra"]
    assert extra["dataloader.0-of-2"] == {"epoch": 1, "seen": {"$tuple": [2, {"$bytes": "eA=="}]}}
    assert extra["dataloader.1-of-2"] == {"epoch": 1, "seen": None}
    assert extra["dataloader"]["world_size"] == 2 and listing.notes == ()


def test_a_position_that_is_not_plain(tmp_path: Path) -> None:
    """Nothing is executed: objects, arrays and damage are named in notes, and the pickles are kept."""
    more = {"dp_rank_1": Path(".").stat(), "dp_rank_2": pickle.dumps([1, 2])[:-1]}
    listing = listed(tmp_path, dp_rank_0={"seen": np.arange(3)}, **more)
    assert listing.documents["extra"].keys() == {"dataloader"}
    assert [note.partition(" was left out: ")[0] for note in listing.notes] == [
        f"the position in dataloader.dp_rank_{rank}" for rank in range(3)
    ]
    assert not any(key.group == "extra" for key in listing.tensors)

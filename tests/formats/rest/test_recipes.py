"""The recipe for the mean of a run's newest checkpoints names them, and none that is not sound."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_formats.errors import NoSuchCheckpoint
from holdfast_formats.rest.bodies import CheckpointInfo
from holdfast_formats.rest.recipes import average_of_last


def one(step: int, **changes: Any) -> CheckpointInfo:
    told = {"run": "a", "step": step, "attempt": 0, "created": "", "world": 1, "groups": ["model", "optim"], "tensors": 1}
    return CheckpointInfo.model_validate({**told, "files": 1, "bytes": 1, "metrics": {}, "verified": True, **changes})


LISTED = [
    one(9),
    one(10),
    one(11, abandoned=True),
    one(12, damage={"code": "x"}),
    one(13, healthy=False),
    one(14, groups=["optim"]),
    one(15, healthy=True),
]


def test_the_newest_sound_ones() -> None:
    wanted = "merge_method: linear\nmodels:\n  - model: a@15\n  - model: a@10\nparameters: {weight: 1.0}\n"
    assert average_of_last("a", LISTED, 2) == wanted
    assert average_of_last("a", LISTED, 2, "float32") == f"{wanted}dtype: float32\n"


def test_too_few() -> None:
    with pytest.raises(NoSuchCheckpoint, match="3 sound checkpoints with a model, not 4"):
        average_of_last("a", LISTED, 4)

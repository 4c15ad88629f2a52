"""Random states are written as a Trainer reads them, from the checkpoint that a Checkpointer saved."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.state import rng
from holdfast.tensors import json_values
from holdfast_service.wings.convert.exports import random_states
from holdfast_service.wings.convert.exports.plan import ExportPlan
from holdfast_service.wings.convert.exports.random_states import StateFiles
from tests.wings.convert.exports import sources


def exported(place: Path, values: dict[int, Any], ranks: tuple[int, ...], captured: rng.RandomStreams) -> StateFiles:
    """The files of a checkpoint in which each of these ranks has the same streams."""
    streams = {f"ranks/{rank:05d}/rng/{name}": one.numpy() for rank in ranks for name, one in captured.tensors.items()}
    arrays = {"model": {"a": np.ones(2, np.float32)}, "extra": streams}
    texts = {
        rank: {"extra": {"rng": value if isinstance(value, str) else json.dumps(value)}} for rank, value in values.items()
    }
    source = sources.made(place / "step", arrays, ranks=texts).source
    made = random_states.files(source)
    sources.write(source, ExportPlan(made.files), place / "out")
    return made


def test_they_continue_in_another_process(tmp_path: Path) -> None:
    """With numpy's words as a list, which every version of numpy reads, also where a rank has a number kept back."""
    random.gauss(0, 1)
    np.random.standard_normal()
    captured = rng.capture()
    text = json_values.dumps(captured.residual, "rng")
    made = exported(tmp_path, {0: text}, (0,), captured)
    assert [file.name for file in made.files] == ["rng_state.pth"] and not made.notes
    expected = (random.random(), random.gauss(0, 1), np.random.standard_normal(2).tolist(), torch.rand(2))
    found = torch.load(tmp_path / "out" / "rng_state.pth", weights_only=True)
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["cpu"])
    assert (random.random(), random.gauss(0, 1), np.random.standard_normal(2).tolist()) == expected[:3]
    assert torch.equal(torch.rand(2), expected[3]) and "cuda" not in found


def test_ranks_that_differ(tmp_path: Path) -> None:
    """Each rank has its own counts, and the states of its devices; another generator of numpy is named."""
    captured = rng.capture()
    captured.tensors["cuda.0"] = captured.tensors["cuda.1"] = torch.zeros(16, dtype=torch.uint8)
    residual = captured.residual
    other = {**residual, "numpy": {**residual["numpy"], "state": {"pos": 3}}}
    third = {**residual, "numpy": {**residual["numpy"], "bit_generator": "PCG64"}}
    made = exported(tmp_path, {0: residual, 1: other, 2: third}, (0, 1, 2), captured)
    assert [file.name for file in made.files] == ["rng_state_0.pth", "rng_state_1.pth"]
    assert any("rank 2" in note for note in made.notes)
    found = torch.load(tmp_path / "out" / "rng_state_1.pth", weights_only=True)
    assert found["numpy"][2] == 3 and len(found["cuda"]) == 2


def test_a_checkpoint_without_any(tmp_path: Path) -> None:
    made = exported(tmp_path, {}, (), rng.capture())
    assert made.files == () and "no random states" in made.notes[0]

"""After a restore that failed half-way nothing is trained on or saved until one succeeds (I7)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast import Checkpointer
from holdfast_formats import naming
from holdfast_formats.errors import CorruptExtent, StateOverwritten
from tests.checkpoints import flip
from tests.daemons import running

SIZE = 300_000  # more than one extent


class Counter:
    """A stateful part that can refuse to be loaded."""

    def __init__(self) -> None:
        self.count, self.refuses = 0, False

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise RuntimeError("not now")
        self.count = state["count"]


class Training:
    """A model, its optimizer and a counter, of which steps 1 and 2 were saved."""

    def __init__(self) -> None:
        self.model, self.counter = nn.Linear(SIZE, 1), Counter()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def checkpointer(self, root: Path) -> Checkpointer:
        return Checkpointer("r", {"model": self.model, "optim": self.optimizer, "counter": self.counter}, at=root)

    def step(self) -> None:
        self.model(torch.ones(SIZE)).sum().backward()
        self.optimizer.step()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wholeness") / "root"
    training = Training()
    with running(root), training.checkpointer(root) as checkpointer:
        for step in (1, 2):
            training.step()
            checkpointer.save(step, wait="durable")
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A copy whose step 2 is damaged in the last extent of the weights; no daemon serves it, none mends it."""
    copied = tmp_path / "root"
    shutil.copytree(saved, copied, ignore=shutil.ignore_patterns("*.sock"))
    path = copied / naming.checkpoint_path("r", 2) / "model.safetensors"
    flip(path, path.stat().st_size - 100)
    return copied


def test_neither_trained_on_nor_saved(root: Path) -> None:
    """The error says what became of live tensors, each way on is refused by name, and a restore that succeeds reopens it."""
    training = Training()
    training.step()
    checkpointer = training.checkpointer(root)
    with pytest.raises(CorruptExtent) as caught:
        checkpointer.restore(2)
    assert "partly overwritten" in caught.value.hint and "prove_first" in caught.value.hint
    before = training.model.weight.clone()
    with pytest.raises(StateOverwritten, match=r"among them extra/") as refused:
        training.step()
    assert "restore a sound step" in refused.value.hint
    assert torch.equal(training.model.weight, before)
    with pytest.raises(StateOverwritten):
        checkpointer.save(3)
    assert checkpointer.restore(1, groups=["model"]) == 1
    with pytest.raises(StateOverwritten, match=r"extra/"):  # what is not of the model is still of step 2
        checkpointer.save(3)
    assert checkpointer.restore(1) == 1
    training.step()
    checkpointer.close()


def test_with_the_proof_first_the_old_state_goes_on(root: Path) -> None:
    """Nothing was overwritten, so nothing is refused."""
    training = Training()
    before = training.model.weight.clone()
    checkpointer = training.checkpointer(root)
    with pytest.raises(CorruptExtent) as caught:
        checkpointer.restore(2, prove_first=True)
    assert "overwritten" not in caught.value.hint
    assert torch.equal(training.model.weight, before)
    training.step()
    checkpointer.close()


def test_what_is_no_tensor_counts_too(root: Path) -> None:
    """A part that cannot be loaded leaves the others of a step that this one is not of."""
    training = Training()
    training.counter.refuses = True
    checkpointer = training.checkpointer(root)
    with pytest.raises(RuntimeError, match="not now"):
        checkpointer.restore(1)
    with pytest.raises(StateOverwritten):
        training.step()
    training.counter.refuses = False
    assert checkpointer.restore(1) == 1
    training.step()
    checkpointer.close()

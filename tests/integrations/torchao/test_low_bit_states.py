"""torchao's low-bit optimizers: state is stored exactly, and a training that was restored goes on bit-equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast import Checkpointer
from holdfast.read.root_directory import open_checkpoint
from holdfast_formats.errors import StateMismatch
from tests.daemons import RunningDaemon
from tests.kit.daemons import own_daemon

torchao = pytest.importorskip("torchao.optim")
SIZE = 64  # 4096 values: smaller tensors are not quantised


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    """torchao compiles its step; not needed here, and it takes a compiler."""
    with torch.compiler.set_stance("force_eager"):
        yield


daemon = own_daemon(listen="none")


class Trainer:
    def __init__(self, kind: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU(), torch.nn.Linear(SIZE, SIZE))
        self.optimizer = getattr(torchao, kind)(self.model.parameters(), lr=1e-2, **options)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer}

    def train(self, *steps: int) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            batch = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(step))
            (self.model(batch) - batch).square().mean().backward()
            self.optimizer.step()

    def held(self) -> dict[str, torch.Tensor]:
        found = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else [""]
                found |= {f"{name}/{key}.{part}": (getattr(value, part) if part else value).clone() for part in names}
        return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return a.keys() == b.keys() and all(torch.equal(raw(a[name]), raw(b[name])) for name in a)


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"])
def test_training_goes_on_bit_equal(daemon: RunningDaemon, kind: str, stepped: bool) -> None:
    """Restored into a live state, or into an optimizer without any."""
    run, before, after = f"{kind}-{stepped}", Trainer(kind), Trainer(kind)
    before.train(1, 2, 3)
    with Checkpointer(run, before.state, at=daemon.socket) as checkpointer:
        checkpointer.save(3, wait="durable")
    with open_checkpoint(daemon.root, None, run, 3) as reader:
        assert reader.verify() == []
        assert {"0.weight/exp_avg.codes", "0.weight/exp_avg_sq.scale", "0.bias/exp_avg"} <= set(
            reader.manifest.tensors["optim"]
        )
    if stepped:
        after.train(8)
    with Checkpointer(run, after.state, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 3
    assert equal(after.held(), before.held())
    assert [type(v) for v in after.optimizer.state[after.model[0].weight].values()] == [
        type(v) for v in before.optimizer.state[before.model[0].weight].values()
    ]
    for trainer in (before, after):
        trainer.train(4, 5)
    assert equal(after.held(), before.held())


@pytest.mark.parametrize(("kind", "options"), [("AdamW8bit", {"block_size": 512}), ("AdamW4bit", {}), ("AdamWFp8", {})])
def test_another_state_is_refused(daemon: RunningDaemon, kind: str, options: dict[str, Any]) -> None:
    """Another block size or class, by name; nothing live has changed."""
    before, other = Trainer("AdamW8bit"), Trainer(kind, **options)
    before.train(1)
    other.train(2)
    held = other.held()
    run = f"refused-{kind}-{len(options)}"
    with Checkpointer(run, before.state, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    with Checkpointer(run, other.state, at=daemon.socket) as checkpointer, pytest.raises(StateMismatch, match="exp_avg"):
        checkpointer.restore()
    assert equal(other.held(), held)

"""What a user has written for load_state_dict() runs after a restore, or a note names it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from holdfast.state.train_state import TrainState
from holdfast_formats.errors import InvalidRequest
from tests.client.checkpoint_in_memory import Checkpoint


def total(tensor: torch.Tensor) -> torch.Tensor:
    """Of all elements, also where they are sharded."""
    whole = tensor.detach().sum()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


class Cached(nn.Linear):
    """Keeps what follows from its weight, where no state_dict() has it."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("total", torch.zeros(()), persistent=False)
        self.total: torch.Tensor
        self.version, self.times = 0, 0
        self.refresh()
        self.times = 0

    def refresh(self) -> None:
        self.total.copy_(total(self.weight))
        self.version, self.times = round(float(self.total)), self.times + 1


class WithHook(Cached):
    def __init__(self) -> None:
        super().__init__()
        self.keys: Any = None
        self.register_load_state_dict_post_hook(type(self).loaded)

    @staticmethod
    def loaded(module: Any, keys: Any) -> None:
        module.keys = keys
        module.refresh()


class WithPreHook(Cached):
    """As one that converts older names."""

    def __init__(self) -> None:
        super().__init__()
        self._register_load_state_dict_pre_hook(self.loading)

    def loading(self, state: Any, prefix: str, *_: Any) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}old")
        self.total.copy_(total(state[f"{prefix}weight"]))
        self.version, self.times = round(float(self.total)), self.times + 1


class WithOwnLoad(Cached):
    def _load_from_state_dict(self, *given: Any) -> None:  # type: ignore[override]
        super()._load_from_state_dict(*given)
        self.refresh()


class WithLoad(Cached):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        found = super().load_state_dict(state_dict, strict, assign)
        self.refresh()
        return found


def trained(model: nn.Module, **more: Any) -> Checkpoint:
    """A checkpoint of a model with other weights."""
    for parameter in model.parameters():
        parameter.detach().add_(3)
    return Checkpoint(TrainState({"model": model, **more}, 0, 1).snapshot())


def restored(state: TrainState, checkpoint: Checkpoint, **options: Any) -> list[str]:
    """The notes of a restore."""
    found = state.prepare(checkpoint.stored(), **options)
    checkpoint.fill(found)
    found.apply()
    return found.notes


def in_sequence(kind: type[Cached]) -> nn.Module:
    return nn.Sequential(nn.ReLU(), kind())


MADE: dict[str, Callable[[], nn.Module]] = {
    "post-hook": WithHook,
    "post-hook below": partial(in_sequence, WithHook),
    "pre-hook": WithPreHook,
    "pre-hook below": partial(in_sequence, WithPreHook),
    "_load_from_state_dict": WithOwnLoad,
    "_load_from_state_dict below": partial(in_sequence, WithOwnLoad),
    "load_state_dict": WithLoad,
    "under torch.compile": lambda: torch.compile(WithLoad(), backend="eager"),  # type: ignore[return-value]
    "in an average": lambda: AveragedModel(WithHook()),
}


@pytest.mark.parametrize("kind", MADE)
def test_it_runs_once_all_tensors_are_there(kind: str) -> None:
    """Once, the weights keep the bits of the checkpoint, and what it sets is no change of the training."""
    saved, live = MADE[kind](), MADE[kind]()
    checkpoint, state = trained(saved), TrainState({"model": live}, 0, 1)
    assert not restored(state, checkpoint)
    (cached,) = (part for part in live.modules() if isinstance(part, Cached))
    assert cached.times == 1 and cached.version == round(float(total(cached.weight)))
    assert cached.total == total(cached.weight)
    assert all(map(torch.equal, saved.state_dict().values(), live.state_dict().values()))
    if isinstance(cached, WithHook):
        assert cached.keys == ([], [])
    assert not state.snapshot().notes
    cached.version += 1
    assert any(".version;" in note for note in state.snapshot().notes)


@pytest.mark.parametrize("kind", [WithHook, WithLoad, WithOwnLoad])
def test_it_does_not_run_where_its_module_is_not_restored(kind: type[Cached]) -> None:
    """Neither for other groups, nor if all of its own is left out."""
    live = kind()
    checkpoint, state = trained(kind()), TrainState({"model": live}, 0, 1)
    restored(state, checkpoint, groups=("extra",))
    restored(state, checkpoint, ignore=("model/*",))
    assert live.times == 0


def test_hooks_run_from_the_inside_out_and_before_random_streams() -> None:
    """As torch calls them; what they draw does not change what the training draws next."""
    live, seen = nn.Sequential(WithHook(), nn.Sequential(WithHook())), []
    for name, part in live.named_modules():
        part.register_load_state_dict_post_hook(lambda module, keys, name=name: seen.append((name, torch.rand(1))))
    state = TrainState({"model": live}, 0, 1)
    checkpoint = trained(nn.Sequential(WithHook(), nn.Sequential(WithHook())))
    drawn = torch.rand(1)
    restored(state, checkpoint)
    assert [name for name, _ in seen] == ["0", "1.0", "1", ""]
    assert torch.rand(1) == drawn


def fails(*given: Any) -> None:
    raise ValueError("no table")


def test_one_that_raises_is_named() -> None:
    """With its module, and with what to do."""
    live = nn.Sequential(WithHook())
    live[0].register_load_state_dict_post_hook(fails)
    with pytest.raises(InvalidRequest, match=r"post-hook of model\.0 raised ValueError after .*: no table") as raised:
        restored(TrainState({"model": live}, 0, 1), trained(nn.Sequential(WithHook())))
    assert "restore again" in raised.value.hint


def of_framework(*given: Any) -> None:
    raise AssertionError("a hook of a framework was called")


of_framework.__module__ = "transformers.modeling_utils"


def test_those_of_frameworks_are_left_alone() -> None:
    """Also where they are wrapped, and of torch: these adapt what load_state_dict() is given."""
    live = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2)), nn.BatchNorm1d(2), nn.MultiheadAttention(2, 1))
    saved = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2)), nn.BatchNorm1d(2), nn.MultiheadAttention(2, 1))
    live[0].register_load_state_dict_post_hook(of_framework)
    live[0].register_load_state_dict_post_hook(partial(of_framework, 1))
    live[0]._register_load_state_dict_pre_hook(of_framework, with_module=True)
    assert not restored(TrainState({"model": live}, 0, 1), trained(saved))


def stepped(kind: type[torch.optim.SGD]) -> tuple[nn.Module, torch.optim.SGD]:
    model = nn.Linear(1, 1)
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1)).backward()
    optimizer.step()
    return model, optimizer


class Loading(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def test_hooks_of_optimizers_run_and_what_cannot_is_named() -> None:
    """A hook sees the restored state. load_state_dict() would cast the state to the dtype of the weights."""
    saved, seen = stepped(torch.optim.SGD), []
    checkpoint = Checkpoint(TrainState(dict(zip(("model", "optim"), saved, strict=True)), 0, 1).snapshot())
    model = nn.Linear(1, 1)
    optimizer = Loading(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append(one.state[model.weight]["momentum_buffer"]))
    state = TrainState({"model": model, "optim": optimizer}, 0, 1)
    (note,) = restored(state, checkpoint)
    assert "load_state_dict() of optim (Loading)" in note and "register_load_state_dict_post_hook()" in note
    assert len(seen) == 1 and torch.equal(seen[0], saved[1].state[saved[0].weight]["momentum_buffer"])
    restored(state, checkpoint, groups=("model",))
    assert len(seen) == 1
    optimizer.register_load_state_dict_pre_hook(lambda one, given: None)
    assert "a load_state_dict() pre-hook of optim" in restored(state, checkpoint)[0]


@pytest.mark.filterwarnings("ignore:FSDP")
def test_under_fsdp1_it_is_named(single_process_group: None) -> None:
    """Its parameters are flat shards there, which no hook expects."""
    live = FullyShardedDataParallel(WithHook(), use_orig_params=True, device_id=torch.device("cpu"))
    saved = FullyShardedDataParallel(WithHook(), use_orig_params=True, device_id=torch.device("cpu"))
    checkpoint = Checkpoint(TrainState({"model": saved}, 0, 1).snapshot())
    (note,) = restored(TrainState({"model": live}, 0, 1), checkpoint)
    assert "not called by the restore: a load_state_dict() post-hook of model" in note and "FSDP1" in note
    assert live.module.times == 0


@pytest.mark.parametrize("kind", [WithHook, WithPreHook, WithOwnLoad, WithLoad])
def test_under_fsdp2_it_runs(kind: type[Cached], single_process_group: None) -> None:
    """With sharded parameters, as torch's load_state_dict() runs it there."""
    live, saved = nn.Sequential(fully_shard(kind())), nn.Sequential(fully_shard(kind()))
    live = live if kind is not WithLoad else live[0]  # type: ignore[assignment]
    saved = saved if kind is not WithLoad else saved[0]  # type: ignore[assignment]
    assert not restored(TrainState({"model": live}, 0, 1), trained(saved))
    (cached,) = (part for part in live.modules() if isinstance(part, Cached))
    assert cached.times == 1 and cached.version == round(float(total(cached.weight)))

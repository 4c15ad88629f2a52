"""Optimizer state in wrapper tensors is stored exactly, as the plain tensors inside, and put together again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from holdfast import Checkpointer
from holdfast.read.root_directory import open_checkpoint
from holdfast.state.hyper_parameters import FirstRates
from holdfast.state.optimizers import KeyedOptimizers
from holdfast.state.partitioned.owners import RestoredForAll
from holdfast.tensors import wrapped
from holdfast.tensors.fragments import Fragment
from holdfast.tensors.leaves import Content
from holdfast_formats import naming
from holdfast_formats.errors import CorruptManifest, InvalidRequest, StateMismatch
from tests.daemons import RunningDaemon


class Blocks(torch.Tensor):
    """State in blocks of 8-bit codes with a scale each: like torchao's, in a page of code."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool, dtype: torch.dtype) -> Blocks:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool, dtype: torch.dtype) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.signed, (self.codes.numel() // self.scale.numel(),), self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Blocks:
        signed, (block,), dtype = context
        assert inner["codes"].numel() == block * inner["scale"].numel()
        return cls(inner["codes"], inner["scale"], signed, dtype)

    @classmethod
    def zeros(cls, like: torch.Tensor, block: int, signed: bool = True) -> Blocks:
        codes = torch.zeros(like.shape, dtype=torch.uint8)
        return cls(codes, torch.zeros(like.numel() // block), signed, like.dtype)

    def dequantize(self) -> torch.Tensor:
        spread = self.scale.repeat_interleave(self.codes.numel() // self.scale.numel()).view(self.codes.shape)
        return (self.codes.float() - 127) * spread

    def put(self, values: torch.Tensor) -> None:
        blocks = values.reshape(self.scale.numel(), -1)
        self.scale.copy_(blocks.abs().amax(1).clamp(min=1e-12) / 127)
        self.codes.copy_(((blocks / self.scale[:, None]).round() + 127).to(torch.uint8).view(self.codes.shape))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            made = cls(args[0].codes.detach(), args[0].scale.detach(), args[0].signed, args[0].dtype)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        raise NotImplementedError(f"{func} of a {cls.__name__}")


class OtherBlocks(Blocks):
    """Another class of the same parts."""


class Momentum(torch.optim.Optimizer):
    """Momentum in blocks; a bias has plain state, as small tensors have in torchao."""

    def __init__(self, params: Any, block: int = 8, kind: type[Blocks] = Blocks, signed: bool = True) -> None:
        super().__init__(params, {"lr": 0.1})
        self.block, self.kind, self.signed = block, kind, signed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    small = parameter.dim() < 2
                    made = torch.zeros_like(parameter) if small else self.kind.zeros(parameter, self.block, self.signed)
                    state["momentum"], state["step"] = made, torch.tensor(0.0)
                held = state["momentum"]
                old = held.dequantize() if isinstance(held, Blocks) else held
                new = 0.9 * old + parameter.grad
                held.put(new) if isinstance(held, Blocks) else held.copy_(new)
                parameter.sub_(group["lr"] * new)
                state["step"] += 1


class Trainer:
    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(16, 4)
        self.optimizer = Momentum(self.model.parameters(), **options)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer}

    def train(self, *steps: int) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.model(torch.full((3, 16), float(step))).square().mean().backward()
            self.optimizer.step()

    def held(self) -> dict[str, torch.Tensor]:
        momentum = self.optimizer.state[self.model.weight]["momentum"]
        return {
            "codes": momentum.codes.clone(),
            "scale": momentum.scale.clone(),
            "weight": self.model.weight.detach().clone(),
        }


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def saved(daemon: RunningDaemon, request: pytest.FixtureRequest) -> tuple[str, Trainer]:
    run, trainer = f"run-{abs(hash(request.node.name))}", Trainer()
    with Checkpointer(run, trainer.state, at=daemon.socket) as checkpointer:
        trainer.train(1, 2)
        checkpointer.save(2, wait="durable")
        trainer.train(3)
        checkpointer.save(3, wait="durable")  # by a walk that was made for the save before
    return run, trainer


def test_it_is_stored_as_the_tensors_inside(daemon: RunningDaemon, saved: tuple[str, Trainer]) -> None:
    """Under their own names, bit for bit, at every save; what the wrapper is stands in the document."""
    run, trainer = saved
    with open_checkpoint(daemon.root, None, run, 3) as reader:
        names = set(reader.manifest.tensors["optim"])
        assert names == {"weight/momentum.codes", "weight/momentum.scale", "weight/step", "bias/momentum", "bias/step"}
        assert reader.read("optim", "weight/momentum.codes").tolist() == trainer.held()["codes"].tolist()
    state = json.loads((daemon.root / naming.checkpoint_path(run, 3) / naming.STATE).read_bytes())
    (said,) = state["groups"]["optim"]["optim"]["all"]["wrapped"]["weight"].values()
    assert said["class"] == f"{Blocks.__module__}:Blocks" and said["inner"] == ["codes", "scale"]
    assert said["context"] == ["list", [True, ["tuple", [8]], ["dtype", "float32"]]]


@pytest.mark.parametrize("stepped", [True, False])
def test_it_is_restored_exactly(daemon: RunningDaemon, saved: tuple[str, Trainer], stepped: bool) -> None:
    """Into live state in place, and into an optimizer that has none yet; training goes on bit-equal."""
    run, before = saved
    after = Trainer()
    if stepped:
        after.train(7, 8)
    live = after.optimizer.state[after.model.weight].get("momentum")
    with Checkpointer(run, after.state, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 3
    made = after.optimizer.state[after.model.weight]["momentum"]
    assert type(made) is Blocks and made.signed is True and made.dtype == torch.float32
    assert live is None or made is live
    assert equal(after.held(), before.held())
    for trainer in (before, after):
        trainer.train(4, 5, 6)
    assert equal(after.held(), before.held())
    assert after.optimizer.state[after.model.weight].keys() == {"momentum", "step"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block": 16}, r"weight/momentum: a Blocks of shape .* was stored, but the live one is a Blocks .*16"),
        ({"kind": OtherBlocks}, "was stored, but the live one is a OtherBlocks"),
        ({"signed": False}, "but the live one is a Blocks of shape"),
    ],
)
def test_another_wrapper_is_refused_by_name(
    daemon: RunningDaemon, saved: tuple[str, Trainer], options: dict[str, Any], said: str
) -> None:
    """Another block size, class or context; nothing live has changed then."""
    other = Trainer(**options)
    other.train(9)
    before = other.held()
    with Checkpointer(saved[0], other.state, at=daemon.socket) as checkpointer, pytest.raises(StateMismatch, match=said):
        checkpointer.restore(strict=False)
    assert equal(other.held(), before)


@pytest.mark.parametrize("way", ["wrapper to plain", "plain to wrapper"])
def test_plain_state_is_no_wrapper(daemon: RunningDaemon, way: str) -> None:
    """Either way it is refused, also where names may be missing."""
    quantised, plain = Trainer(), Trainer()
    plain.optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.1, momentum=0.9)  # type: ignore[assignment]
    for trainer in (quantised, plain):
        trainer.train(1)
    for trainer in (plain, quantised):
        for kept in trainer.optimizer.state.values():  # under one key
            if "momentum_buffer" in kept:
                kept["momentum"] = kept.pop("momentum_buffer")
    run = way.replace(" ", "-")
    saver, restorer = (quantised, plain) if way == "wrapper to plain" else (plain, quantised)
    with Checkpointer(run, saver.state, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    with (
        Checkpointer(run, restorer.state, at=daemon.socket) as checkpointer,
        pytest.raises(StateMismatch, match="was stored"),
    ):
        checkpointer.restore(strict=False)


def test_a_class_that_is_not_loaded_is_refused(daemon: RunningDaemon, saved: tuple[str, Trainer], monkeypatch) -> None:
    """Nothing is imported because a checkpoint says so."""
    monkeypatch.delattr("tests.client.tensors.test_wrapped.Blocks")
    trainer = Trainer()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)  # type: ignore[assignment]
    with (
        Checkpointer(saved[0], trainer.state, at=daemon.socket) as checkpointer,
        pytest.raises(StateMismatch, match="which is not loaded in this process"),
    ):
        checkpointer.restore()


def test_inner_tensors_that_were_replaced_are_seen(daemon: RunningDaemon, tmp_path: Path) -> None:
    """A later save has the new ones, though the wrapper is the same."""
    trainer = Trainer()
    trainer.train(1)
    with Checkpointer("replaced", trainer.state, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
        momentum = trainer.optimizer.state[trainer.model.weight]["momentum"]
        momentum.codes = torch.full_like(momentum.codes, 77)
        checkpointer.save(2, wait="durable")
    with open_checkpoint(daemon.root, None, "replaced", 2) as reader:
        assert set(reader.read("optim", "weight/momentum.codes").reshape(-1).tolist()) == {77}


def test_state_of_a_sharded_parameter_is_refused() -> None:
    """Blocks of codes cross the edges of shards."""
    parameter = torch.nn.Parameter(torch.zeros(2, 8))
    optimizer = Momentum([parameter])
    parameter.grad = torch.ones(2, 8)
    optimizer.step()
    names = {id(parameter): ("w", Fragment(parameter.data, (4, 8), offset=(2, 0)))}
    with pytest.raises(InvalidRequest, match="w/momentum is a Blocks, and its parameter is sharded"):
        KeyedOptimizers("optim", (optimizer,), names, FirstRates(), RestoredForAll()).collect(Content())


def test_what_cannot_be_described_is_refused() -> None:
    """A context with an object, and a wrapper in a wrapper."""
    plain = Blocks.zeros(torch.zeros(2, 8), 8)
    plain.signed = object()  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="the context of this wrapper tensor has a object"):
        wrapped.describe(plain, "here")
    outer = Blocks.zeros(torch.zeros(2, 8), 8)
    outer.codes = Blocks.zeros(torch.zeros(2, 8), 8)
    with pytest.raises(InvalidRequest, match="whose codes is a Blocks cannot be stored"):
        wrapped.inner(outer, "here")


@pytest.mark.parametrize(
    "wrong",
    [
        {"inner": ["../x"]},
        {"shape": "no"},
        {"stride": [True]},
        {"context": ["dtype", "os"]},
        {"context": ["object", []]},
        {"class": "os:system"},
        {"class": "torch:Tensor"},
        {"class": 5},
    ],
)
def test_a_description_that_is_wrong_is_refused(wrong: dict[str, Any]) -> None:
    """Whatever a checkpoint says, nothing but a loaded wrapper class is called."""
    made = Blocks.zeros(torch.zeros(2, 8), 8)
    said = {**json.loads(json.dumps(wrapped.describe(made, "here"))), **wrong}
    with pytest.raises((CorruptManifest, StateMismatch)):
        checked = wrapped.check_description(said, "here")
        wrapped.build(wrapped.find_class(checked, "here"), checked, wrapped.inner(made, "here"), "here")
    with pytest.raises(CorruptManifest):
        wrapped.check_description(None, "here")

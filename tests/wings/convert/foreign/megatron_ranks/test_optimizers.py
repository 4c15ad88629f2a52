"""The optimizer of Megatron's ranks gets the names of its parameters, or is refused: nothing gets a state of another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast_formats.errors import StateMismatch
from tests.wings.convert.foreign.dcp.directories import assert_same
from tests.wings.convert.foreign.megatron_ranks.ranks import Beside, Tensors, model, read, saved

KINDS = ("exp_avg", "exp_avg_sq")
FLAT = "distrib_optim.pt"
NORM = "decoder.final_layernorm.weight"
Cut = Callable[[str, torch.Tensor], torch.Tensor]


class Trained:
    """A model in 16 bits with its masters and moments; one weight stays in 32 bits."""

    def __init__(self, narrow: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(1)
        self.masters = {name: torch.randn(one.shape) for name, one in model(True).items()}
        self.weights = {name: one if name == NORM else one.to(narrow) for name, one in self.masters.items()}
        self.moments = {kind: {name: torch.rand(one.shape) for name, one in self.masters.items()} for kind in KINDS}

    @property
    def narrow(self) -> list[str]:
        return [name for name, one in self.weights.items() if one.dtype != torch.float32]

    @property
    def optim(self) -> Tensors:
        """Group `optim` of the import."""
        named = {f"{name}/{kind}": one for kind, held in self.moments.items() for name, one in held.items()}
        return {**named, **{f"{name}/step": torch.tensor(7.0) for name in self.weights}}

    def groups(self, names: list[str], numbered: bool = True) -> tuple[list[dict[str, Any]], list[list[str]]]:
        """Parameter groups as Megatron makes them: those without weight decay first, by the order of its keys."""
        plain = [name for name in names if self.masters[name].ndim == 1 or name.endswith(".bias")]
        members = [plain, [name for name in names if name not in plain]]
        made, at = [], 0
        for mult, group in zip((0.0, 1.0), members, strict=True):
            about = {"lr": 0.5, "wd_mult": mult, "betas": (0.9, 0.99), "step": 7}
            if numbered:
                about["params"] = list(range(at, at + len(group)))
                del about["step"]
            made.append(about)
            at += len(group)
        return made, members

    def by_number(self, place: Path, names: list[str], cut: Cut) -> dict[str, Any]:
        """`Float16OptimizerWithFloat16Params.state_dict()`."""
        groups, members = self.groups(names)
        ordered = [name for group in members for name in group]
        state: dict[int, dict[str, Any]] = {
            number: {kind: cut(name, held[name]) for kind, held in self.moments.items()}
            for number, name in enumerate(ordered)
        }
        for held in state.values():
            held["step"] = torch.tensor(7.0)
        masters = [[cut(name, self.masters[name]) for name in group if name in self.narrow] for group in members]
        inner = {"state": state, "param_groups": groups}
        return {
            "optimizer": {
                "optimizer": inner,
                "fp32_from_fp16_params": masters,
                "grad_scaler": {"scale": torch.tensor([8.0])},
            }
        }

    def distributed(self, place: Path, names: list[str], cut: Cut, buckets: int = 1) -> dict[str, Any]:
        """The state dict of the distributed optimizer, whose parameters are in a file of their own."""
        value: dict[Any, Any] = {"buckets_coalesced": True}
        for number, dtype in enumerate((torch.bfloat16, torch.float32)):
            mine = [name for name in reversed(names) if self.weights[name].dtype == dtype]
            made = {key: list[torch.Tensor]() for key in ("param", *KINDS)}
            for name in mine:
                for key, held in {"param": self.masters, **self.moments}.items():
                    start = sum(map(len, made[key]))
                    padding = -start % 64 if buckets == 1 or name not in mine[2:3] else 0  # a bucket's padding is not stored
                    made[key] += [torch.zeros(padding), cut(name, held[name]).flatten()]
            whole = {key: torch.cat(parts) if parts else torch.zeros(0) for key, parts in made.items()}
            if mine:
                value[number] = {(dtype, torch.float32): {**whole, "numel_unpadded": len(whole["param"])}}
        torch.save(value, place / FLAT)
        return {"optimizer": {"optimizer": {"param_groups": self.groups(names, numbered=False)[0]}}}


@pytest.mark.parametrize(("ranks", "stages", "chunks"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2)])
def test_by_number(tmp_path: Path, ranks: int, stages: int, chunks: int) -> None:
    """Masters, moments and steps of any number of ranks and stages are joined as the weights are."""
    trained = Trained()
    saved(tmp_path, ranks, stages, chunks=chunks, beside=trained.by_number, tensors=trained.weights)
    listing = read(tmp_path)
    assert_same(tmp_path, listing, "model", trained.weights)
    assert_same(tmp_path, listing, "optim", trained.optim)
    assert_same(tmp_path, listing, "master", {name: trained.masters[name] for name in trained.narrow})
    held = listing.documents["optim"]["optimizer"]
    members = {name for group in held["groups"].values() if isinstance(group, dict) for name in group["params"]}
    assert members == set(trained.weights) and set(held["masters"]["master_param"]) == set(trained.narrow)
    rates = {group["wd_mult"]: group["lr"] for group in held["groups"].values() if isinstance(group, dict)}
    assert rates == {0.0: 0.5, 1.0: 0.5}
    assert_same(tmp_path, listing, "extra", {"grad_scaler/scale": torch.tensor([8.0])})


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 2)])
def test_the_distributed_optimizer(tmp_path: Path, ranks: int, stages: int) -> None:
    """One buffer for each dtype of weights, the last parameter first; its file is used, not refused."""
    trained = Trained()
    saved(tmp_path, ranks, stages, beside=trained.distributed, tensors=trained.weights)
    listing = read(tmp_path)
    assert_same(tmp_path, listing, "optim", trained.optim)
    assert_same(tmp_path, listing, "master", {name: trained.masters[name] for name in trained.narrow})
    flat = {use.use for use in listing.files if use.file.endswith(FLAT)}
    assert flat == {"tensors"}


def test_training_in_32_bits(tmp_path: Path) -> None:
    """There are no masters, and the state is torch's own."""
    trained = Trained(torch.float32)

    def beside(place: Path, names: list[str], cut: Cut) -> dict[str, Any]:
        return {"optimizer": trained.by_number(place, names, cut)["optimizer"]["optimizer"]}

    saved(tmp_path, 2, 1, beside=beside, tensors=trained.weights)
    listing = read(tmp_path)
    assert_same(tmp_path, listing, "optim", trained.optim)
    assert not [key for key in listing.tensors if key.group == "master"]
    assert listing.documents["optim"]["optimizer"]["masters"] == {}


def test_without_the_optimizer(tmp_path: Path) -> None:
    """By either option; what is left out is on record, once for all ranks."""
    trained = Trained()
    saved(tmp_path, 2, 1, beside=trained.by_number, tensors=trained.weights)
    for options in ({"weights_only": True}, {"leave_out": ("optimizer",)}):
        listing = read(tmp_path, **options)
        assert {key.group for key in listing.tensors} == {"model"} and "optim" not in listing.documents
        whats = [part.what for part in listing.left_out]
        assert whats and len(set(whats)) == len(whats)
        assert sum(part.tensors for part in listing.left_out) >= 2 * len(trained.weights)


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Trained], Beside]:
    def make(trained: Trained) -> Beside:
        def beside(place: Path, names: list[str], cut: Cut) -> dict[str, Any]:
            made = trained.by_number(place, names, cut)
            change(made["optimizer"])
            return made

        return beside

    return make


def _swapped(held: dict[str, Any]) -> None:
    """Two matrices of one shape change places, as another order of modules would have it."""
    masters = held["fp32_from_fp16_params"][1]
    shapes = [tuple(one.shape) for one in masters]
    first = next(n for n, shape in enumerate(shapes) if shape in shapes[n + 1 :])
    second = shapes.index(shapes[first], first + 1)
    masters[first], masters[second] = masters[second], masters[first]


def _buckets(trained: Trained) -> Beside:
    return lambda place, names, cut: trained.distributed(place, names, cut, buckets=2)


REFUSED: dict[str, tuple[Callable[[Trained], Beside], str]] = {
    "another order": (changed(_swapped), "another parameter in the place of"),
    "several optimizers": (lambda _: lambda *_: {"optimizer": [{}, {}]}, "no parameter groups"),
    "no state": (changed(lambda held: held["optimizer"]["state"].pop(3)), "no state of parameter 3"),
    "a shape": (changed(lambda held: held["optimizer"]["state"][0].update(exp_avg=torch.ones(3))), "'exp_avg' of shape"),
    "codes": (
        changed(lambda held: held["optimizer"]["state"][0].update(exp_avg=torch.ones(8, dtype=torch.uint8))),
        "no F32 'exp_avg'",
    ),
    "a parameter less": (changed(lambda held: held["optimizer"]["param_groups"][0]["params"].pop()), "groups of"),
    "one decay for all": (changed(lambda held: held["optimizer"]["param_groups"][0].update(wd_mult=1.0)), "weight decay"),
    "a master less": (changed(lambda held: held["fp32_from_fp16_params"][1].pop()), "masters in a group"),
    "masters in one list": (changed(lambda held: held["fp32_from_fp16_params"].pop()), "list of masters"),
    "no steps": (changed(lambda held: held["optimizer"]["state"][1].pop("step")), "no number of steps"),
    "several buckets": (_buckets, "several buckets"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    """By its key, with what goes on; the weights alone are imported."""
    make, said = REFUSED[case]
    trained = Trained()
    saved(tmp_path, 1, 1, beside=make(trained), tensors=trained.weights)
    with pytest.raises(StateMismatch, match=said) as refused:
        read(tmp_path)
    assert "--leave-out optimizer" in (refused.value.hint or "") and "--weights-only" in (refused.value.hint or "")
    listing = read(tmp_path, weights_only=True)
    assert_same(tmp_path, listing, "model", trained.weights)
    assert any(part.what == "optim/optimizer" for part in listing.left_out)

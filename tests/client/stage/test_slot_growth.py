"""The memory for saves, end to end: less than wanted, none at all, and a state that grows. All with real daemons."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast import Checkpointer
from holdfast.stage.slot_growth import Change, compare
from holdfast.tensors.leaves import Leaf
from holdfast_formats.errors import LimitExceeded
from tests.daemons import running

MIB = 2**20


def tensors(seed: int, count: int = 3, size: int = MIB) -> dict[str, torch.Tensor]:
    """Some tensors of a MiB each."""
    generator = torch.Generator().manual_seed(seed)
    return {f"t{i}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for i in range(count)}


def save_and_check(checkpointer: Checkpointer, state: dict, steps: range) -> None:
    """Save other contents at every step, and find the last one's again."""
    for step in steps:
        for name, tensor in tensors(step, len(state["weights"]), len(state["weights"]["t0"])).items():
            state["weights"][name].copy_(tensor)
        checkpointer.save(step, wait="durable")
    expected = {name: tensor.clone() for name, tensor in state["weights"].items()}
    for tensor in state["weights"].values():
        tensor.zero_()
    assert checkpointer.restore() == steps[-1]
    assert all(torch.equal(state["weights"][name], tensor) for name, tensor in expected.items())


def leaf(name: str, *shape: int, dtype: str = "F32") -> Leaf:
    return Leaf("model", name, dtype, shape, (), "replicate")


def test_what_changed_is_told_by_name() -> None:
    """Added, removed, and of another dtype or shape; groups that are not saved now do not count."""
    kept, other = leaf("kept", 3), Leaf("optim", "m", "F32", (3,), (), "replicate")
    before = [kept, leaf("gone", 2), leaf("cast", 4), leaf("wider", 4), other]
    now = [leaf("kept", 3), leaf("cast", 4, dtype="BF16"), leaf("wider", 5), leaf("lora", 9)]
    change = compare(before, now)
    assert change == Change(("model/lora",), ("model/gone",), ("model/cast", "model/wider"))
    assert str(change) == "tensors: 1 added, 1 removed, 2 changed, for example model/lora, model/cast, model/wider"
    assert not any(compare(before, before)) and not any(compare(before, [other]))


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (3, ("1 slot instead of 2", f"--arena-bytes-max, {5 * MIB} bytes")),
        (9, ("staging uses", "{root}", "MiB/s")),  # memory for less than a slot: the root's disk has to do
    ],
    ids=["one slot where two do not fit", "through the disk"],
)
def test_staging_in_little_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int, said: tuple[str, ...]
) -> None:
    """Saves go on, bit for bit, and the checkpointer says what is missing or what it costs, as the logs do."""
    state = {"weights": tensors(0, count)}
    with (
        running(tmp_path / "root", "--arena-bytes-max", str(5 * MIB)) as daemon,
        Checkpointer("r", state, at=daemon.socket) as checkpointer,
    ):
        save_and_check(checkpointer, state, range(1, 5))
        (notice,) = checkpointer.notices
        assert all(part.format(root=daemon.root) in notice for part in said)
        assert notice in caplog.text and (count > 3 or notice in daemon.log.read_text())
        assert not (daemon.root / ".scratch").exists()


def test_without_the_disk_it_is_refused(tmp_path: Path) -> None:
    """`--spill never` refuses the save with the numbers; a state that fits is saved afterwards."""
    state = {"weights": tensors(0, 9)}
    with (
        running(tmp_path / "root", "--arena-bytes-max", str(5 * MIB), "--spill", "never") as daemon,
        Checkpointer("r", state, at=daemon.socket) as checkpointer,
    ):
        with pytest.raises(LimitExceeded, match=rf"0 are reserved, and {5 * MIB * 96 // 100} are left of --arena-bytes-max"):
            checkpointer.save(1)
        for name in list(state["weights"])[2:]:
            del state["weights"][name]
        save_and_check(checkpointer, state, range(2, 4))


def test_a_state_that_grows_says_so_and_loses_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """New tensors get larger slots and a notice; the saves in the old ones are committed; the budget is never exceeded."""
    caplog.set_level(logging.INFO, "holdfast")
    model = nn.Linear(512, 512, bias=False)
    state = {"model": model}
    with (
        running(tmp_path / "root", "--arena-bytes-max", str(7 * MIB), "--spill", "never") as daemon,
        Checkpointer("r", state, at=daemon.socket, policy="wait") as checkpointer,
    ):
        tickets = [checkpointer.save(step) for step in (1, 2)]
        assert checkpointer.notices == ()
        model.register_parameter("lora_a", nn.Parameter(torch.randn(512, 512)))
        model.register_parameter("lora_b", nn.Parameter(torch.randn(512, 512)))
        tickets += [checkpointer.save(step) for step in (3, 4)]
        (notice,) = checkpointer.notices
        added = "tensors: 2 added, for example model/lora_a, model/lora_b"
        assert f"no longer fits its slots of 1.1 MiB ({added}): reserved new slots of 3.1 MiB" in notice
        model.to(torch.float64)
        tickets.append(checkpointer.save(5))
        assert len(checkpointer.notices) == 3 and "3 changed, for example model/weight" in checkpointer.notices[1]
        assert "1 slot instead of 2" in checkpointer.notices[2]
        expected = model.lora_b.detach().clone()
        del model.lora_a
        tickets.append(checkpointer.save(6))
        assert len(checkpointer.notices) == 3
        assert (
            "this save has other tensors than the last one and still fits its slots "
            "(tensors: 1 removed, for example model/lora_a)" in caplog.text
        )
        for ticket in tickets:
            assert ticket.result() is not None
        with torch.no_grad():
            model.lora_b.zero_()
        assert checkpointer.restore() == 6 and torch.equal(model.lora_b, expected)

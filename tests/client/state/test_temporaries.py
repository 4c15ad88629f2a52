"""What an object made for a moment is refused, with the line to write; what the user trains with directly is not."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from holdfast.state.named_entries import NamedEntry
from holdfast.state.temporaries import Temporaries
from holdfast.state.train_state import TrainState
from holdfast_formats.errors import InvalidRequest
from tests.client.checkpoint_in_memory import restore, save

Made = dict[str, Any]


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module", autouse=True)
def objects() -> None:
    """Made when tests run: what was made by imports is not found (tests/conftest.py)."""
    global MODEL, OPTIMIZER, SCHEDULER
    MODEL, OPTIMIZER = trained()
    SCHEDULER = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 2)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LOADER = {"_snapshot": {"_snapshot_step": 1}, "_steps_since_snapshot": 0, "_iterator_finished": False}


class Views(Mapping[str, torch.Tensor]):
    """A mapping that makes its tensors when it is asked for them."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.ones(2)

    def __iter__(self) -> Iterator[str]:
        return iter(("a",))

    def __len__(self) -> int:
        return 1


REFUSED: dict[str, tuple[Callable[[], Made], str, str]] = {
    "model": (lambda: {"model": MODEL.state_dict()}, "model.weight", 'state["model"] = model'),
    "both": (lambda: {"model": MODEL.state_dict(), "optim": OPTIMIZER.state_dict()}, "optim", 'state["optim"] = optimizer'),
    "a dict of it": (lambda: {"model": dict(MODEL.state_dict())}, "model.weight", 'state["model"] = model'),
    "detached": (lambda: {"w": MODEL.weight.detach()}, "w", 'state["w"] = model'),
    "data": (lambda: {"w": {"x": MODEL.weight.data}}, "w.x", 'state["w"] = model'),
    "DCP model": (lambda: {"model": get_model_state_dict(MODEL)}, "model.weight", 'state["model"] = model'),
    "DCP optimizer": (lambda: {"o": get_optimizer_state_dict(MODEL, OPTIMIZER)}, "o", 'state["o"] = optimizer'),
    "DCP flattened": (lambda: {"o": get_optimizer_state_dict(MODEL, OPTIMIZER, options=FLAT)}, "o", "= optimizer"),
    "nested": (lambda: {"train": {"optim": OPTIMIZER.state_dict()}}, "train.optim", 'state["train_optim"] = optimizer'),
    "in a list": (lambda: {"optims": [OPTIMIZER.state_dict()]}, "optims[0]", "= optimizer"),
    "moments": (
        lambda: {"m": {"w": OPTIMIZER.state[MODEL.weight]["exp_avg"].detach()}},
        "m.w",
        'state["m"] = optimizer',
    ),
    "scheduler": (lambda: {"scheduler": SCHEDULER.state_dict()}, "scheduler", 'state["scheduler"] = scheduler'),
    "scaler": (lambda: {"s": torch.amp.GradScaler("cpu").state_dict()}, "s", 'state["s"] = scaler'),
    "loader": (lambda: {"data": LOADER}, "data", 'state["data"] = loader'),
    "made at each access": (lambda: {"views": Views()}, "views.a", "dict("),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_an_object_made_is_refused_with_the_line_to_write(kind: str) -> None:
    """By the constructor, and by a save and a restore if it came into the state afterwards."""
    make, path, line = REFUSED[kind]
    with pytest.raises(InvalidRequest) as told:
        TrainState(make(), 0, 1)
    assert told.value.detail.startswith((f"{path} ", f"{path}:"))
    assert line in told.value.hint
    state: Made = {"a": 1}
    late, checkpoint = TrainState(state, 0, 1), save({"a": 1})
    state |= make()
    with pytest.raises(InvalidRequest):
        late.snapshot()
    with pytest.raises(InvalidRequest):
        late.prepare(checkpoint.stored(), strict=False)


def test_a_line_without_brackets_is_python() -> None:
    """The key of an entry inside a list is a name."""
    with pytest.raises(InvalidRequest) as told:
        TrainState({"optims": [OPTIMIZER.state_dict()]}, 0, 1)
    assert 'state["optims_0"] = optimizer' in told.value.hint


ACCEPTED: dict[str, Callable[[], Made]] = {
    "parameters": lambda: {"model": dict(nn.Linear(3, 2).named_parameters())},
    "tensors of one's own": lambda: {"model": {"w": torch.randn(2), "b": torch.randn(2, requires_grad=True)}},
    "a deep copy of a state_dict": lambda: {"ema": copy.deepcopy(MODEL.state_dict())},
    "views of a buffer of one's own": lambda: {"flat": dict(zip("ab", torch.randn(2, 3).unbind(), strict=True))},
    "beside the module": lambda: (lambda m: {"model": m, "again": m.state_dict()})(nn.Linear(3, 2)),
    "beside its parameters": lambda: (lambda m: {"model": dict(m.named_parameters()), "again": m.state_dict()})(
        nn.Linear(3, 2)
    ),
    "numbers under such names": lambda: {"progress": {"state": 1, "last_epoch": 2, "scale": 3.0}},
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_what_the_user_trains_with_is_restored_in_place(kind: str) -> None:
    """Plain mappings of tensors stay legal, whoever else looks at their memory."""
    torch.manual_seed(1)
    live = ACCEPTED[kind]()
    torch.manual_seed(2)
    twin = ACCEPTED[kind]()
    restore(save(live), twin)
    for key, value in live.items():
        if isinstance(value, nn.Module):
            value, twin[key] = value.state_dict(), twin[key].state_dict()
        for name, item in value.items():
            assert torch.equal(item, twin[key][name]) if isinstance(item, torch.Tensor) else item == twin[key][name]


def test_memory_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find the owner means to look at all objects of the process: not at every save."""
    base = torch.randn(4)
    state = {"half": base[:2]}
    temporaries = Temporaries()
    temporaries.refuse(state)
    monkeypatch.setattr("holdfast.state.temporaries.gc.get_objects", lambda: pytest.fail("looked again"))
    temporaries.refuse({"half": base[:2]})
    temporaries.refuse({"alone": torch.randn(3)})


def test_other_threads_build_tuples_during_a_search() -> None:
    """Python resizes no tuple that something else holds: not while `gc.get_objects()` is looked through, either."""
    trained, stop, failed = nn.Linear(2, 2), threading.Event(), []

    def build() -> None:
        while not stop.is_set():
            try:
                assert len(tuple(number for number in range(200))) == 200
            except SystemError as error:
                failed.append(error)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    builder = threading.Thread(target=build)
    builder.start()
    try:
        state = {"copy": trained.weight.detach()}
        for _ in range(20):
            with pytest.raises(InvalidRequest, match="live Linear"):
                Temporaries().refuse(state)
    finally:
        stop.set()
        builder.join()
        sys.setswitchinterval(interval_s)
    assert not failed


def test_what_an_adapter_saves_by_itself_may_be_live() -> None:
    """Such as Lightning's dictionary, which has what `state_dict()` says: it is not restored by a Checkpointer."""
    made = save({"model": NamedEntry(MODEL.state_dict())})
    back = {"model": {name: torch.zeros_like(tensor) for name, tensor in MODEL.state_dict().items()}}
    restore(made, back)
    assert all(torch.equal(tensor, back["model"][name]) for name, tensor in MODEL.state_dict().items())

"""What changes between two saves of a Paddle training is seen: the second look finds what a first one would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from holdfast.integrations.paddle.entries import MODEL, OPTIMIZER, state
from holdfast_formats.errors import InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore:::paddle")
paddle.set_device("cpu")


class Model(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.register_buffer("kept", paddle.zeros([3]))
        self.register_buffer("scratch", paddle.zeros([3]), persistable=False)

    def forward(self, given: Any) -> Any:
        return self.norm(self.second(self.first(given)))


def stepped(model: Any, optimizer: Any) -> None:
    model(paddle.randn([2, 4])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()


def adamw(model: Any, **options: Any) -> Any:
    return paddle.optimizer.AdamW(0.1, parameters=model.parameters(), **options)


def torch_module(entries: dict[str, Any]) -> Any:
    return entries[MODEL].modules[0]


def module_of(entries: dict[str, Any]) -> dict[str, Any]:
    """Of the model's tensors the address, dtype, shape, strides and whether they are trained."""
    module = torch_module(entries)
    module.state_dict()
    named = {**module._parameters, **module._buffers}
    return {
        name: (one.data_ptr(), one.dtype, one.shape, one.stride(), one.requires_grad, name in module._parameters)
        for name, one in named.items()
        if name not in module._non_persistent_buffers_set
    }


def optimizer_of(entries: dict[str, Any]) -> Any:
    """The groups, and of what is kept the address, dtype, shape and strides, or the number of steps."""
    shards = entries[OPTIMIZER]
    kept = {
        (name, key): float(one) if key == "step" else (one.data_ptr(), one.dtype, one.shape, one.stride())
        for name, of in shards.state().items()
        for key, one in of.items()
    }
    return shards.groups(), kept


def moved(tensor: Any) -> None:
    """The tensor gets other memory with the same values."""
    other = paddle.to_tensor(tensor.numpy(), dtype=tensor.dtype)
    other._share_buffer_to(tensor)


def cast(model: Any, _: Any) -> None:
    model.to(dtype="bfloat16")


def replace_layer(model: Any, _: Any) -> None:
    model.first = nn.Linear(4, 4)


def replace_parameter(model: Any, _: Any) -> None:
    model.first.bias = model.first.create_parameter([4], is_bias=True)


def rename(model: Any, _: Any) -> None:
    model.norm.scale = model.norm.weight
    del model.norm.weight


def freeze(model: Any, _: Any) -> None:
    model.first.weight.stop_gradient = True


def persist(model: Any, _: Any) -> None:
    model._non_persistable_buffer_names_set.add("kept")


def add_layer(model: Any, _: Any) -> None:
    model.add_sublayer("third", nn.Linear(4, 2))


def move_weight(model: Any, _: Any) -> None:
    moved(model.first.weight)


MODEL_CHANGES = [cast, replace_layer, replace_parameter, rename, freeze, persist, add_layer, move_weight]


@pytest.mark.parametrize("change", MODEL_CHANGES, ids=lambda change: change.__name__)
def test_a_changed_layer_is_seen(change: Callable[[Any, Any], None]) -> None:
    model = Model()
    optimizer = adamw(model)
    entries = {MODEL: state(model)[MODEL]}
    before = module_of(entries)
    assert module_of(entries) == before
    change(model, optimizer)
    after = module_of(entries)
    assert after != before
    assert after == module_of(state(model))


def test_an_unchanged_layer_has_the_identical_views() -> None:
    model = Model()
    module = torch_module(state(model))
    module.state_dict()
    before = [*module._parameters.values(), *module._buffers.values()]
    stepped(model, adamw(model))
    module.state_dict()
    assert all(
        one is other for one, other in zip(before, [*module._parameters.values(), *module._buffers.values()], strict=True)
    )
    model.scratch.set_value(paddle.ones([3]))
    module.state_dict()
    assert module._buffers["scratch"] is not before[-1], "a save would not notice that it changed"


def rate(model: Any, optimizer: Any) -> None:
    optimizer.set_lr(0.5)


def own_rate(model: Any, optimizer: Any) -> None:
    model.first.weight.optimize_attr["learning_rate"] = 0.25


def own_decay(model: Any, optimizer: Any) -> None:
    model.first.weight.regularizer = paddle.regularizer.L2Decay(0.5)


def decay_function(model: Any, optimizer: Any) -> None:
    optimizer._apply_decay_param_fun = lambda name: name == model.first.weight.name


def freeze_without_state(model: Any, optimizer: Any) -> None:
    freeze(model, optimizer)
    for by_owner in optimizer._accumulators.values():
        del by_owner[model.first.weight.name]


def drop_state(model: Any, optimizer: Any) -> None:
    for by_owner in optimizer._accumulators.values():
        del by_owner[model.second.weight.name]


def move_moment(model: Any, optimizer: Any) -> None:
    moved(optimizer._accumulators["moment1"][model.first.weight.name])


def replace_moment(model: Any, optimizer: Any) -> None:
    by_owner = optimizer._accumulators["moment2"]
    by_owner[model.first.weight.name] = by_owner[model.first.weight.name].clone()


def another_power(model: Any, optimizer: Any) -> None:
    optimizer._accumulators["beta1_pow_acc"][model.first.weight.name].set_value(paddle.to_tensor([0.123]))


def add_group(model: Any, optimizer: Any) -> None:
    optimizer._add_param_group({"params": [model.scalar], "learning_rate": 0.1})


OPTIMIZER_CHANGES = [
    stepped,
    rate,
    own_rate,
    own_decay,
    decay_function,
    freeze,
    freeze_without_state,
    drop_state,
    move_moment,
    replace_moment,
    another_power,
]


@pytest.mark.parametrize("grouped", [False, True], ids=["list", "groups"])
@pytest.mark.parametrize("change", OPTIMIZER_CHANGES, ids=lambda change: change.__name__)
def test_a_changed_optimizer_is_seen(change: Callable[[Any, Any], None], grouped: bool) -> None:
    model = Model()
    parameters = model.parameters()
    given = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.3}] if grouped else parameters
    optimizer = paddle.optimizer.AdamW(0.1, parameters=given)
    stepped(model, optimizer)
    entries = state(model, optimizer)
    before = optimizer_of(entries)
    assert optimizer_of(entries) == before
    change(model, optimizer)
    torch_module(entries).state_dict()
    after = optimizer_of(entries)
    assert after != before or change is freeze  # which keeps its state, and its place in the group
    assert after == optimizer_of(state(model, optimizer))


def test_a_parameter_that_an_optimizer_gets_later_is_seen() -> None:
    model = Model()
    model.scalar = model.create_parameter([1])
    optimizer = paddle.optimizer.AdamW(0.1, parameters=[{"params": model.first.parameters()}])
    entries = state(model, optimizer)
    before = optimizer_of(entries)
    add_group(model, optimizer)
    after = optimizer_of(entries)
    assert [group["params"] for group in before[0]] != [group["params"] for group in after[0]]
    assert after == optimizer_of(state(model, optimizer))


def test_a_parameter_that_left_its_layer_is_refused() -> None:
    model = Model()
    optimizer = adamw(model)
    stepped(model, optimizer)
    entries = state(model, optimizer)
    optimizer_of(entries)
    replace_layer(model, optimizer)
    torch_module(entries).state_dict()
    with pytest.raises(InvalidRequest, match="which is in no layer of the state"):
        entries[OPTIMIZER].state()

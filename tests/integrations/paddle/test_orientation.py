"""A square weight is [in, out] in Paddle and [out, in] in torch: no reader takes one for the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import torch
from paddle import nn
from safetensors.numpy import load_file

from holdfast import Checkpointer, ParallelLayout
from holdfast.integrations import paddle as holdfast_paddle
from holdfast_formats.errors import InvalidRequest, StateMismatch

pytestmark = pytest.mark.filterwarnings("ignore:::paddle")
paddle.set_device("cpu")

SIZE = 4


class Training:
    """A model of square weights, and its optimizer after a step."""

    def __init__(self, seed: int, model: Callable[[], Any] | None = None) -> None:
        paddle.seed(seed)
        self.model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)) if model is None else model()
        self.optimizer = paddle.optimizer.AdamW(0.01, parameters=self.model.parameters())
        (self.model(paddle.randn([2, SIZE])) ** 2).mean().backward()
        self.optimizer.step()
        self.optimizer.clear_grad()

    @property
    def state(self) -> dict[str, Any]:
        return holdfast_paddle.state(self.model, self.optimizer)

    @property
    def values(self) -> list[np.ndarray]:
        weights = list(self.model.state_dict().values())
        kept = [held[one.name] for held in self.optimizer._accumulators.values() for one in weights]
        return [tensor.numpy().copy() for tensor in (*weights, *kept)]

    def assert_is(self, other: Training) -> None:
        assert all(map(np.array_equal, self.values, other.values))


def save(training: Training, root: Path, **options: Any) -> None:
    with Checkpointer("run", training.state, at=root, **options) as checkpointer:
        checkpointer.save(1, wait="durable")


def restore(state: dict[str, Any], root: Path, **options: Any) -> None:
    with Checkpointer("run", state, at=root) as checkpointer:
        assert checkpointer.restore(**options) == 1


@pytest.mark.parametrize("attached", [True, False])
def test_a_checkpointer_takes_the_program_of_the_model(tmp_path: Path, attached: bool) -> None:
    """Both ways to save are restored by both, and by torch."""
    first, second = Training(1), Training(2)
    if attached:
        with holdfast_paddle.attach(first.model, first.optimizer, "run", at=tmp_path) as one:
            one.save(1, wait="durable")
        restore(second.state, tmp_path)
    else:
        save(first, tmp_path)
        with holdfast_paddle.attach(second.model, second.optimizer, "run", at=tmp_path) as one:
            assert one.restore() == 1
    second.assert_is(first)
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE))
    restore({"model": model}, tmp_path, groups=("model",))
    x = np.arange(SIZE, dtype=np.float32)[None]
    with torch.no_grad():
        assert np.allclose(model(torch.from_numpy(x)).numpy(), first.model(paddle.to_tensor(x)).numpy(), atol=1e-6)


def test_a_layout_without_a_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="mapping program") as refused:
        save(Training(1), tmp_path, layout="dp=1")
    assert "program=" in str(refused.value.hint)
    with pytest.raises(InvalidRequest, match="mapping program"):
        save(Training(1), tmp_path, layout=ParallelLayout("dp=1", program="auto"))


def test_a_program_of_ones_own_is_used_at_every_restore(tmp_path: Path) -> None:
    """Without it, the model's own would transpose what it has not."""
    first, second = Training(1), Training(2)
    mine = holdfast_paddle.layout(first.model, "name = 'mine'\nfrom = 'us'\nto = 'them'\nstatements = '* -> *'")
    save(first, tmp_path, layout=mine)
    with pytest.raises(StateMismatch, match="through program mine"):
        restore(second.state, tmp_path)
    with Checkpointer("run", second.state, at=tmp_path, layout=mine) as checkpointer:
        assert checkpointer.restore() == 1
    second.assert_is(first)
    with pytest.raises(InvalidRequest, match="no program"):
        holdfast_paddle.layout(first.model, None)


def test_the_model_keeps_its_key(tmp_path: Path) -> None:
    """Under another key its tensors would be a group of their own, which no program reaches."""
    with pytest.raises(InvalidRequest, match="'net'"):
        Checkpointer("run", {"net": Training(1).state["model"]}, at=tmp_path)


def test_weights_of_other_layers_are_marked(tmp_path: Path) -> None:
    """They are stored as Paddle has them, and torch, which has no such mark, is refused by name."""
    first, second, other = Training(1), Training(2), nn.Linear(SIZE, SIZE)
    state = holdfast_paddle.state(first.model, first.optimizer, critic=other)
    with Checkpointer("run", state, at=tmp_path) as checkpointer:
        checkpointer.save(1, wait="durable")
    live = nn.Linear(SIZE, SIZE)
    restore(holdfast_paddle.state(second.model, second.optimizer, critic=live), tmp_path)
    assert np.array_equal(live.weight.numpy(), other.weight.numpy())
    parts = {"model": torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE))}
    parts["critic"] = torch.nn.Linear(SIZE, SIZE)
    with pytest.raises(StateMismatch, match="critic"):
        restore(parts, tmp_path, exclude=("optim/*", "extra/optimizer*"))


class Own(nn.Layer):
    """Computes as Linear does; its class does not say that it holds [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = self.create_parameter([SIZE, SIZE]), self.create_parameter([SIZE], is_bias=True)

    def forward(self, x: Any) -> Any:
        return x @ self.weight + self.bias


@pytest.mark.parametrize("mixed", [True, False])
def test_a_program_that_has_changed_is_refused(tmp_path: Path, mixed: bool) -> None:
    """Names and shapes are the same, and the weight would be transposed."""
    save(Training(1), tmp_path)
    second = Training(2, lambda: nn.Sequential(nn.Linear(SIZE, SIZE) if mixed else Own(), Own()))
    before = second.values
    with pytest.raises(StateMismatch, match=r"[01]\.weight.*transposed") as refused:
        restore(second.state, tmp_path)
    assert "layout=" in str(refused.value.hint)
    assert all(map(np.array_equal, before, second.values))


def batch_norm() -> Any:
    return nn.BatchNorm1D(SIZE)


@pytest.mark.parametrize("layer", [lambda: nn.Linear(SIZE, SIZE), batch_norm])
def test_a_layer_added_later_is_not_saved_by_a_program_without_it(tmp_path: Path, layer: Callable[[], Any]) -> None:
    """Every save and restore is refused until the training is attached again; a layer that is as in torch is saved."""
    training = Training(1)
    with Checkpointer("run", training.state, at=tmp_path) as checkpointer:
        checkpointer.save(1, wait="durable")
        training.model.add_sublayer("plain", nn.LayerNorm(SIZE))
        checkpointer.save(2, wait="durable")
        training.model.add_sublayer("new", layer())
        for again in (lambda: checkpointer.save(3), lambda: checkpointer.save(3), checkpointer.restore):
            with pytest.raises(InvalidRequest, match=r"new.*added or replaced") as refused:
                again()
        assert "attach again" in str(refused.value.hint)
    with Checkpointer("run", training.state, at=tmp_path) as checkpointer:
        checkpointer.goes_on_from(2)
        checkpointer.save(3, wait="durable")
    assert_is_in_form_of_torch(training, tmp_path)


@pytest.mark.parametrize("layer", [lambda: nn.Linear(SIZE, SIZE), batch_norm])
def test_a_layer_added_before_the_checkpointer_is_in_the_program(tmp_path: Path, layer: Callable[[], Any]) -> None:
    training = Training(1)
    state = training.state
    training.model.add_sublayer("new", layer())
    with Checkpointer("run", state, at=tmp_path) as checkpointer:
        checkpointer.save(3, wait="durable")
    assert_is_in_form_of_torch(training, tmp_path)


def assert_is_in_form_of_torch(training: Training, root: Path) -> None:
    """The layer `new` of step 3 is."""
    stored = load_file(root / "run" / "checkpoints" / "step-00000003" / "model.safetensors")
    weight = training.model.state_dict()["new.weight"].numpy()
    assert np.array_equal(stored["new.weight"], weight.T)
    assert ("new.running_mean" in stored) == (weight.ndim == 1)


def test_a_linear_layer_replaced_by_another_class_is_not_saved_transposed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(SIZE, SIZE))
    with Checkpointer("run", holdfast_paddle.state(model), at=tmp_path) as checkpointer:
        checkpointer.save(1, wait="durable")
        model.add_sublayer("0", nn.Linear(SIZE, SIZE))
        checkpointer.save(2, wait="durable")
        model.add_sublayer("0", Own())
        with pytest.raises(InvalidRequest, match=r"0\.weight.*added or replaced"):
            checkpointer.save(3)

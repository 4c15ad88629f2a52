"""Weights, masters and optimizer state must be of one model; what is missing altogether is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_formats.region import Shape
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.paddle import unified
from holdfast_service.wings.convert.foreign.paddle.consistency import check
from tests.wings.convert.foreign.paddle import written

Tensors = dict[TensorKey, ForeignTensor]


def _tensor(group: str, name: str, dtype: str = "F32", shape: Shape = (2, 3)) -> Tensors:
    tensor = ForeignTensor(TensorSpec(group, name, dtype, shape), ())
    return {tensor.key: tensor}


def _parameter(name: str) -> Tensors:
    moments = [_tensor("optim", f"{name}/{kind}") for kind in ("exp_avg", "exp_avg_sq")]
    step = _tensor("optim", f"{name}/step", shape=())
    return _tensor("model", name, "BF16") | _tensor("master", name) | moments[0] | moments[1] | step


def _without(tensors: Tensors, group: str, name: str = "") -> Tensors:
    return {key: one for key, one in tensors.items() if key.group != group or not key.name.startswith(name)}


ALL = _parameter("a") | _parameter("b")


def test_all_of_one_model() -> None:
    """Also with weights that were not trained, and masters of weights in F32 that have no moments."""
    assert check(ALL, (), trained=True) == []
    frozen = _tensor("model", "frozen", "BF16") | _tensor("model", "ids", "I64")
    assert check(ALL | frozen | _tensor("model", "norm") | _tensor("master", "norm"), (), trained=True) == []


@pytest.mark.parametrize("group", ["master", "optim", "ema"])
def test_state_of_another_model(group: str) -> None:
    """By the names of its parameters, their shapes, and numbers that no optimizer has."""
    suffix = "/exp_avg" if group == "optim" else ""
    with pytest.raises(StateMismatch, match="for which the model has no weight"):
        check(ALL | _tensor(group, f"c{suffix}"), (), trained=True)
    check(ALL | _tensor("model", "c") | _tensor(group, f"c{suffix}"), (), trained=True)
    with pytest.raises(StateMismatch, match=r"shape \[3, 2\], but its weight has \[2, 3\]"):
        check(ALL | _tensor(group, f"a{suffix}", shape=(3, 2)), (), trained=True)
    with pytest.raises(StateMismatch, match="is I32"):
        check(ALL | _tensor(group, f"a{suffix}", "I32"), (), trained=True)
    with pytest.raises(StateMismatch, match=r"trained weight .* is I16"):
        check(ALL | _tensor("model", "a", "I16"), (), trained=True)


def test_a_tied_name() -> None:
    """Of tied embeddings the model may have one, and the optimizer the other."""
    assert check(ALL | _tensor("master", "lm") | _tensor("optim", "lm/exp_avg"), ("lm",), trained=True) == []


def test_a_part_of_one_parameter() -> None:
    """A parameter that lacks what the others have."""
    with pytest.raises(StateMismatch, match="'b' has optimizer state, but no master"):
        check(_without(ALL, "master", "b"), (), trained=True)
    with pytest.raises(StateMismatch, match="'b' has a master, but no optimizer state"):
        check(_without(ALL, "optim", "b"), (), trained=True)


def test_what_is_missing_altogether() -> None:
    """A whole group is not refused, since a training may not have saved it, but is said."""
    for group in ("model", "master", "optim"):
        (note,) = check(_without(ALL, group), (), trained=True)
        assert note.endswith(f"group {group} is missing")
    assert check(_tensor("model", "a", "BF16"), (), trained=False) == []
    assert len(check(_tensor("model", "a", "BF16"), (), trained=True)) == 1
    assert check(_tensor("model", "a") | _tensor("optim", "a/exp_avg"), (), trained=True) == []


def test_sets_of_different_models(tmp_path: Path) -> None:
    """Each set is whole by its index; together they are refused where they name other parameters, or not all."""
    folder = written.unified(tmp_path)
    other = {key.replace("layers.0.", "layers.9."): value for key, value in written.optimizer().items()}
    written.write_set(folder, "optimizer", written.halves(other), master_weights=True)
    with pytest.raises(StateMismatch, match=r"belongs to 'model\.layers\.9\."):
        written.read(unified.KIND, folder)
    written.write_set(
        folder,
        "optimizer",
        written.halves(
            written.optimizer([name for name in written.SHAPES if name != "model.layers.0.mlp.down_proj.weight"])
        ),
        master_weights=True,
    )
    with pytest.raises(StateMismatch, match=r"down_proj\.weight' has a master, but no optimizer state"):
        written.read(unified.KIND, folder)
    for file in folder.glob("optimizer*"):
        file.unlink()
    assert "group optim is missing" in written.read(unified.KIND, folder).notes[-1]

"""Powers of beta as Paddle multiplies them up, transposed maps, and the trainer's small files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.box_moves import same
from holdfast_formats.mapping.reading import elements
from holdfast_service.wings.convert.exports.paddle import state as paddle_state
from holdfast_service.wings.convert.exports.paddle import trainer as paddle_trainer
from holdfast_service.wings.convert.exports.plan import ExportOptions, ExportPlan
from tests.wings.convert.exports.paddle.test_flex import load_pickle
from tests.wings.convert.exports.sources import LLAMA, llama, made, trained, values_of, write

WEIGHTS = llama(layers=1)
ASSETS = {"config.json": json.dumps(LLAMA).encode()}


def test_powers_are_those_of_paddle() -> None:
    """0.9 after two steps is what a real run wrote, 0.7289999; after many it ends at the smallest number, in no time."""
    assert paddle_state.power(0.9, 2) == float(np.float32(0.7289999))
    assert paddle_state.power(0.999, 0) == float(np.float32(0.999))
    assert 0 <= paddle_state.power(0.9, 2**24) < 1e-37
    value = np.float32(0.95)
    for _ in range(1000):
        value = np.float32(value * np.float32(0.95))
    assert paddle_state.power(0.95, 1000) == float(value)


def test_a_transposed_map(tmp_path: Path) -> None:
    """The same elements with the dimensions exchanged; twice, it is what it was."""
    array = np.arange(15, dtype=np.float32).reshape(3, 5)
    source = made(tmp_path / "step", {"model": {"w": array}}).source
    mapped = same(source.group("model")["w"])
    turned = paddle_state.transposed(mapped)
    assert turned.spec.shape == (5, 3) and paddle_state.transposed(turned) == mapped
    found = elements(source.files, source.listing.tensors, turned, 0, 15)
    assert np.array_equal(found.reshape(5, 3), array.T)


def _trainer(tmp_path: Path, extra: dict[str, Any], rate: Any = 1e-3, steps: tuple[int, ...] = (2,)) -> tuple[Path, str]:
    groups = trained(WEIGHTS)
    for number, name in enumerate(WEIGHTS):
        groups["optim"][f"{name}/step"] = np.array(steps[number % len(steps)], np.float32)
    document = optimizer_state.document([(list(WEIGHTS), {"lr": rate, "betas": [0.9, 0.999]})])
    values = {
        "optim": {"optimizer": json.dumps(document)},
        "extra": {key: json.dumps(value) for key, value in extra.items()},
    }
    source = made(tmp_path / "step", groups, assets=ASSETS, ranks={0: values}, step=9).source
    found = paddle_trainer.trainer_files(source, paddle_state.collect(source, ExportOptions(), model_too=True))
    return write(source, ExportPlan(found.files), tmp_path / "out"), " ".join(found.notes)


def test_what_came_from_paddle_goes_back(tmp_path: Path) -> None:
    """The state of its trainer and scheduler as they were, if they are of this step."""
    kept = {"global_step": 2, "consumed_samples": 64, "log_history": [{"loss": 2.5}], "$keys": ["global_step"]}
    extra = {"paddle_trainer_state": kept, "paddle_scheduler": {"last_epoch": 2, "last_lr": 0.25}}
    out, notes = _trainer(tmp_path, extra)
    state = vars(load_pickle(out / "trainer_state.bin"))
    assert (state["global_step"], state["consumed_samples"], state["log_history"]) == (2, 64, [{"loss": 2.5}])
    assert load_pickle(out / "scheduler.pdparams") == {"last_epoch": 2, "last_lr": 0.25} and notes == ""


def test_what_is_of_another_step_does_not(tmp_path: Path) -> None:
    """A trainer has gone on since: its own step and learning rate count."""
    extra = {"paddle_trainer_state": {"global_step": 1, "consumed_samples": 64}, "paddle_scheduler": {"last_lr": 0.25}}
    out, notes = _trainer(tmp_path, extra)
    state = vars(load_pickle(out / "trainer_state.bin"))
    assert (state["global_step"], state["consumed_samples"]) == (2, 0)
    assert load_pickle(out / "scheduler.pdparams") == {"last_epoch": 2, "last_lr": 1e-3}
    assert "from step 2 at learning rate 0.001" in notes


@pytest.mark.parametrize("rate", [{"$tensor": "lr"}, None, True])
def test_a_learning_rate_that_is_no_number(tmp_path: Path, rate: Any) -> None:
    """No scheduler is made up, and that is said."""
    out, notes = _trainer(tmp_path, {}, rate)
    assert not (out / "scheduler.pdparams").exists() and "the learning rate is unknown" in notes


def test_parameters_of_different_steps(tmp_path: Path) -> None:
    """Each has its own powers; the trainer's step is that of the checkpoint, and this is said."""
    out, notes = _trainer(tmp_path, {}, steps=(2, 3))
    assert vars(load_pickle(out / "trainer_state.bin"))["global_step"] == 9 and "have different step counts" in notes


def test_a_fused_optimizer_counts_steps_in_its_groups(tmp_path: Path) -> None:
    """Its parameters have no tensors of their own for that."""
    groups = trained(WEIGHTS)
    optim = {name: array for name, array in groups["optim"].items() if not name.endswith("/step")}
    for count, step in ((5, 5), ("5", None)):
        document = optimizer_state.document([(list(WEIGHTS), {"betas": [0.5, 0.25], "step": count})])
        ranks = {0: {"optim": {"optimizer": json.dumps(document)}}}
        source = made(tmp_path / str(step), {**groups, "optim": optim}, assets=ASSETS, ranks=ranks).source
        if step is None:
            with pytest.raises(StateMismatch, match="lacks 'step'"):
                paddle_state.collect(source, ExportOptions(), model_too=True)
        else:
            assert paddle_state.collect(source, ExportOptions(), model_too=True).step == step


def test_betas_are_those_of_the_optimizer(tmp_path: Path) -> None:
    """As a trainer stores them, in a tuple."""
    source = made(tmp_path / "step", trained(WEIGHTS), assets=ASSETS, ranks=values_of(list(WEIGHTS), (0.5, 0.25))).source
    state = paddle_state.collect(source, ExportOptions(), model_too=True)
    assert {one.powers for one in state.optimizer.values()} == {(0.125, 0.015625)} and state.step == 2


def test_an_optimizer_without_names(tmp_path: Path) -> None:
    """Refused for that, with what gives it names."""
    document = {**optimizer_state.document([(["0"], {"lr": 0.1, "betas": [0.9, 0.999]})]), optimizer_state.NUMBERED: True}
    groups = {"model": WEIGHTS, "optim": {"0/exp_avg": np.zeros(3, np.float32)}}
    values = {0: {"optim": {"optimizer": json.dumps(document)}}}
    source = made(tmp_path / "step", groups, assets=ASSETS, ranks=values).source
    with pytest.raises(StateMismatch, match="the optimizer numbers its parameters") as refused:
        paddle_state.collect(source, ExportOptions(), model_too=True)
    assert "--as hf" in refused.value.hint and "restore the checkpoint with its model" in refused.value.hint

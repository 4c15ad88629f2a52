"""The number of steps, Paddle's documents, and the β of beta powers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from holdfast.tensors import trees
from holdfast_formats.errors import StateMismatch
from holdfast_service.wings.convert.foreign.paddle import progress
from holdfast_service.wings.convert.foreign.paddle.tensor_parallel import LocalTensorParts, of_arrays
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray
from tests.kit.files import FilesInMemory
from tests.wings.convert.foreign.directories import OnDisk
from tests.wings.convert.foreign.paddle import written


def test_documents(tmp_path: Path) -> None:
    """Both forms of the trainer's state, as a trainer decodes documents; two that differ are refused."""
    written.trainer_state(tmp_path)
    found = progress.read(OnDisk(tmp_path))
    assert found.step == 2
    assert found.learning_rate == 0.25
    text = json.dumps(found.documents["paddle_trainer_state"], allow_nan=False)
    decoded = trees.regrow(text, "paddle_trainer_state", lambda _: None, {}).build()
    assert decoded["global_step"] == 2
    assert np.isnan(decoded["log_history"][0]["loss"])
    (tmp_path / "trainer_state.json").write_text('{"global_step": 2}')
    assert progress.read(OnDisk(tmp_path)).step == 2
    for text in ('{"global_step": 3}', '{"global_step": true}', "{}", "[]", '{"global_step": -1}'):
        (tmp_path / "trainer_state.json").write_text(text)
        with pytest.raises(StateMismatch, match=r"trainer_state\.json has the invalid global_step"):
            progress.read(OnDisk(tmp_path))
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(StateMismatch, match=r"trainer_state\.json is not JSON"):
        progress.read(OnDisk(tmp_path))


def _powers(*values: tuple[str, float]) -> tuple[FilesInMemory, list[LocalTensorParts]]:
    files = FilesInMemory({"f": np.array([value for _, value in values], "<f4").tobytes()})
    arrays = [StoredArray("f", f"w/{kind}", "F32", (1,), 4 * n, (1,)) for n, (kind, _) in enumerate(values)]
    return files, [of_arrays([array]) for array in arrays]


def _power(beta: float, step: int) -> float:
    return float(np.multiply.accumulate(np.full(step + 1, beta, "f4"))[-1])


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.85, 0.9995), (0.95, 0.99999)])
@pytest.mark.parametrize("step", [0, 1, 2, 10, 500, 700])
def test_the_betas_of_powers(betas: tuple[float, float], step: int) -> None:
    """As Paddle multiplies them up, and as a power in one go; a step more or less is seen."""
    kinds = progress.POWERS
    for one, two in ((_power(betas[0], step), _power(betas[1], step)), (betas[0] ** (step + 1), betas[1] ** (step + 1))):
        files, powers = _powers((kinds[0], one), (kinds[1], two))
        if one < np.finfo("f4").tiny:
            assert progress.betas(files, powers, step) is None
            continue
        assert progress.betas(files, powers, step) == betas
        for other in (step + 1, step - 1):
            if other >= 0:
                with pytest.raises(StateMismatch, match=f"for any usual β after t = {other} steps"):
                    progress.betas(files, powers, other)


def test_powers_that_underflowed() -> None:
    """They tell nothing, and are no error; others still have to agree."""
    files, powers = _powers(
        (progress.POWERS[0], 0.0), (progress.POWERS[0], 1e-40), (progress.POWERS[1], _power(0.999, 2000))
    )
    assert progress.betas(files, powers, 2000) is None
    files, powers = _powers((progress.POWERS[0], _power(0.9, 2)), (progress.POWERS[0], _power(0.95, 2)))
    with pytest.raises(StateMismatch, match=r"a power of 0\.95, but 'w/beta1_pow_acc_0' is a power of 0\.9"):
        progress.betas(files, powers, 2)
    files, powers = _powers((progress.POWERS[0], float("nan")))
    with pytest.raises(StateMismatch, match="is nan"):
        progress.betas(files, powers, 2)
    with pytest.raises(StateMismatch, match=r"F32 of shape \[2\] instead of a single F32"):
        progress.betas(files, [powers[0]._replace(shape=(2,))], 2)

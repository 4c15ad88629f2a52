"""What the demo computes in: the quicker of two dtypes, the same in every launch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from holdfast.demo import main
from holdfast.demo.forecast import Forecast
from holdfast.demo.precision import ProductTimes, measure_products
from holdfast.demo.processes import DemoDaemon
from holdfast.demo.story import RESUMED, UNINTERRUPTED, Stage, command

WITHOUT_INSTRUCTIONS, WITH_INSTRUCTIONS = ProductTimes(0.007, 0.415), ProductTimes(0.007, 0.003)


def test_the_quicker_dtype_is_computed_in() -> None:
    """float32 where bf16 products are slow, bfloat16 where they are not."""
    assert WITHOUT_INSTRUCTIONS.compute_dtype == "float32"
    assert WITH_INSTRUCTIONS.compute_dtype == "bfloat16"


def test_the_reason_is_given_with_its_number() -> None:
    """Whoever sees float32 reads why; whoever sees bfloat16 needs no reason."""
    assert WITHOUT_INSTRUCTIONS.describe().endswith("computed in float32: bf16 products take 59 times as long here")
    assert "1.4 times" in ProductTimes(0.010, 0.014).describe()
    assert WITH_INSTRUCTIONS.describe() == "bf16 weights, computed in bfloat16"


def test_both_products_are_timed_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads would wait for each other on a busy machine; whoever measures keeps the threads they had."""
    seen, product, before = [], torch.nn.functional.linear, torch.get_num_threads()

    def noted(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append((inputs.dtype, torch.get_num_threads()))
        return product(inputs, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    torch.set_num_threads(2)
    try:
        times = measure_products()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert min(times) > 0
    assert set(seen) == {(torch.float32, 1), (torch.bfloat16, 1)}


@pytest.mark.parametrize("products", [WITHOUT_INSTRUCTIONS, WITH_INSTRUCTIONS])
def test_every_launch_is_told_the_same(tmp_path: Path, products: ProductTimes) -> None:
    """The runs that are compared differ in their names and places alone, and none decides for itself what it computes in."""
    daemon = DemoDaemon(0, "", tmp_path / "socket", tmp_path)
    stage = Stage(tmp_path, daemon, 90, Console(), products, Forecast(90, 0.0))
    compared, killed = command(stage, UNINTERRUPTED), command(stage, RESUMED)
    assert {compared[n - 1] for n, (a, b) in enumerate(zip(compared, killed, strict=True)) if a != b} == {
        "--name",
        "--directory",
    }
    assert killed[killed.index("--compute-dtype") + 1] == products.compute_dtype
    assert killed[killed.index("--device") + 1] == "cpu"
    assert command(stage._replace(device="cuda", ranks=1), RESUMED)[4:6] == ["--nproc-per-node", "1"]


def test_a_device_that_is_not_here_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is started, and nothing of an earlier demo is cleared away."""
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(tmp_path / "out", device="cuda") == 2
    assert "no CUDA device" in capsys.readouterr().out and not (tmp_path / "out").exists()

"""A committed checkpoint of a Paddle training is a Hugging Face checkpoint, and torch and Paddle go on from each other's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

LOGITS_ATOL = 1e-5
# Both compute in float32, with sums in another order. Over ten steps of a small model the losses, near ln 64 = 4.16, differ
# by at most some ten roundings of 2^-24.
LOSSES_ATOL = 2e-5
KINDS = ["llama", "llama-tied", "qwen2", "qwen2-tied", "ernie"]


def ran(module: str, *words: object, ranks: int = 0) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    line = [sys.executable, *start, "-m", f"tests.integrations.paddle.{module}", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, (done.stdout[-2000:] + done.stderr)[-6000:]


def read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as found:
        return dict(found)


def step_directory(root: Path, run: str) -> Path:
    return max((root / run / "checkpoints").iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_reads_the_directory(tmp_path: Path, kind: str) -> None:
    """All tensors are found, and the logits are those of Paddle's own forward."""
    ran("causal", kind, tmp_path, "run", tmp_path / "paddle.npz", "--steps", 3, "--save", 3)
    ran("reference", step_directory(tmp_path, "run"), tmp_path, "run", tmp_path / "torch.npz")
    trained, loaded = read(tmp_path / "paddle.npz"), read(tmp_path / "torch.npz")
    assert not any(json.loads(str(loaded["problems"])).values())
    assert np.abs(trained["logits"]).max() > 1
    assert np.abs(trained["logits"] - loaded["logits"]).max() < LOGITS_ATOL


@pytest.mark.parametrize(("kind", "how"), [("llama", "plain"), ("qwen2", "plain"), ("llama", "fsdp"), ("llama", "tp")])
def test_torch_goes_on_from_paddle_and_back(tmp_path: Path, kind: str, how: str) -> None:
    """Three steps in Paddle, ten in torch, ten in Paddle: the losses are those of a training that stays where it is."""
    kept: dict[str, Any] = {}
    ran("causal", kind, tmp_path, "run", tmp_path / "first.npz", "--steps", 3, "--save", 3)
    ran("causal", kind, tmp_path, "run", tmp_path / "stays.npz", "--steps", 20)
    kept["torch"] = ["reference", step_directory(tmp_path, "run"), tmp_path, "run", tmp_path / "torch.npz"]
    ran(*kept["torch"], "--steps", 10, "--save", 13, "--how", how, ranks=0 if how == "plain" else 2)
    ran("causal", kind, tmp_path, "run", tmp_path / "back.npz", "--steps", 10)
    stays = read(tmp_path / "stays.npz")["losses"]
    assert np.abs(stays[:10] - read(tmp_path / "torch.npz")["losses"]).max() < LOSSES_ATOL
    back = read(tmp_path / "back.npz")
    assert np.abs(stays[10:] - back["losses"]).max() < LOSSES_ATOL
    powers = {key.rpartition("/")[2]: value.item() for key, value in back.items() if "pow_acc" in key}
    assert powers.keys() == {"beta1_pow_acc_0", "beta2_pow_acc_0"} or powers.keys() == {"beta1_pow_acc", "beta2_pow_acc"}
    for (_, value), beta in zip(sorted(powers.items()), (0.9, 0.98), strict=True):
        assert value == pytest.approx(beta**14, rel=1e-5)  # of the 13 steps before

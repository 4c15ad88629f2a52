"""A training that was saved on some ranks goes on with another number of them (E2)."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from tests.integrations.resuming import completed

SCRIPT = "tests.integrations.lightning.train"


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 2)])
def test_another_number_of_ranks(strategy: str, saving: int, loading: int, tmp_path: Path) -> None:
    """The whole tensors are those that were saved, also those of the optimizer, and training goes on where it was."""
    first = ["--strategy", strategy, "--world", str(saving), "--every-epoch", "--epochs", "1"]
    saved = completed(SCRIPT, first, tmp_path, saving)
    newest = max((tmp_path / "root" / "run" / "checkpoints").iterdir())
    with holdfast.open(newest) as stored:
        assert stored.tensors["model"]["net.0.weight"].shape == (16, 8)
        assert stored.tensors["optim"]["net.0.weight/exp_avg"].shape == (16, 8)
    again = ["--strategy", strategy, "--world", str(loading), "--every-epoch", "--epochs", "1"]
    loaded = completed(SCRIPT, again, tmp_path, loading)
    assert loaded.ends[-1]["end"] == saved.ends[0]["end"]
    goes_on = completed(SCRIPT, [*again[:-1], "2"], tmp_path, loading)
    assert goes_on.began[-1] == saved.ends[0]["values"][3] < max(goes_on.steps)
    assert goes_on.ends[-1]["end"] != saved.ends[0]["end"]

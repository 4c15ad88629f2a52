"""Lists of Fragments on real ranks: gate and up in one tensor, a distributed optimizer, and another layout at each start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.daemons import running
from tests.torchruns import launch

WORKER = "tests.distributed.lists_worker"


def trained(socket: Path, output: Path, layout: tuple[int, int], steps: int) -> list[torch.Tensor]:
    """Weight, master and momentum after these steps; ranks of this layout go on from the newest one."""
    tp, dp = layout
    launch(max(tp, 1) * dp, WORKER, str(socket), str(output), str(tp), str(dp), str(steps))
    return torch.load(output)


@pytest.mark.parametrize("layouts", [((2, 2), (1, 3), (2, 1)), ((0, 1), (3, 1), (0, 1))])
def test_training_goes_on_in_another_layout(tmp_path: Path, layouts: tuple[tuple[int, int], ...]) -> None:
    """After two changes of the layout, weights, masters and momentum equal those of a run that was never interrupted."""
    with running(tmp_path / "root") as daemon, running(tmp_path / "other") as other:
        for count, layout in enumerate(layouts, 1):
            found = trained(daemon.socket, tmp_path / "found", layout, 2 * count)
        expected = trained(other.socket, tmp_path / "expected", (0, 1), 2 * len(layouts))
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))

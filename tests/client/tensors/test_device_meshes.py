"""Ranks of a device mesh go on by their place in it, without layout=."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from holdfast import Checkpointer, Fragment
from holdfast.tensors.device_meshes import KnownMesh, mesh_of
from tests.client.tensor_parallel import Loader, model
from tests.daemons import RunningDaemon
from tests.torchruns import launch


@pytest.mark.skipif(
    not hasattr(DeviceMesh, "_get_root_mesh"), reason="this torch does not tell the mesh of which a mesh is a part"
)
def test_ranks_of_one_tensor_draw_the_same(daemon: RunningDaemon, tmp_path: Path) -> None:
    """New ranks of a tensor-parallel group share their streams and rows, replicas do not; each row goes on where it was when
    the groups become single ranks. Dimensions of unknown names are told.
    """
    with Checkpointer.alone("tensor-parallel", {"model": model(), "loader": Loader(3)}, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    launch(4, "tests.client.tensor_parallel", "grow", str(daemon.socket), str(tmp_path))
    grown = [read(tmp_path / f"grow-{rank}.json") for rank in range(4)]
    for moment in ("grown", "next"):
        first, second, third, fourth = (one[moment] for one in grown)
        assert first == second and third == fourth and not set(first) & set(third)
    launch(2, "tests.client.tensor_parallel", "shrink", str(daemon.socket), str(tmp_path))
    shrunk = [read(tmp_path / f"shrink-{rank}.json") for rank in range(2)]
    assert [one["next"] for one in shrunk] == [grown[0]["next"], grown[2]["next"]]
    assert [one["at"] for one in shrunk] == [3, 13]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_whole_tensors_are_replicas_and_fragments_say_nothing() -> None:
    found = mesh_of([torch.zeros(2)], 4, False)
    assert found.mesh is not None and found.mesh.dp == 4 and not found.unclear
    assert mesh_of([torch.zeros(2), Fragment(torch.zeros(2), (4,), offset=(0,))], 4, False) == KnownMesh(None)

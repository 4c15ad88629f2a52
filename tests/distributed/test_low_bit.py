"""Low-bit optimizer state under FSDP2 and tensor parallelism: exact where ranks have the same blocks, else refused, or
quantised again if that is asked for.
"""

from __future__ import annotations

import json

import pytest

from holdfast_formats import naming
from tests.daemons import RunningDaemon
from tests.kit.daemons import own_daemon
from tests.low_bit import KINDS
from tests.torchruns import launch

WORKER = "tests.distributed.low_bit_worker"
daemon = own_daemon(listen="none")


def run(daemon: RunningDaemon, ranks: int, *steps: dict[str, object]) -> None:
    launch(ranks, WORKER, str(daemon.socket), json.dumps(steps))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_under_fsdp(daemon: RunningDaemon, kind: str) -> None:
    """Rows of whole blocks: as they were on 1, 2 and 4 ranks, with or without live state; blocks that 4 ranks have not, and
    columns under tensor parallelism, are refused by name, or quantised again.
    """
    saved = {"run": f"fsdp-{kind}", "kind": kind}
    back = saved | {"do": "restore", "mesh": "fsdp"}
    tensor = back | {"mesh": "tp"}
    refused = {"refused": "odd.weight/"}
    whole = {} if kind != "keys" else {"again": True}
    run(daemon, 2, saved | {"do": "save", "mesh": "fsdp"}, back, back | {"stepped": True})
    run(daemon, 1, *(back | whole | {"mesh": "plain", "stepped": stepped} for stepped in (False, True)))
    run(daemon, 2, tensor | refused, tensor | {"again": True}, tensor | {"again": True, "stepped": True})
    refused = {"refused": "down.weight/" if kind != "keys" else "odd.weight/"}
    run(daemon, 4, back | refused, back | {"again": True}, back | refused | {"stepped": True})


@pytest.mark.parametrize("kind", ["8-bit", "4-bit"])
def test_the_files_are_those_of_one_rank(daemon: RunningDaemon, kind: str) -> None:
    """Parts of whole blocks are stored as one rank would have stored them."""
    saved = {"run": f"files-{kind}", "kind": kind}
    run(daemon, 2, saved | {"do": "save", "mesh": "fsdp"})
    run(daemon, 1, saved | {"do": "restore", "mesh": "plain"})
    first, again = (daemon.root / naming.checkpoint_path(name, 3) for name in (saved["run"], f"{saved['run']}-again"))
    assert (first / "optim.safetensors").read_bytes() == (again / "optim.safetensors").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_saved_by_one_rank_or_under_tensor_parallelism(daemon: RunningDaemon, kind: str) -> None:
    """One rank's blocks are cut for two; columns come back as they were, and as rows if they are quantised again."""
    saved, columns = ({"run": f"{mesh}-{kind}", "kind": kind, "mesh": mesh} for mesh in ("plain", "tp"))
    back = {"do": "restore", "mesh": "fsdp"}
    run(daemon, 1, saved | {"do": "save"}, saved | {"do": "restore"})
    run(daemon, 2, saved | back | ({} if kind != "keys" else {"again": True, "stepped": True}))
    run(daemon, 2, columns | {"do": "save"}, columns | {"do": "restore"}, columns | back | {"refused": "odd.weight/"})
    run(daemon, 2, columns | back | {"again": True})
    run(daemon, 1, columns | {"do": "restore", "mesh": "plain", "again": True})

"""torchrun on two nodes, each with its own daemon: a training that loses a node goes on exactly, also on one node."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast_formats import naming
from tests.regressions.test_many_daemons import Daemon, Site, site, steps

__all__ = ["site"]
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("forked_programs")]

TRAINING = Path(__file__).with_name("fsdp_training.py")
STEPS, DIES_AT = 20, 13


def train(places: Sequence[Daemon], ranks: int, *arguments: object) -> tuple[list[int], str]:
    """Run the training on as many nodes, with so many ranks each; returns the agents' exit statuses and what they said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = []
    for number, daemon in enumerate(places):
        rendezvous = ["--nnodes", len(places), "--node-rank", number, "--master-addr", "127.0.0.1", "--master-port", port]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *rendezvous,
            "--nproc-per-node",
            ranks,
            TRAINING,
            *arguments,
        ]
        environment = os.environ | {"HOLDFAST_SITE": str(daemon.socket), "OMP_NUM_THREADS": "1"}
        agents.append(
            subprocess.Popen(
                [str(part) for part in command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    said = [agent.communicate(timeout=180)[0] for agent in agents]
    return [agent.returncode for agent in agents], "\n".join(said)


def contents(site: Site, run: str) -> dict[str, bytes]:
    directory = site.root / naming.checkpoint_path(run, STEPS)
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}


def test_a_training_that_loses_a_node_goes_on_exactly(site: Site) -> None:
    """Weights and optimizer are those of a training that was never interrupted, bit for bit."""
    a, b = site.start("a"), site.start("b")
    codes, said = train([a, b], 1, "whole", STEPS)
    assert codes == [0, 0], said
    codes, said = train([a, b], 1, "cut", STEPS, DIES_AT)
    assert 0 not in codes, said
    assert steps(site.root, "cut")[-1] <= 10
    codes, said = train([b, a], 1, "cut", STEPS)
    assert codes == [0, 0] and "begins after 0" not in said, said
    assert contents(site, "cut") == contents(site, "whole") and contents(site, "cut")


def test_what_two_nodes_saved_is_restored_by_one_and_the_other_way(site: Site) -> None:
    """Four ranks on two nodes, then three on one, then two on two: each goes on from the newest step."""
    a, b = site.start("a"), site.start("b")
    for places, ranks, until in (([a, b], 2, 5), ([b], 3, 10), ([b, a], 1, 15)):
        codes, said = train(places, ranks, "moving", until)
        assert not any(codes) and f"begins after {until - 5}" in said, said
    assert steps(site.root, "moving") == [5, 10, 15]

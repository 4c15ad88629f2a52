"""A node is killed while it compacts and thins the checkpoints of a root that two nodes serve: the work is done all the
same, by itself when it is back, or by the other one once its lease has ended.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast import Checkpointer
from holdfast.read.directory_root import committed_steps
from holdfast.read.root_directory import open_checkpoint
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast_formats.rest.retention import RetentionPolicy
from tests.cluster.test_named_points import Marks, marks_at
from tests.daemons import wait_until
from tests.regressions.test_many_daemons import Daemon, Site, site

__all__ = ["site"]
pytestmark = pytest.mark.cluster

CODING = ("states are coded", "coded, not proven")
POINTS = (*CODING, "before it is replaced", "before exchange", "after exchange", "it is replaced")
STEPS = (1, 2, 3)
POLICY = RetentionPolicy(optim="int8", optim_full=1, keep_full=2)
FORMS = ["thin", "compact", "whole"]
TAKEN_OVER_S = 240  # the lease of who has the duty lasts 30 s; then the upkeep has to come round


marks = marks_at(POINTS)


def save(daemon: Daemon, run: str) -> torch.Tensor:
    """Save three steps of a model and AdamW, all verified; the weights, which are the same in all of them."""
    torch.manual_seed(1)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    with Checkpointer(run, {"model": model, "optim": optimizer}, at=daemon.socket) as checkpointer:
        for step in STEPS:
            model(torch.randn(4, 64)).square().sum().backward()
            optimizer.step()
            checkpointer.save(step, wait="durable").result(120)
    with Api(daemon.url) as api:
        wait_until(lambda: [one.verified for one in api.checkpoints(run)] == [True] * len(STEPS))
    return model.weight.detach().clone()


def forms(root: Path, run: str, weight: torch.Tensor) -> list[str]:
    """What stands there, every byte of it proven, with the weights that were saved."""
    assert sorted(committed_steps(root, run)) == list(STEPS)
    found = []
    for step in STEPS:
        with open_checkpoint(root, None, run, step) as reader:
            assert reader.verify() == []
            assert torch.equal(torch.from_numpy(reader.read("model", "weight").copy()), weight)
            found.append("thin" if reader.manifest.thinned else "compact" if reader.manifest.compacted else "whole")
    return found


def listed(daemon: Daemon, run: str) -> list[str]:
    with Api(daemon.url) as api:
        found = sorted(api.checkpoints(run), key=lambda one: one.step)
    return ["thin" if one.thinned else "compact" if one.compacted else "whole" for one in found]


def _killed(site: Site, daemons: dict[str, Daemon], marks: Marks, point: str, back: bool) -> None:
    """Kill the node that compacts at a point, and see what becomes of the run."""
    run = point.replace(" ", "-").replace(",", "")
    other, weight = daemons["b"], save(daemons["a"], run)
    marks.arm(point)
    with Api(other.url) as api:
        retention.set_policy(api, run, POLICY, "*")
    victim = marks.victim(daemons)
    daemons[victim].kill()
    assert all(one in ("whole", new) for one, new in zip(forms(site.root, run, weight), FORMS, strict=True)), point
    left = next(name for name in daemons if name != victim)
    if back:
        daemons[victim] = site.start(victim)
    wait_until(lambda: listed(daemons[left], run) == FORMS, TAKEN_OVER_S)
    assert forms(site.root, run, weight) == FORMS
    if not back:
        daemons[victim] = site.start(victim)
    wait_until(lambda: listed(daemons[victim], run) == FORMS, TAKEN_OVER_S)
    with Api(daemons[left].url) as api:
        wait_until(lambda: all(one.verified and one.damage is None for one in api.checkpoints(run)), TAKEN_OVER_S)


@pytest.mark.parametrize("back", [True, pytest.param(False, marks=pytest.mark.cluster_slow)], ids=["comes back", "is gone"])
def test_a_node_is_killed_in_the_middle(site: Site, marks: Marks, back: bool) -> None:
    """At each named point, one run after the other."""
    daemons = {name: site.start(name) for name in ("a", "b")}
    for point in POINTS if back else POINTS[1::2]:
        _killed(site, daemons, marks, point, back)

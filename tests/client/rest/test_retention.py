"""Retention and admission through everything: trainer, daemon, REST, and a daemon that is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer, SaveWarning
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import InUse, NewestVerified, Pinned, QuotaExceeded
from holdfast_formats.rest.retention import Best, RetentionPolicy
from tests.daemons import RunningDaemon, running, wait_until
from tests.kit.daemons import own_daemon

RUN = "kept"
ANYWHERE = "127.0.0.1:0"


daemon = own_daemon(scope="function", listen=ANYWHERE)


def steps(root: Path) -> list[int]:
    names = [path.name for path in (root / RUN / naming.CHECKPOINTS).iterdir()]
    return sorted(step for step in map(naming.parse_step_directory, names) if step is not None)


def verified(api: Api, step: int) -> bool:
    return api.checkpoint(RUN, step).verified


def test_rules_marks_and_a_daemon_that_dies(daemon: RunningDaemon) -> None:
    """The best by a metric, the newest and the pinned stay, also after the daemon was killed and the policy read anew."""
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 4.0}
    with Checkpointer(RUN, {"x": torch.ones(3)}, at=daemon.socket, keep_last=9) as checkpointer, Api(daemon.url) as api:
        checkpointer.save(1, metrics={"loss": losses[1]}, wait="durable")
        before = retention.policy(api, RUN)
        assert before.policy == RetentionPolicy(last=9)
        wanted = RetentionPolicy(last=1, best=(Best(metric="loss", count=1),))
        retention.set_policy(api, RUN, wanted, before.tag)
        retention.pin(api, RUN, 1)
        for step in (2, 3, 4, 5):
            checkpointer.save(step, metrics={"loss": losses[step]}, wait="durable")
        wait_until(lambda: steps(daemon.root) == [1, 2, 5])
        with pytest.raises(Pinned):
            retention.remove(api, RUN, 1)
        with pytest.raises(NewestVerified):
            retention.remove(api, RUN, 5)
    daemon.kill()
    with running(daemon.root, listen=ANYWHERE) as again, Api(again.url) as api:
        assert retention.policy(api, RUN).policy == wanted
        retention.unpin(api, RUN, 1)
        wait_until(lambda: steps(daemon.root) == [2, 5])
        with Checkpointer(RUN, {"x": torch.zeros(3)}, at=again.socket, keep_last=7) as checkpointer:
            assert checkpointer.restore(2) == 2
            with pytest.raises(InUse):
                retention.remove(api, RUN, 2)
            checkpointer.save(6, metrics={"loss": 0.5}, wait="durable")
            wait_until(lambda: steps(daemon.root) == [6])
        stored = json.loads((daemon.root / RUN / naming.RUN_FILE).read_text())
        assert (stored["keep_last"], stored["policy"]["last"]) == (7, 1)


def test_a_save_over_the_quota_is_told_by_its_ticket(daemon: RunningDaemon) -> None:
    """The ticket has the named error and the next save warns; older steps restore, and with more room saves go on."""
    state = {"x": torch.arange(10_000)}
    with Checkpointer(RUN, state, at=daemon.socket) as checkpointer, Api(daemon.url) as api:
        checkpointer.save(1, wait="durable")
        wait_until(lambda: verified(api, 1))
        size = api.checkpoint(RUN, 1).bytes
        retention.set_policy(api, RUN, RetentionPolicy(quota_bytes=size * 3 // 2), retention.policy(api, RUN).tag)
        ticket = checkpointer.save(2)
        with pytest.raises(QuotaExceeded) as caught:
            ticket.result(180)
        assert (caught.value.members["used"], caught.value.members["quota"]) == (size, size * 3 // 2)
        assert [(made.step, made.code) for made in api.rounds(RUN, "aborted")] == [(2, "quota-exceeded")]
        assert steps(daemon.root) == [1]
        retention.set_policy(api, RUN, RetentionPolicy(last=1, quota_bytes=size * 5 // 2), "*")
        state["x"] += 1
        with pytest.warns(SaveWarning, match="quota"):
            checkpointer.save(3, wait="durable")
        wait_until(lambda: steps(daemon.root) == [3])

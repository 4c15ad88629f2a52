"""`holdfast wait --idle`: it ends when every save is written and verified, and not before."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch

from holdfast import Checkpointer
from holdfast.rest.api import Api
from tests.checkpoints import build_root, flip
from tests.daemons import running, wait_until
from tests.kit import commands
from tests.serving import served

call = partial(commands.call, "wait")


def test_waits_until_saves_are_verified(tmp_path: Path) -> None:
    """A slow disk is writing when it is asked; when it answers, the checkpoint is committed and verified."""
    flags = ("--write-bytes-per-second", "500000")  # four seconds, in which to ask
    with running(tmp_path / "root", *flags, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        with Checkpointer("llama", {"model": torch.nn.Linear(1000, 500)}, at=str(daemon.socket)) as checkpointer:
            ticket = checkpointer.save(1)
            assert api.nodes()[0].busy
            ended = json.loads(call("--idle", "--json", "--url", daemon.url).stdout)
            assert ended["idle"] and ended["seconds"] > 0
            assert api.checkpoint("llama", 1).verified
            ticket.result(180)
        assert not api.nodes()[0].busy


def test_gives_up(tmp_path: Path) -> None:
    """When the time is over, the exit status says so."""
    build_root(tmp_path, {"tiny": (1,)})
    with served(tmp_path) as service:
        busy = service.services.node().model_copy(update={"busy": True})
        with served(tmp_path / "other", node=lambda: busy) as occupied:
            ended = call("--idle", "--timeout", "0.3", "--url", occupied.url)
    assert (ended.exit_code, "deadline-exceeded" in ended.stderr) == (6, True)


def test_nobody_there_and_nothing_asked() -> None:
    """A daemon that is gone has nothing left to do; waiting for nothing in particular is refused."""
    assert call("--idle", "--url", "http://127.0.0.1:9").exit_code == 0
    assert call().exit_code == 2
    assert call("--idle", "--tier", "far").exit_code == 2
    assert call("r@1", "--tier", "").exit_code == 2
    for arguments in (("r@1", "--timeout", "nan"), ("--idle", "--timeout", "nan")):
        refused = call(*arguments, "--url", "http://127.0.0.1:9")
        assert (refused.exit_code, "--timeout" in refused.stderr) == (2, True)
    assert call("llama@1", "--idle").exit_code == 2 and call("--idle", "--committed").exit_code == 2
    assert call("llama", "--timeout", "0").exit_code == 2 and call("llama@latest", "--timeout", "0").exit_code == 2


def test_waits_for_a_step(tmp_path: Path) -> None:
    """It is asked while the step is written, and answers when it is committed, or verified; before its save it waits."""
    flags = ("--write-bytes-per-second", "1000000")
    with running(tmp_path / "root", *flags, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        with Checkpointer("llama", {"model": torch.nn.Linear(1000, 500)}, at=str(daemon.socket)) as checkpointer:
            early = call("llama@2", "--timeout", "0.3", "--url", daemon.url)
            assert (early.exit_code, "llama@2 is not a checkpoint yet" in early.stderr) == (6, True)
            ticket = checkpointer.save(2)
            assert not ticket.done
            assert call("llama@2", "--committed", "--url", daemon.url).stdout.startswith("llama@2 is ")
            assert api.checkpoint("llama", 2).step == 2
            ended = json.loads(call("llama@2", "--json", "--url", daemon.url).stdout)
            assert ended["state"] == "verified" and api.checkpoint("llama", 2).verified
        assert call("llama@2", "--timeout", "0", "--url", daemon.url).stdout == "llama@2 is verified\n"


def test_a_damaged_step_ends_it(tmp_path: Path) -> None:
    """Its damage is raised with its own exit status; nobody there is asked again until the time is over."""
    built = build_root(tmp_path, {"tiny": (1,)})["tiny", 1]
    flip(built.path / "model-00001-of-00002.safetensors", 3000)
    with served(tmp_path) as service, Api(service.url) as api:
        api.request("POST", "/v1/jobs", json={"kind": "verify", "run": "tiny", "step": 1})
        ended = call("tiny@1", "--timeout", "60", "--url", service.url)
    assert (ended.exit_code, "corrupt-extent" in ended.stderr) == (5, True)
    gone = call("tiny@1", "--timeout", "0.3", "--url", "http://127.0.0.1:9")
    assert (gone.exit_code, "deadline-exceeded" in gone.stderr) == (6, True)


def test_waits_for_a_copy_that_the_root_has_removed(tmp_path: Path) -> None:
    """What only the tier still has is there, and is told as that; what was never saved is awaited."""
    root = tmp_path / "root"
    with running(root, "--tier", f"far={tmp_path / 'far'}", listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        with Checkpointer("llama", {"x": torch.zeros(9)}, at=str(daemon.socket), keep_last=1) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, wait="durable")
                assert (
                    call(f"llama@{step}", "--tier", "far", "--url", daemon.url).stdout == f"llama@{step} is copied to far\n"
                )
        wait_until(lambda: [one.step for one in api.checkpoints("llama")] == [2])
        ended = call("llama@1", "--tier", "far", "--timeout", "0", "--url", daemon.url)
        assert (ended.exit_code, ended.stdout) == (0, "llama@1 is copied to far\n")
        assert json.loads(call("llama@1", "--tier", "far", "--json", "--url", daemon.url).stdout)["state"] == "copied"
        for arguments in (("llama@1",), ("llama@9", "--tier", "far"), ("other@1", "--tier", "far")):
            assert call(*arguments, "--timeout", "0", "--url", daemon.url).exit_code == 6

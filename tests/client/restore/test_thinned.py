"""Thinned checkpoints: their weights load everywhere; what was taken out is refused, with the step that has it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from holdfast import Checkpointer
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointThinned
from holdfast_formats.rest.retention import RetentionPolicy
from tests.client.test_huggingface import tiny
from tests.daemons import RunningDaemon, running, wait_until
from tests.kit.commands import call, call_json

RUN, STEPS = "thin", (1, 2, 3)


class Trainer:
    """A model in bfloat16 whose optimizer has stepped, so that it has masters' worth of state."""

    def __init__(self) -> None:
        self.model: LlamaForCausalLM = tiny(tied=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    @property
    def state(self) -> dict:
        return {"model": self.model, "optim": self.optimizer}

    def step(self) -> None:
        ids = torch.arange(16)[None] % 64
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon that has thinned the older two of three checkpoints."""
    root = tmp_path_factory.mktemp("thinned") / "root"
    with running(root, listen="127.0.0.1:0") as daemon:
        trainer = Trainer()
        with Checkpointer(RUN, trainer.state, at=daemon.socket, assets=[trainer.model.config]) as checkpointer:
            for step in STEPS:
                trainer.step()
                checkpointer.save(step, wait="durable")
        with Api(daemon.url) as api:
            retention.set_policy(api, RUN, RetentionPolicy(keep_full=1), "*")
            wait_until(lambda: [c.thinned is not None for c in api.checkpoints(RUN)] == [False, True, True])
        yield daemon


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.view(torch.int16).clone() for name, tensor in model.state_dict().items()}


def committed(daemon: RunningDaemon, step: int) -> dict[str, torch.Tensor]:
    loaded = AutoModelForCausalLM.from_pretrained(daemon.root / naming.checkpoint_path(RUN, step), dtype=torch.bfloat16)
    return weights(loaded)


def test_its_optimizer_is_refused_with_the_nearest_step_that_has_it(daemon: RunningDaemon) -> None:
    """Nothing live has changed then; the newest one resumes."""
    trainer = Trainer()
    before = weights(trainer.model)
    with Checkpointer(RUN, trainer.state, at=daemon.socket) as checkpointer:
        with pytest.raises(CheckpointThinned, match=r"thin@1 was thinned at .* no longer has optim") as refused:
            checkpointer.restore(1)
        assert refused.value.members["nearest"] == 3 and "optim" in refused.value.members["groups"]
        assert "the nearest step that still has them is 3" in refused.value.hint
        assert all(torch.equal(before[name], now) for name, now in weights(trainer.model).items())
        assert checkpointer.restore() == 3
        assert checkpointer.restore(1, strict=False) == 1
        assert checkpointer.last_restore is not None
        assert any("thinned to its weights" in note for note in checkpointer.last_restore.notes)


@pytest.mark.parametrize("served", [True, False])
def test_its_weights_are_restored_as_they_were_saved(daemon: RunningDaemon, served: bool) -> None:
    """By a trainer, with a daemon or from the directory, and by transformers."""
    trainer = Trainer()
    with Checkpointer(RUN, {"model": trainer.model}, at=daemon.socket if served else daemon.root) as checkpointer:
        assert checkpointer.restore(2, groups=("model",)) == 2
        with pytest.raises(CheckpointThinned, match="no longer has extra"):
            checkpointer.restore(2)
    assert committed(daemon, 2).keys() == weights(trainer.model).keys()
    for name, tensor in committed(daemon, 2).items():
        assert torch.equal(tensor, weights(trainer.model)[name]), name
    assert any(not torch.equal(tensor, committed(daemon, 3)[name]) for name, tensor in committed(daemon, 2).items())


def test_the_command_line_says_what_it_is_for(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ls`, `show` and `keep` name it and the bytes that it saved; what was taken out cannot be exported."""
    monkeypatch.setenv("HOLDFAST_URL", daemon.url)
    assert [made["thinned"] is not None for made in call_json("ls", RUN)] == [False, True, True]
    assert "weights only" in call("ls", RUN).stdout
    shown = call("show", f"{RUN}@1").stdout
    assert "without extra, optim" in shown and "not for resuming this one" in shown
    assert json.loads(call("show", f"{RUN}@1", "--json").stdout)["thinned"]["groups"] == ["extra", "optim"]
    assert "thinned or compacted before: 2 (saved" in call("keep", RUN).stdout
    assert call("verify", f"{RUN}@1").exit_code == 0


def test_keep_shows_what_it_would_save_and_asks(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is lost; --json needs --yes for it."""
    monkeypatch.setenv("HOLDFAST_URL", daemon.url)
    trainer = Trainer()
    with Checkpointer("other", trainer.state, at=daemon.socket) as checkpointer:
        for step in (1, 2):
            trainer.step()
            checkpointer.save(step, wait="durable")
    with Api(daemon.url) as api:
        wait_until(lambda: all(checkpoint.verified for checkpoint in api.checkpoints("other")))
    seen = call_json("keep", "other", "--full", 1, "--dry-run")
    verdicts = {verdict["step"]: verdict for verdict in seen["verdicts"]}
    assert verdicts[1]["thin"] and not verdicts[2]["thin"] and verdicts[1]["bytes_after"] < verdicts[1]["bytes"] / 2
    assert seen["bytes_thinned"] == verdicts[1]["bytes"] - verdicts[1]["bytes_after"]
    refused = call("keep", "other", "--full", 1, "--json")
    assert refused.exit_code == 2 and "this would thin checkpoints" in refused.stdout
    monkeypatch.setenv("COLUMNS", "250")
    text = call("keep", "other", "--full", 1, "--dry-run").stdout
    assert "thinned: 1 (saves" in text and "full 1: 1 newer whole ones" in text
    assert call("keep", "other", "--full", 1, "--all", "--yes").exit_code == 0
    with Api(daemon.url) as api:
        wait_until(lambda: api.checkpoint("other", 1).thinned is not None)
        assert api.checkpoint("other", 1).bytes < verdicts[1]["bytes_after"] + 1

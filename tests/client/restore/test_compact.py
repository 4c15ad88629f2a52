"""Compact checkpoints of a small Llama: they resume in any layout, from states as close as is stated, and say so."""

from __future__ import annotations

import httpx
import pytest
import torch
from safetensors.torch import load
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import holdfast
from holdfast import Checkpointer
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.rest.retention import RetentionPolicy
from tests.client.test_huggingface import tiny
from tests.daemons import RunningDaemon, wait_until
from tests.kit.commands import call, call_json
from tests.kit.daemons import own_daemon

RULES = {"bf16": 0.004, "int8": 0.02}  # the most by which Adam's update may differ, of its norm; measured 0.002 and 0.008
STEPS = (1, 2)
WARM = 12  # optimizer steps before the first save
Updates = dict[str, torch.Tensor]


class Trainer:
    """A Llama in F32 with AdamW, and BF16 weights that are masters rounded."""

    def __init__(self) -> None:
        self.model: LlamaForCausalLM = tiny(tied=False).float()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.master = {"w": torch.zeros(48, 300)}
        self.extra = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(48, 300, dtype=torch.bfloat16))})

    @property
    def state(self) -> dict:
        return {"model": self.model, "optim": self.optimizer}

    @property
    def rounded(self) -> dict:
        return {"model": self.extra, "master": self.master}

    def train(self, steps: int) -> None:
        chance = torch.Generator().manual_seed(steps)
        for _ in range(steps):
            ids = torch.randint(0, 64, (2, 24), generator=chance)
            self.model(input_ids=ids, labels=ids).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def updates(self) -> Updates:
        """What Adam would add to each parameter now, but for the learning rate."""
        found = {}
        for name, parameter in self.model.named_parameters():
            state, (first, second) = self.optimizer.state[parameter], self.optimizer.defaults["betas"]
            step = state["step"]
            root = (state["exp_avg_sq"] / (1 - second**step)).sqrt() + self.optimizer.defaults["eps"]
            found[name] = state["exp_avg"] / (1 - first**step) / root
        return found


def apart(found: Updates, expected: Updates) -> float:
    """The norm of the difference of all updates, by their norm."""
    difference = torch.cat([(found[name] - expected[name]).ravel() for name in expected])
    return float(difference.norm() / torch.cat([update.ravel() for update in expected.values()]).norm())


daemon = own_daemon()


@pytest.fixture(scope="module")
def saved(daemon: RunningDaemon) -> Trainer:
    """What both runs have as step 1, which is compact: for each rule one run, and `masters` for the third."""
    trainer = Trainer()
    trainer.train(WARM)
    trainer.master["w"].copy_(torch.randn(48, 300, generator=torch.Generator().manual_seed(1)))
    trainer.extra["w"].data.copy_(trainer.master["w"])
    runs = {**{rule: trainer.state for rule in RULES}, "masters": trainer.rounded}
    for run, state in runs.items():
        with Checkpointer(run, state, at=daemon.socket, assets=[trainer.model.config]) as checkpointer:
            for step in STEPS:
                checkpointer.save(step, wait="durable")
    with Api(daemon.url) as api:
        for run in runs:
            policy = RetentionPolicy(optim=run if run in RULES else "exact", optim_full=1)  # type: ignore[arg-type]
            retention.set_policy(api, run, policy, "*")
        for run in runs:
            wait_until(lambda run=run: [c.compacted is not None for c in api.checkpoints(run)] == [False, True])
    return trainer


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("served", [True, False])
def test_adams_update_is_as_close_as_stated(daemon: RunningDaemon, saved: Trainer, rule: str, served: bool) -> None:
    """With a daemon or from the directory; weights and step counts are exact, and a note says what is not."""
    trainer = Trainer()
    with Checkpointer(rule, trainer.state, at=daemon.socket if served else daemon.root) as checkpointer:
        assert checkpointer.restore(1) == 1
        report = checkpointer.last_restore
        assert report is not None and any(f"stored as {rule}" in note and "differ" in note for note in report.notes)
        assert 0 < apart(trainer.updates(), saved.updates()) < RULES[rule]
        for name, parameter in saved.model.named_parameters():
            assert torch.equal(trainer.model.get_parameter(name), parameter)
            assert torch.equal(
                trainer.optimizer.state[trainer.model.get_parameter(name)]["step"], saved.optimizer.state[parameter]["step"]
            )
        assert checkpointer.restore(2) == 2
        assert apart(trainer.updates(), saved.updates()) == 0


def test_weights_load_in_transformers(daemon: RunningDaemon, saved: Trainer) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(daemon.root / naming.checkpoint_path("int8", 1), dtype=torch.float32)
    assert all(torch.equal(loaded.get_parameter(name), one) for name, one in saved.model.named_parameters())


def test_masters_come_back_bit_for_bit(daemon: RunningDaemon, saved: Trainer) -> None:
    trainer = Trainer()
    with Checkpointer("masters", trainer.rounded, at=daemon.socket) as checkpointer:
        assert checkpointer.restore(1) == 1
        assert checkpointer.last_restore is not None
        assert any("bit for bit" in note for note in checkpointer.last_restore.notes)
    assert torch.equal(trainer.master["w"].view(torch.int32), saved.master["w"].view(torch.int32))
    found = holdfast.open("masters@1", root=daemon.root)
    with found:
        assert "w.low16" in found.manifest.tensors["master"] and found.tensors["master"]["w"].dtype == "F32"


def test_lists_of_tensors_have_each_as_it_was_saved(daemon: RunningDaemon, saved: Trainer) -> None:
    """Not its parts: by the API, the command line and on the pages, with how it is stored, and where its parts are."""
    with Api(daemon.url or "") as api:
        before, after = ({(one.group, one.name): one for one in api.tensors("int8", step)} for step in (2, 1))
        assert list(before) == list(after)
        found = after["optim", "lm_head.weight/exp_avg"]
        assert found.stored is not None and found.file == "" and found.stored.bytes < found.bytes
        assert found.stored.parts[0].startswith(found.name) and 0 < found.stored.error < 0.05
        other = after["model", "lm_head.weight"]
        assert other.stored is None and (other.file, other.start) == (before[other.group, other.name].file, other.start)
        listed = call_json("show", "int8@1", "--url", api.url)["tensors"]
        assert {(one["group"], one["name"]): one.get("stored", {}).get("coding") for one in listed} == {
            key: None if one.stored is None else one.stored.coding for key, one in after.items()
        }
        pages = f"{daemon.url}/runs/int8/checkpoints/1"
        shown = httpx.get(f"{pages}/tensors", params={"group": "optim", "q": "lm_head"}, trust_env=False).text
        assert "lm_head.weight/exp_avg" in shown and ".q8" not in shown and found.stored.coding in shown
        asked = {"group": "optim", "name": found.name}
        page = httpx.get(f"{pages}/extents", params=asked, trust_env=False).text
        assert "It is decoded from" in page and all(part in page for part in found.stored.parts)
        part = httpx.get(f"{pages}/extents", params={**asked, "name": found.stored.parts[0]}, trust_env=False).text
        assert "Each extent is read as a whole" in part and "It is decoded from" not in part
        master = httpx.get(f"{daemon.url}/runs/masters/checkpoints/1/extents?group=master&name=w", trust_env=False).text
        assert "exactly what was saved" in master and "its weight" in master


def test_shards_have_values(daemon: RunningDaemon, saved: Trainer) -> None:
    """By the service and by the library the same, in a layout that cuts blocks; a plan for readers of files is refused."""
    assert daemon.url is not None
    address = f"{daemon.url}/v1/runs/int8/checkpoints/1/shard"
    asked = {"layout": "tp=2", "rank": "1", "group": "optim"}
    got = httpx.get(address, params=asked, headers={"Accept-Encoding": "identity"}, trust_env=False)
    assert got.status_code == 200, got.text
    with holdfast.open("int8@1", root=daemon.root) as checkpoint:
        own = checkpoint.shard("tp=2", 1, "optim", framework="torch")
    sent = load(got.content)
    assert sent.keys() == own.keys() and not any(".q8" in name for name in sent)
    assert all(torch.equal(sent[name], own[name]) for name in sent)
    statistics = httpx.get(f"{daemon.url}/v1/runs/int8/checkpoints/1/statistics", trust_env=False)
    assert statistics.status_code == 404 and "before it was thinned or compacted" in statistics.json()["detail"]
    plan = httpx.get(address, params=asked, headers={"Accept": "application/json"}, trust_env=False)
    assert plan.status_code == 422 and "compacted" in plan.json()["detail"]


def test_the_command_line_says_it(daemon: RunningDaemon, saved: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ls`, `show`, `keep` and `diff`; a copy of codes for other programs is refused."""
    monkeypatch.setenv("HOLDFAST_URL", daemon.url or "")
    monkeypatch.setenv("COLUMNS", "250")
    assert "compact (int8)" in call("ls", "int8").stdout
    shown = call("show", "int8@1").stdout
    assert "optimizer states were stored as int8" in shown and "usable for  everything, including resuming" in shown
    assert "as it was saved" in call("show", "masters@1").stdout
    lines = [line.split("\t") for line in shown.splitlines()]
    (columns,) = [line for line in lines if "STORED AS" in line]
    rows = {line[1]: dict(zip(columns, line, strict=True)) for line in lines if len(line) == len(columns)}
    assert not any(".q8" in name for name in rows) and rows["lm_head.weight"]["STORED AS"] == ""
    moment = rows["lm_head.weight/exp_avg"]
    assert moment["DTYPE"] == "F32" and moment["STORED AS"].startswith(("int8, off by 0.0", "bf16, off by 0.0"))
    assert "STORED AS" not in call("show", "int8@2").stdout
    kept = call("keep", "int8").stdout
    assert "thinned or compacted before: 1 (saved" in kept
    assert call("verify", "int8@1").exit_code == 0
    found = {(one["group"], one["name"]): one for one in call_json("diff", "int8@1", "2")["items"]}
    moments = [one for (group, name), one in found.items() if name.endswith(("exp_avg", "exp_avg_sq"))]
    assert moments and all(one["state"] in ("equal", "changed") and (one["relative"] or 0) < 0.03 for one in moments)
    assert any(one["state"] == "changed" for one in moments)
    assert all(one["state"] == "equal" for (group, _), one in found.items() if group == "model")
    same = call_json("diff", "masters@1", "2")["items"]
    assert {one["state"] for one in same} == {"equal"}
    copied = call("restore", "int8@1", "--out", str(daemon.root.parent / "copy"), "--group", "optim")
    assert copied.exit_code == 2 and "stored in fewer bytes" in copied.stderr
    dry = call_json("keep", "int8", "--optim", "exact", "--optim-full", 1, "--dry-run")
    assert dry["could_save"].keys() <= {"weights", "exact", "bf16", "int8"}
    wrong = call("keep", "int8", "--optim", "bf16")
    assert wrong.exit_code == 2 and "belong together" in wrong.stderr

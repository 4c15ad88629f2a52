"""`holdfast export --as deepspeed-universal` is loaded by DeepSpeed, and the training goes on as after our restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.mapping.committed_files import CommittedFiles
from holdfast_service.storage import PosixTier
from holdfast_service.wings.convert.exports import deepspeed_universal
from holdfast_service.wings.convert.exports.plan import ExportOptions
from holdfast_service.wings.convert.exports.source import ExportSource, of_committed
from tests.integrations.deepspeed.test_deepspeed_engine import rows, tensors, wait
from tests.wings.convert.exports.sources import write

pytestmark = pytest.mark.filterwarnings("ignore")
NOT_TRAINED = ("frozen", "seen")  # of the model of `engines`: DeepSpeed loads neither from a universal checkpoint


def _source(step: Path) -> ExportSource:
    manifest = manifests.decode((step / naming.MANIFEST).read_bytes(), (step / naming.COMMIT).read_bytes())
    return of_committed(CommittedFiles(PosixTier(step), manifest), manifest)


def _train(engine: Any, steps: int) -> list[float]:
    """Steps whose dropout does not depend on what ran before."""
    from tests.integrations.deepspeed import engines

    losses = []
    for _ in range(steps):
        torch.manual_seed(engine.global_steps)
        losses.append(engines.step(engine, rows(engine.global_steps)))
    return losses


def _one_group(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """ZeRO 3 loads the hyper-parameters of the first group for all."""
    return torch.optim.AdamW([parameter for group in groups for parameter in group["params"]], lr=1e-2)


def _with_untrained(engine: Any, found: dict[str, torch.Tensor]) -> None:
    from deepspeed import zero

    frozen = engine.module.frozen
    with zero.GatheredParameters([frozen], modifier_rank=0) if hasattr(frozen, "ds_id") else torch.no_grad():
        frozen.data.copy_(found["frozen"])
    engine.module.seen.copy_(found["seen"])


@pytest.mark.parametrize(
    ("saved", "loaded", "kind"),
    [(1, 1, "bf16"), (1, 2, "fp32"), (2, 3, "bf16"), (3, 1, "bf16"), (3, 3, "fp32"), (1, 1, "fp16"), (2, 3, "fp16")],
)
def test_training_goes_on(make: Any, tmp_path: Path, saved: int, loaded: int, kind: str) -> None:
    """Weights, masters, moments, counters, scheduler and loss scale; the next losses are those after our restore."""
    how: dict[str, Any] = {"optimizer": _one_group} if 3 in (saved, loaded) else {}
    engine = make(saved, kind, **how)
    _train(engine, 3)
    engine.save_checkpoint(tmp_path / "saves", client_state={"epoch": 7})
    wait(engine)
    source = _source((tmp_path / "saves" / "global_step3").resolve())
    exported = deepspeed_universal.plan(source, ExportOptions())
    out = write(source, exported, tmp_path / "out")
    left_out = {one.what for one in exported.left_out}
    assert {f"model/{name}" for name in NOT_TRAINED} <= left_out and not any("exp_avg" in what for what in left_out)

    if loaded == 3:  # DeepSpeed gives all sub-groups one tensor of steps, to which each step of torch's AdamW adds
        how["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 30}
    resumed = make(loaded, kind, seed=5, **how)
    resumed.load_checkpoint(tmp_path / "saves")
    wanted = tensors(resumed)
    other = make(loaded, kind, run="", seed=9, checkpoint={"load_universal": True}, **how)
    path, client_state = other.load_checkpoint(str(out))
    assert path is not None and client_state["epoch"] == 7
    assert (other.global_steps, other.global_samples, other.skipped_steps) == (3, 12, resumed.skipped_steps)
    _with_untrained(other, wanted)
    found = tensors(other)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    assert other.get_lr() == resumed.get_lr()
    assert other.lr_scheduler.state_dict() == resumed.lr_scheduler.state_dict()
    if kind == "fp16":
        assert other.optimizer.loss_scaler.__dict__ == resumed.optimizer.loss_scaler.__dict__
    assert _train(other, 5) == _train(resumed, 5)
    after, expected = tensors(other), tensors(resumed)
    assert [name for name in expected if not torch.equal(after[name], expected[name])] == []

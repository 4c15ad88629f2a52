"""A Trainer's and Accelerate's directories are told from those of models by names alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.foreign.trainers import signs
from tests.wings.convert.foreign.directories import OnDisk

MODEL = ("config.json", "model.safetensors")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ((*MODEL, "trainer_state.json", "optimizer.pt", "rng_state.pth"), "trainer"),
        ((*MODEL, "trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"), "trainer"),
        ((*ADAPTER, "trainer_state.json", "scheduler.pt"), "trainer"),
        (("pytorch_model.bin", "trainer_state.json", "optimizer.pt"), "trainer"),
        ((*MODEL, "trainer_state.json", "training_args.bin"), "hf"),  # save_only_model
        ((*ADAPTER, "trainer_state.json"), "peft"),
        (("model.safetensors", "optimizer.bin", "random_states_0.pkl"), "accelerate"),
        (("pytorch_model.bin", "random_states_0.pkl", "random_states_1.pkl"), "accelerate"),
    ],
)
def test_a_directory_has_one_kind(tmp_path: Path, names: tuple[str, ...], kind: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    assert choose(OnDisk(tmp_path), None, KINDS).name == kind


@pytest.mark.parametrize("beside", ["global_step4", "latest"])
def test_deepspeed_of_a_trainer_and_of_accelerate_is_not_theirs(tmp_path: Path, beside: str) -> None:
    """DeepSpeed keeps model and optimizer in files of its own."""
    for name in (*MODEL, "trainer_state.json", "rng_state_0.pth"):
        (tmp_path / name).write_bytes(b"")
    files = OnDisk(tmp_path)
    assert signs.is_trainer(files)
    (tmp_path / beside).mkdir()
    assert signs.is_trainer(files) is (beside == "latest")
    (tmp_path / "trainer_state.json").unlink()
    (tmp_path / "random_states_0.pkl").write_bytes(b"")
    assert signs.is_accelerate(files) is (beside != "latest")

"""An adapter as PEFT saves it is imported whole, under its names, and nothing that only looks like one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast_formats.errors import CheckpointError, StateMismatch
from holdfast_formats.mapping import reading
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.foreign.peft_adapter import KIND

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
STATE = {f"{PREFIX}.lora_A.weight": torch.arange(8.0).reshape(2, 4), f"{PREFIX}.lora_B.weight": torch.ones(6, 2).bfloat16()}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "README.md").write_text("# an adapter")
    return tmp_path


@pytest.mark.parametrize("ending", ["safetensors", "bin", "both"])
def test_an_adapter(directory: Path, ending: str) -> None:
    """In either form, or in both, of which one is read; its configuration is kept."""
    if ending != "bin":
        save_file(STATE, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    if ending != "safetensors":
        torch.save(STATE, directory / "adapter_model.bin")
    files = hub_snapshot.opened(directory)
    assert choose(files, None, KINDS) is KIND
    listing = KIND.read(files, ReadOptions())
    assert sorted(use.file for use in listing.files) == files.list("")
    assert set(listing.assets) == {"README.md", "adapter_config.json"}
    assert [use.file for use in listing.files if use.use == "unused"] == (["adapter_model.bin"] if ending == "both" else [])
    assert {key.name for key in listing.tensors} == set(STATE)
    for key, tensor in listing.tensors.items():
        assert key.group == "adapter"
        assert reading.fetched(files, tensor).tobytes() == STATE[key.name].view(torch.uint8).numpy().tobytes()


def test_what_is_no_adapter(directory: Path) -> None:
    """Without weights, with a trainer's state, with quantised or no tensors, or a configuration of something else."""
    read = lambda: KIND.read(hub_snapshot.opened(directory), ReadOptions())  # noqa: E731
    with pytest.raises(StateMismatch, match="neither"):
        read()
    torch.save({}, directory / "adapter_model.bin")
    with pytest.raises(StateMismatch, match=r"adapter_model\.bin has no tensors"):
        read()
    torch.save({**STATE, "config": CONFIG}, directory / "adapter_model.bin")
    with pytest.raises(StateMismatch, match=r"adapter_model.bin has 'config', which is a dict, not a tensor"):
        read()
    torch.save({f"{PREFIX}.lora_A.weight": torch.ones(2, dtype=torch.int8)}, directory / "adapter_model.bin")
    with pytest.raises(StateMismatch, match="looks like quantised weights"):
        read()
    torch.save(STATE, directory / "adapter_model.bin")
    torch.save({}, directory / "optimizer.pt")
    with pytest.raises(StateMismatch, match=r"optimizer.pt is training state"):
        read()
    for config in ("{", "[]", "{}"):
        (directory / "adapter_config.json").write_text(config)
        with pytest.raises(CheckpointError, match=r"adapter_config.json"):
            read()

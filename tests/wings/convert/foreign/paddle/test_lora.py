"""LoRA adapters of Paddle come out as PEFT names and holds them, with a configuration that PEFT reads."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_service.wings.convert.foreign.paddle import lora
from tests.wings.convert.foreign.paddle import written
from tests.wings.convert.foreign.paddle.written import check_golden, read

KIND = lora.KIND
LAYER = "model.layers.0.self_attn.q_proj"
SHAPES = {f"{LAYER}.lora_A": (6, 2), f"{LAYER}.lora_B": (2, 4)}
PEFT = "base_model.model.model.layers.0.self_attn.q_proj"


def test_what_paddle_wrote_is_exact() -> None:
    """Adapter, masters and optimizer; the file says "pt", and is in Paddle's layout all the same."""
    listing = check_golden("lora", KIND, ("adapter", "master", "optim"))
    assert len(listing.tensors) == 12 * 5
    config = json.loads(listing.made_assets["adapter_config.json"])
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["use_rslora"]) == ("LORA", 4, 8, False)
    assert re.fullmatch(config["target_modules"], "model.layers.1.mlp.down_proj")
    assert not re.fullmatch(config["target_modules"], "model.layers.1.mlp.up_proj")
    assert listing.assets == ("config.json", "lora_config.json")


def _config(folder: Path, **members: Any) -> None:
    stated = {"r": 2, "lora_alpha": 4, "target_modules": [".*q_proj.*"], **members}
    (folder / "lora_config.json").write_text(json.dumps(stated))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickled_adapter(tmp_path: Path, protocol: int) -> None:
    """`lora_model_state.pdparams`, with bfloat16 as uint16, and a bias."""
    _config(tmp_path, trainable_bias="lora", rslora=True)
    held: dict[str, Any] = {name: written.weight(name, shape).view("u2") for name, shape in SHAPES.items()}
    held[f"{LAYER}.bias"] = written.master("bias", (4,))
    (tmp_path / "lora_model_state.pdparams").write_bytes(pickle.dumps(held, protocol))
    listing = read(KIND, tmp_path)
    for name, shape in SHAPES.items():
        found = written.values(tmp_path, listing, "adapter", f"{PEFT}.{name.rpartition('.')[2]}.weight")
        np.testing.assert_array_equal(found, written.weight(name, shape).T)
    found = written.values(tmp_path, listing, "adapter", f"{PEFT}.bias")
    np.testing.assert_array_equal(found, written.master("bias", (4,)))
    config = json.loads(listing.made_assets["adapter_config.json"])
    assert (config["bias"], config["use_rslora"]) == ("lora_only", True)
    as_is = read(KIND, tmp_path, as_is=True)
    assert not as_is.made_assets
    found = written.values(tmp_path, as_is, "adapter", f"{LAYER}.lora_A")
    np.testing.assert_array_equal(found, written.weight(f"{LAYER}.lora_A", (6, 2)))


def test_an_adapter_in_f32(tmp_path: Path) -> None:
    """It is no master of another one, although its model is in bfloat16."""
    _config(tmp_path)
    written.config(tmp_path)
    written.write_set(tmp_path, "peft_model", [{n: written.master(n, s) for n, s in SHAPES.items()}], "pt", type="lora")
    listing = read(KIND, tmp_path)
    assert {key.group for key in listing.tensors} == {"adapter"}
    assert {tensor.spec.dtype for tensor in listing.tensors.values()} == {"F32"}


def test_what_peft_lacks_is_refused(tmp_path: Path) -> None:
    """A configuration that is missing or says what PEFT has not, and a weight that is no adapter's."""
    held = {n: written.weight(n, s) for n, s in SHAPES.items()}
    written.write_set(tmp_path, "peft_model", [held], "pt", type="lora")
    with pytest.raises(StateMismatch, match=r"lora_config\.json, .* is missing"):
        read(KIND, tmp_path)
    for members, message in (
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"target_modules": [1]}, r"target_modules is \[1\]"),
        ({"loraga": True}, "no equivalent of loraga"),
        ({"use_mora": True}, "no equivalent of use_mora"),
        ({"scaling": 4.0}, r"scaling is 4\.0, but r and lora_alpha give 2"),
    ):
        _config(tmp_path, **members)
        with pytest.raises(StateMismatch, match=message):
            read(KIND, tmp_path)
    _config(tmp_path)
    written.write_set(tmp_path, "peft_model", [{**held, "lm_head.weight": written.weight("h", (3, 2))}], "pt")
    with pytest.raises(StateMismatch, match=r"'lm_head\.weight' is not lora_A, lora_B"):
        read(KIND, tmp_path)

"""An adapter of Paddle under PEFT's names, of objects that have what Paddle's have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.integrations.paddle import adapters
from holdfast.integrations.paddle.adapters import AdapterTensor
from tests.client.integrations.paddle.test_program import Config, Parameter

LAYER = "llama.layers.0.self_attn"
SETTINGS = {"r": 2, "lora_alpha": 4, "rslora": True, "trainable_bias": "lora", "do_qat": False, "lora_dropout": None}


class Base:
    """A model of Paddle whose names are not Hugging Face's, with three fused matrices."""

    def __init__(self, **tensors: Parameter) -> None:
        self.config = Config()
        self._tensors = tensors

    def state_dict(self, use_hook: bool) -> dict[str, Parameter]:
        return {name.replace("__", "."): one for name, one in self._tensors.items()}

    def sublayers(self, include_self: bool) -> list[Any]:
        return []

    def _gen_aoa_config(self, config: Any) -> dict[str, list[str]]:
        at = "layers.0.self_attn"
        return {
            "aoa_statements": [
                f"model.{at}.q_proj.weight^T -> llama.{at}.q_proj.weight",
                f"model.{at}.q_proj.bias -> llama.{at}.q_proj.bias",
                f"model.{at}.a.weight, model.{at}.b.weight -> llama.{at}.ab.weight, axis=0",
                "lm_head.weight -> lm_head.weight",
            ]
        }


class LoRAModel:
    __module__ = "paddleformers.peft.lora.lora_model"

    def __init__(self, trained: dict[str, Parameter], **settings: Any) -> None:
        base = {f"{LAYER}.q_proj.weight": (4, 4), f"{LAYER}.q_proj.bias": (4,), f"{LAYER}.ab.weight": (4, 8)}
        tensors = {name: Parameter(*shape) for name, shape in {**base, "lm_head.weight": (9, 4)}.items()} | trained
        for name, one in tensors.items():
            one.stop_gradient = name not in trained  # type: ignore[attr-defined]
        self.model = Base(**{name.replace(".", "__"): one for name, one in tensors.items()})
        values = SETTINGS | settings
        self.lora_config = SimpleNamespace(to_dict=lambda: dict(values), scaling=2.0)


def test_tensors_have_the_names_of_peft() -> None:
    """A and B are transposed; layers that are trained as a whole are what they are in Hugging Face's checkpoint."""
    trained = {
        f"{LAYER}.q_proj.lora_A": Parameter(4, 2),
        f"{LAYER}.q_proj.lora_B": Parameter(2, 4),
        f"{LAYER}.q_proj.bias": Parameter(4),
        f"{LAYER}.ab.lora_A": Parameter(4, 2),
        "lm_head.weight": Parameter(9, 4),
    }
    found = adapters.adapter_of(LoRAModel(trained))
    assert found is not None
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    assert found.tensors == {
        f"{LAYER}.q_proj.lora_A": AdapterTensor(f"{at}.lora_A.weight", True),
        f"{LAYER}.q_proj.lora_B": AdapterTensor(f"{at}.lora_B.weight", True),
        f"{LAYER}.q_proj.bias": AdapterTensor(f"{at}.bias", False),
        f"{LAYER}.ab.lora_A": AdapterTensor(f"base_model.model.{LAYER}.ab.lora_A.weight", True),
        "lm_head.weight": AdapterTensor("base_model.model.lm_head.weight", False),
    }
    assert found.targets == (f"{LAYER}.ab", "model.layers.0.self_attn.q_proj")
    assert found.trained == ("lm_head",) and found.fused == (f"{LAYER}.ab",)


def test_a_square_matrix_that_is_trained_as_a_whole_is_transposed() -> None:
    found = adapters.adapter_of(LoRAModel({f"{LAYER}.q_proj.weight": Parameter(4, 4)}))
    assert found is not None
    assert list(found.tensors.values()) == [AdapterTensor("base_model.model.model.layers.0.self_attn.q_proj.weight", True)]


def test_configurations_say_the_same() -> None:
    model = LoRAModel({f"{LAYER}.q_proj.lora_A": Parameter(4, 2), "lm_head.weight": Parameter(9, 4)})
    adapter = adapters.adapter_of(model)
    assert adapter is not None
    found = adapters.configs(model, adapter)
    peft = found["adapter_config.json"]
    assert (peft["r"], peft["lora_alpha"], peft["use_rslora"], peft["bias"]) == (2, 4, True, "lora_only")
    assert peft["target_modules"] == ["model.layers.0.self_attn.q_proj"] and peft["modules_to_save"] == ["lm_head"]
    assert found["lora_config.json"] == {**SETTINGS, "scaling": 2.0}


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        (f"{LAYER}.q_proj.lora_A", {"loraga": True}, "loraga=True"),
        ("experts.weight1_lora_A", {}, "experts.weight1_lora_A"),
    ],
)
def test_what_peft_lacks_is_named(name: str, settings: dict[str, Any], expected: str) -> None:
    """So all of the model is stored."""
    model = LoRAModel({name: Parameter(4, 2)}, **settings)
    assert adapters.unlike_peft(model) == expected and adapters.adapter_of(model) is None


def test_any_other_layer_has_no_adapter() -> None:
    assert adapters.adapter_of(SimpleNamespace()) is None

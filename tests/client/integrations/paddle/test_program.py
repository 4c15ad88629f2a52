"""What a Paddle model tells of itself, in objects that have what Paddle's have."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.integrations.paddle import program
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.programs.inverse_names import shapes_back, way_back


class Parameter:
    def __init__(self, *shape: int, dtype: str = "paddle.float32") -> None:
        self.shape, self.dtype = list(shape), dtype

    @property
    def size(self) -> int:
        return len(self.shape) and self.shape[0]


class Linear:
    """A layer of Paddle, by its module."""

    __module__ = "paddle.nn.layer.common"

    def __init__(self, *shape: int, **attributes: Any) -> None:
        self._parameters = {"weight": Parameter(*shape), "bias": Parameter(shape[-1])}
        vars(self).update(attributes)


class Projection(Linear):
    """Of a user, derived from Paddle's."""

    __module__ = "mine"


class Stranger:
    """A layer whose class only has the name of Paddle's."""

    def __init__(self, *shape: int) -> None:
        self._parameters = {"weight": Parameter(*shape)}


Stranger.__name__ = "Linear"


class Model:
    def __init__(self, config: Any = None, **layers: Any) -> None:
        self._parameters: dict[str, Any] = {}
        self.layers = layers
        if config is not None:
            self.config = config

    def sublayers(self, include_self: bool) -> list[Any]:
        return [self, *self.layers.values()]

    named_sublayers = sublayers

    @property
    def tensors(self) -> dict[str, Parameter]:
        return {f"{name}.{key}": one for name, layer in self.layers.items() for key, one in layer._parameters.items()}


class Config:
    """A config of PaddleFormers."""

    def __init__(self, width: int = 4, eps: float = 1e-6, secret: Any = None) -> None:
        self.width, self.eps, self.secret, self.tensor_model_parallel_size = width, eps, object(), 1

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_json_string(self, use_diff: bool, saving_file: bool) -> str:
        assert use_diff and saving_file
        return json.dumps({"model_type": "llama"})


def stored(model: Model) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {name: tuple(one.shape) for name, one in model.tensors.items()}
    return shapes_back(way_back(program.program_of(model, model.tensors)), shapes, {})


def test_weights_of_linear_layers_are_transposed():
    """Also of derived classes; those of other libraries, of other layers and of other kinds stay."""
    found = stored(Model(a=Linear(2, 3), b=Projection(4, 5), c=Stranger(2, 3), e=Linear(2, 3, transpose_weight=True)))
    assert {name: found[f"{name}.weight"] for name in "abce"} == {"a": (3, 2), "b": (5, 4), "c": (2, 3), "e": (2, 3)}
    assert found["a.bias"] == (3,)


def test_a_matrix_that_an_embedding_shares_stays():
    """It is as the embedding holds it."""
    head, embedding = Linear(9, 4), Stranger(9, 4)
    head._parameters["weight"] = embedding._parameters["weight"]
    assert stored(Model(embed=embedding, head=head))["embed.weight"] == (9, 4)


def test_averages_of_norms_have_the_names_of_torch():
    """`_mean` and `_variance` are a BatchNorm's."""
    norm = SimpleNamespace(_parameters={"_mean": Parameter(3), "_variance": Parameter(3), "weight": Parameter(3)})
    other = SimpleNamespace(_parameters={"_mean": Parameter(3)})
    assert set(stored(Model(bn=norm, mine=other))) == {"bn.running_mean", "bn.running_var", "bn.weight", "mine._mean"}


def test_older_classes_name_the_layers():
    """`transpose_weight_keys`, but for adapters; and a list of mappings."""
    model = Model(Config(), q_proj=Stranger(2, 3), kqv_proj=Stranger(2, 3), lora_q_proj=Stranger(2, 3))
    model.transpose_weight_keys = ["q_proj"]  # type: ignore[attr-defined]
    assert stored(model) == {"q_proj.weight": (3, 2), "kqv_proj.weight": (2, 3), "lora_q_proj.weight": (2, 3)}
    model = Model(Config(), fc=Stranger(2, 3), other=Stranger(2, 3))
    entries = [
        SimpleNamespace(source_name="h.fc", target_name="fc.weight", action="transpose"),
        SimpleNamespace(source_name="h.other", target_name="other.weight", action=None),
    ]
    model._get_name_mappings = lambda config: entries  # type: ignore[attr-defined]
    assert stored(model) == {"h.fc": (3, 2), "h.other": (2, 3)}
    entries[1].action = "split"
    with pytest.raises(InvalidRequest, match=r"makes 'other.weight' by 'split', which cannot be inverted"):
        stored(model)


def test_a_class_of_paddlenlp_reads_its_name_in_the_config():
    """A model that was constructed, not loaded, has none there. The base class of all has no list."""
    model = Model(Config(), fc=Stranger(2, 3), linear=Linear(2, 3))
    model.config.architectures = None

    def mappings(config: Any) -> list[Any]:
        prefix = "" if "Base" in config.architectures else "model."
        return [SimpleNamespace(source_name=f"{prefix}fc.weight", target_name="fc.weight", action="transpose")]

    def missing(config: Any) -> list[Any]:
        raise NotImplementedError

    model._get_name_mappings = mappings  # type: ignore[attr-defined]
    assert stored(model) == {"model.fc.weight": (3, 2), "linear.weight": (3, 2), "linear.bias": (3,)}
    assert model.config.architectures is None
    model._get_name_mappings = missing  # type: ignore[attr-defined]
    assert stored(model) == {"fc.weight": (2, 3), "linear.weight": (3, 2), "linear.bias": (3,)}


def test_the_class_of_a_fleet_model_is_the_one_that_made_it():
    """PaddleFleet's model has statements and config of another class."""

    class Qwen2ForCausalLMPipeDeprecated:
        @classmethod
        def _gen_aoa_config(cls, config: Any) -> dict[str, list[str]]:
            return {"aoa_statements": ["a^T -> fc.weight"]}

    model = Model(fc=Stranger(2, 3))
    model._gen_aoa_config = Qwen2ForCausalLMPipeDeprecated._gen_aoa_config  # type: ignore[attr-defined]
    model.config_to_save = Config()  # type: ignore[attr-defined]
    assert program.class_name(model) == "Qwen2ForCausalLM"
    assert stored(model) == {"a": (3, 2)}
    wrapper = type("DataParallel", (SimpleNamespace,), {"__module__": "paddle.distributed.parallel"})
    wrapped = wrapper(_layers=model)
    assert program.program_of(wrapped, model.tensors).name == "paddle-qwen2forcausallm"


def test_config_json_has_what_hugging_face_reads():
    """Also what equals a default of Paddle's, which may be another one there; nothing that JSON cannot express."""
    model = Model(Config(width=4), fc=Linear(2, 3))
    tensors = {**model.tensors, "big": Parameter(100, dtype="paddle.bfloat16"), "ids": Parameter(999, dtype="paddle.int64")}
    assert program.values_of(model, model.config, tensors) == {
        "model_type": "llama",
        "width": 4,
        "eps": 1e-6,
        "architectures": ["Model"],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    assert program.config_of(Model(fc=Linear(2, 3))) is None

"""The names under which a Megatron model is stored: its own, or those of Hugging Face, by the mapping program that imports
and exports use too.

A program says which rows of Hugging Face's tensors one of Megatron's has. So the pieces of a local parameter are cut
further, along rows, and no rank needs more than it has: `from_pretrained` reads what any parallel layout has saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

from holdfast.integrations.megatron.pieces import ModelTensors, ParameterPiece
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.layout.rules.expressions import sizes_for
from holdfast_formats.mapping.box_moves import BoxMove, drawn
from holdfast_formats.programs.choice import load
from holdfast_formats.programs.environment import Environment
from holdfast_formats.programs.inverse_names import lenient
from holdfast_formats.programs.operations import Ranks
from holdfast_formats.region import Box, Shape

_VOCABULARY = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})
# Norms that stand before a Linear, and their names inside Transformer Engine's fused layers, which the program has.
_NORMS = {"input_layernorm": "self_attention.linear_qkv.layer_norm", "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm"}
_NORM = re.compile(rf"(decoder\.layers\.\d+\.)({'|'.join(_NORMS)})\.(weight|bias)")


class _Target(NamedTuple):
    """A part of one of Megatron's tensors, as a part of a stored tensor of this name and shape."""

    name: str
    shape: Shape
    move: BoxMove


class Names(Protocol):
    """How tensors are named in a checkpoint."""

    family: str

    def renamed(self, tensors: ModelTensors) -> ModelTensors:
        """The same tensors with pieces of stored tensors."""
        ...

    def check(self, chunks: Sequence[Any]) -> None:
        """Raises `InvalidRequest` if the model does not fit the names."""
        ...


class MegatronNames:
    """Megatron's own names, such as decoder.layers.0.self_attention.linear_qkv.weight."""

    family = "megatron"

    def renamed(self, tensors: ModelTensors) -> ModelTensors:
        return tensors

    def check(self, chunks: Sequence[Any]) -> None:
        """Any model has these names."""


class HuggingFaceNames:
    """The names of the architecture that a transformers config, or the contents of a config.json, states."""

    family = "huggingface"

    def __init__(self, config: Any) -> None:
        """Raises `InvalidRequest` for architectures without a program."""
        said = config if isinstance(config, Mapping) else config.to_dict() if hasattr(config, "to_dict") else None
        if said is None:
            raise InvalidRequest(
                f"huggingface= takes a transformers config or a dict, not a {type(config).__name__}",
                hint="AutoConfig.from_pretrained(…), or json.loads of a config.json",
            )
        architectures = list(said.get("architectures") or [])
        kinds = [name.removesuffix("ForCausalLM").lower() for name in architectures if name.endswith("ForCausalLM")]
        program = load("hf-megatron-inverse")
        if set(kinds).isdisjoint(program.model_types):
            raise InvalidRequest(
                f"no program maps Megatron's names to the architectures {architectures}",
                hint=f"use a model of type {', '.join(program.model_types)}; or leave huggingface= out to save "
                "under Megatron's own names",
            )
        self._config = dict(said)
        if not said.get("head_dim") and said.get("hidden_size") and said.get("num_attention_heads"):
            self._config["head_dim"] = said["hidden_size"] // said["num_attention_heads"]
        self._statements = lenient(program.statements)
        self._sizes = sizes_for(program.sizes, {**said, "padded_vocab_size": None})

    def check(self, chunks: Sequence[Any]) -> None:
        """Refuse a model of other sizes than the config's."""
        config = chunks[0].config
        pairs = {
            "num_hidden_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_query_groups,
            "head_dim": getattr(config, "kv_channels", None),
            "rms_norm_eps": config.layernorm_epsilon,
        }
        wrong = [
            f"{name}: {self._config[name]}, Megatron's {now}"
            for name, now in pairs.items()
            if now is not None and self._differs(name, now)
        ]
        tied = getattr(chunks[0], "share_embeddings_and_output_weights", None)
        if tied is not None and self._differs("tie_word_embeddings", bool(tied)):
            wrong.append(f"tie_word_embeddings: {self._config['tie_word_embeddings']}, Megatron's {tied}")
        if wrong:
            raise InvalidRequest(
                f"the Hugging Face config does not belong to this model: {'; '.join(wrong)}",
                hint="use the config of this model",
            )

    def renamed(self, tensors: ModelTensors) -> ModelTensors:
        """Raises `InvalidRequest`, with the name, for a tensor that the program does not have, and for other sizes."""
        own = {piece.name: stored.own for stored in tensors.tensors for piece in stored.pieces}
        targets = self._targets({piece.name: piece.shape for stored in tensors.tensors for piece in stored.pieces}, own)
        found = [
            stored._replace(pieces=tuple(new for piece in stored.pieces for new in _cut(piece, targets[piece.name])))
            for stored in tensors.tensors
        ]
        return ModelTensors(tuple(found), tensors.modules)

    def _targets(self, shapes: Mapping[str, Shape], own: Mapping[str, str]) -> dict[str, list[_Target]]:
        """The parts of stored tensors that each of Megatron's tensors has, by its name; `own` has the module's names."""
        for name in _VOCABULARY & shapes.keys():
            if shapes[name][0] != self._config.get("vocab_size"):
                raise InvalidRequest(
                    f"{own[name]} has {shapes[name][0]} rows, and vocab_size of the Hugging Face config is "
                    f"{self._config.get('vocab_size')}",
                    hint="Megatron pads the vocabulary: set vocab_size to its padded size; those rows are trained",
                )
        called = {_NORM.sub(lambda match: f"{match[1]}{_NORMS[match[2]]}_{match[3]}", name): name for name in shapes}
        around = Environment({fused: shapes[name] for fused, name in called.items()}, self._sizes, Ranks())
        try:
            for statement in self._statements:
                around.run(statement, None)
        except StateMismatch as problem:
            raise InvalidRequest(
                f"the Hugging Face config does not belong to this model: {problem.detail}",
                hint="use the config of this model",
            ) from problem
        for name in map(called.__getitem__, around.unnamed()):
            raise InvalidRequest(
                f"the Hugging Face architecture has no name for {own[name]}, which is {name} in Megatron",
                hint="leave out huggingface= to save under Megatron's own names",
            )
        found: dict[str, list[_Target]] = {name: [] for name in shapes}
        for name, arranged in around.held.items():
            for move in arranged.moves:
                found[called[move.source.name]].append(_Target(name, arranged.shape, move))
        return found

    def _differs(self, name: str, now: Any) -> bool:
        return self._config.get(name) is not None and self._config[name] != now


def _cut(piece: ParameterPiece, targets: Sequence[_Target]) -> Iterator[ParameterPiece]:
    """The pieces of stored tensors that contain the rows of a piece, in their order in memory."""
    width = prod(piece.box[1:])
    parts = [(one, drawn(one.move, Box(piece.offset, piece.box))) for one in targets]
    held = [(one, part) for one, part in parts if part is not None and part.box.volume]
    for one, part in sorted(held, key=lambda pair: pair[1].box.offset):
        start = piece.start + (part.box.offset[0] - piece.offset[0]) * width
        yield ParameterPiece(one.name, one.shape, part.target.offset, part.target.shape, start)

"""The names under which a Megatron model is stored: its own, or those of a Hugging Face architecture.

A table says which tensors of Hugging Face the rows of one of Megatron's are. So the pieces of a local parameter are cut
further, along rows, and no rank needs more than it has: `from_pretrained` reads what any parallel layout has saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from math import prod
from typing import Any, NamedTuple, Protocol

from holdfast.integrations.megatron.pieces import ModelTensors, ParameterPiece, Stored
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout import rules

_PLACES = {"{layer}": r"(?P<layer>\d+)", "{part}": r"(?P<part>weight|bias)"}


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

    def __init__(self, config: Any) -> None:
        """Raises `InvalidRequest` for architectures without a table."""
        said = config if isinstance(config, Mapping) else config.to_dict() if hasattr(config, "to_dict") else None
        if said is None:
            raise InvalidRequest(
                f"huggingface= takes a transformers config or a dict, not a {type(config).__name__}",
                hint="AutoConfig.from_pretrained(…), or json.loads of a config.json",
            )
        architectures = list(said.get("architectures") or [])
        found = next((name for name, about in _tables().items() if set(architectures) & set(about["architectures"])), None)
        if found is None:
            known = sorted(one for about in _tables().values() for one in about["architectures"])
            raise InvalidRequest(
                f"there is no table of Megatron's names for the architectures {architectures}",
                hint=f"there are tables for {', '.join(known)}; without huggingface=, Megatron's own names are used",
            )
        self.family = f"huggingface {found}"
        self._config = said
        self._rows = [
            (re.compile(_pattern(name)), entry) for entry in _tables()[found]["tensors"] for name in entry["megatron"]
        ]

    def check(self, chunks: Sequence[Any]) -> None:
        """Refuse a model of other sizes than the config's."""
        config = chunks[0].config
        pairs = {
            "num_hidden_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_query_groups,
            "rms_norm_eps": config.layernorm_epsilon,
        }
        wrong = [
            f"{name}: {self._config[name]}, Megatron's {now}" for name, now in pairs.items() if self._differs(name, now)
        ]
        tied = getattr(chunks[0], "share_embeddings_and_output_weights", None)
        if tied is not None and self._differs("tie_word_embeddings", bool(tied)):
            wrong.append(f"tie_word_embeddings: {self._config['tie_word_embeddings']}, Megatron's {tied}")
        if wrong:
            raise InvalidRequest(
                f"the Hugging Face config is not this model's: {'; '.join(wrong)}", hint="use the config of this model"
            )

    def renamed(self, tensors: ModelTensors) -> ModelTensors:
        """Raises `InvalidRequest`, with the name, for a tensor that the table does not have, and for other sizes."""
        found = [
            stored._replace(pieces=tuple(new for piece in stored.pieces for new in self._renamed(stored, piece)))
            for stored in tensors.tensors
        ]
        return ModelTensors(tuple(found), tensors.modules)

    def _differs(self, name: str, now: Any) -> bool:
        return self._config.get(name) is not None and self._config[name] != now

    def _renamed(self, stored: Stored, piece: ParameterPiece) -> Iterator[ParameterPiece]:
        for pattern, entry in self._rows:
            match = pattern.fullmatch(piece.name)
            if match is not None:
                names = [name.format(**match.groupdict()) for name in entry["stored"]]
                yield from _cut(piece, names, self._segments(stored, piece, entry))
                return
        raise InvalidRequest(
            f"{stored.own} is called {piece.name} by Megatron, and the table of {self.family} has no name for it",
            hint="without huggingface=, Megatron's own names are used",
        )

    def _segments(self, stored: Stored, piece: ParameterPiece, entry: Mapping[str, Any]) -> list[_Segment]:
        rows, kind = piece.shape[0], entry.get("rows")
        if entry.get("vocabulary") and rows != self._config.get("vocab_size"):
            raise InvalidRequest(
                f"{stored.own} has {rows} rows, and vocab_size of the Hugging Face config is "
                f"{self._config.get('vocab_size')}",
                hint="Megatron pads the vocabulary: set vocab_size to its padded size; those rows are trained",
            )
        if kind == "qkv":
            return self._of_heads(stored, rows)
        if kind == "halves":
            return [_Segment(0, rows // 2, 0, 0), _Segment(rows // 2, rows // 2, 1, 0)]
        return [_Segment(0, rows, 0, 0)]

    def _of_heads(self, stored: Stored, rows: int) -> list[_Segment]:
        heads = int(self._config["num_attention_heads"])
        groups = int(self._config.get("num_key_value_heads") or heads)
        size = int(self._config.get("head_dim") or self._config["hidden_size"] // heads)
        if rows != (heads + 2 * groups) * size or heads % groups:
            raise InvalidRequest(
                f"{stored.own} has {rows} rows; by the Hugging Face config, {heads} heads and two times {groups} key-value "
                f"heads of size {size} have {(heads + 2 * groups) * size}",
                hint="use the config of this model",
            )
        queries = heads // groups * size
        found = []
        for group in range(groups):
            at = group * (queries + 2 * size)
            found += [
                _Segment(at, queries, 0, group * queries),
                _Segment(at + queries, size, 1, group * size),
                _Segment(at + queries + size, size, 2, group * size),
            ]
        return found


class _Segment(NamedTuple):
    """The rows of a tensor of Megatron's from `start` on are the rows from `row` on of the stored tensor number `target`."""

    start: int
    rows: int
    target: int
    row: int


def _cut(piece: ParameterPiece, names: Sequence[str], segments: Sequence[_Segment]) -> Iterator[ParameterPiece]:
    """The pieces of stored tensors that contain the rows of a piece."""
    sizes = [sum(one.rows for one in segments if one.target == target) for target in range(len(names))]
    first, stop, width = piece.offset[0], piece.offset[0] + piece.box[0], prod(piece.box[1:])
    for one in segments:
        begin, end = max(first, one.start), min(stop, one.start + one.rows)
        if begin < end:
            yield ParameterPiece(
                names[one.target],
                (sizes[one.target], *piece.shape[1:]),
                (one.row + begin - one.start, *piece.offset[1:]),
                (end - begin, *piece.box[1:]),
                piece.start + (begin - first) * width,
            )


def _pattern(name: str) -> str:
    text = re.escape(name)
    for place, pattern in _PLACES.items():
        text = text.replace(re.escape(place), pattern)
    return text


@lru_cache
def _tables() -> dict[str, dict[str, Any]]:
    folder = resources.files("holdfast.integrations.megatron").joinpath("rules")
    return {
        path.name.removeprefix("mcore_").removesuffix(".toml"): rules.decode(path.read_bytes())
        for path in folder.iterdir()
        if path.name.endswith(".toml")
    }

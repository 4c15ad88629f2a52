"""The layout language: which part of a checkpoint a mesh of ranks holds, as text, JSON and an object.

`tp=4,pp=2:17/15,sharding=8:stage1:flat:align=64` is a layout; the empty text is one rank that holds everything. All
spellings of one layout have the same `text()`, which may be used in a URL and in an ETag.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.layout.mesh import AXES, ORDER, SHOWN_MAX, STAGES_MAX, WORLD_MAX, Mesh, arrange, told_order
from holdfast_formats.near_names import did_you_mean

TEXT_BYTES_MAX = 4096
KEYS_MAX = 64
LAYERS_MAX = 1 << 20  # layers of one virtual stage
ALIGN_MAX = 1 << 24  # elements
BUCKET_MAX = 1 << 48  # elements
VOCABULARY_MAX = 1 << 20  # the vocabulary is padded to a multiple of so many rows per tensor-parallel rank
SPLITS_KEPT = 64
CLOSE = 0.5  # one of the two letters is correct

METHODS = {"whole": ("sort",), "flat": ("align", "pad", "bucket"), "dim0": (), "flat-param": ("align",)}
STAGES = ("stage0", "stage1", "stage2", "stage3")
USUAL_METHOD = {1: "whole", 2: "whole", 3: "dim0"}
SORTS = ("size", "none")
OPTIONS = {"align": (1, ALIGN_MAX), "pad": (0, ALIGN_MAX), "bucket": (0, BUCKET_MAX)}  # least, most
FORMS = {
    "qkv": ("split", "contiguous", "heads", "groups", "ranks"),
    "gate_up": ("split", "contiguous", "ranks"),
    "experts": ("split", "stacked"),
}
KEYS = (*AXES, "order", *FORMS, "vocab", "rules")
_PARTS = "docs/layouts.md#the-parts lists every part of a layout with an example"
_NUMBER = re.compile(r"[0-9]{1,15}", re.ASCII)
_RULES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class Sharding(NamedTuple):
    """How data-parallel ranks shard tensors: from which stage on which tensors, by which method, with what padding.

    Stages 1 and 2 shard optimizer and master tensors, stage 3 parameters too; `method` is "" at stage 0. `align` and
    `bucket` count elements; a bucket of 0 means one buffer. A buffer's end is padded to a multiple of `pad`, 0 means
    count·align.
    """

    stage: int = 0
    method: str = ""
    sort: str = "size"
    align: int = 1
    pad: int = 0
    bucket: int = 0


class Forms(NamedTuple):
    """The pattern of each kind of fused tensor; "" means as it is stored."""

    qkv: str = ""
    gate_up: str = ""
    experts: str = ""


class Layout(NamedTuple):
    """A mesh and what its ranks hold.

    `split` is the layers of each virtual stage in order, () for an even split. `vocabulary` pads its rows to a multiple of
    vocabulary·tp, 0 not at all.
    """

    mesh: Mesh = Mesh()
    sharding: Sharding = Sharding()
    split: tuple[int, ...] = ()
    forms: Forms = Forms()
    vocabulary: int = 0
    rules: str = "auto"

    @property
    def stage(self) -> int:
        return self.sharding.stage

    @property
    def method(self) -> str:
        return self.sharding.method

    def form(self, kind: str) -> str:
        """The pattern in which fused tensors of a kind are held; "" means as they are stored."""
        return str(getattr(self.forms, kind))

    def virtual_stage(self, layer: int, layers: int) -> tuple[int, int]:
        """The pipeline stage of a layer and the chunk inside it, interleaved as in Megatron: virtual stage = chunk·pp +
        stage.

        Layers after the last one (a multi-token-prediction module) belong to the last virtual stage. Raises `StateMismatch`
        if an explicit split has another number of layers.
        """
        stages = self.mesh.pp * self.mesh.vpp
        ends = _ends(self.split, stages, layers)
        virtual = min(bisect_right(ends, layer), stages - 1)
        return virtual % self.mesh.pp, virtual // self.mesh.pp

    def notes(self, layers: int) -> tuple[str, ...]:
        """Notes on this layout's defaults for a model of so many layers."""
        stages = self.mesh.pp * self.mesh.vpp
        if self.split or not layers % stages:
            return ()
        least, longer = divmod(layers, stages)
        return (f"{layers} layers over {stages} stages: the first {longer} have {least + 1}, the others {least}",)


@lru_cache(SPLITS_KEPT)
def _ends(split: tuple[int, ...], stages: int, layers: int) -> list[int]:
    """For each virtual stage, the layer after its last one."""
    if not split:
        least, longer = divmod(layers, stages)
        return list(accumulate(least + (stage < longer) for stage in range(stages)))
    if sum(split) != layers:
        raise StateMismatch(
            f"the split {'/'.join(map(str, split))} covers {sum(split)} layers, but the model has {layers}",
            hint="list the number of layers of each virtual stage, or leave the split out",
        )
    return list(accumulate(split))


def parse(source: str | Mapping[str, Any]) -> Layout:
    """Parse a layout from text, JSON text or a mapping; `InvalidRequest` names the part that is wrong."""
    if not isinstance(source, str):
        return _layout(_of_mapping(source))
    if len(source) > TEXT_BYTES_MAX or len(source.encode("utf-8", "replace")) > TEXT_BYTES_MAX:
        raise InvalidRequest(
            f"a layout of {len(source)} characters is too long", hint=f"shorten it to at most {TEXT_BYTES_MAX} bytes"
        )
    stripped = source.strip()
    return _layout(_of_json(stripped) if stripped.startswith("{") else _of_text(stripped))


def _of_text(source: str) -> dict[str, str]:
    parts: dict[str, str] = {}
    for part in source.split(",") if source else ():
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator or not key:
            _refuse(f"{_shown(part)} in the layout is not key=value")
        _add(parts, key, value)
    return parts


def _of_json(source: str) -> dict[str, str]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            _refuse("the layout's JSON names a key twice")
        return dict(pairs)

    try:
        return _of_mapping(json.loads(source, object_pairs_hook=unique))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"the layout's JSON cannot be read: {_shown(str(error))}",
            hint='as in {"tp": 4, "pp": {"size": 2, "layers": [8, 8]}}',
        ) from None


def _of_mapping(source: Mapping[str, Any]) -> dict[str, str]:
    """Turn a mapping of numbers, strings of the language, and objects into parts:
    `{"pp": {"size": 4, "layers": [8, 8]}}`.
    """
    if not isinstance(source, Mapping) or len(source) > KEYS_MAX:
        _refuse(f"a layout is text or an object of at most {KEYS_MAX} keys")
    parts: dict[str, str] = {}
    for key, value in source.items():
        if not isinstance(key, str):
            _refuse(f"a layout's keys are words, not a {type(key).__name__}")
        _add(parts, key, "")
        parts[key] = _value(key, value)
    return parts


def _value(key: str, value: Any) -> str:
    if key == "order" and isinstance(value, list | tuple):
        return "-".join(_word(key, axis) for axis in value[: len(ORDER) + 1])
    if not isinstance(value, Mapping):
        return _word(key, value)
    fields = dict(value)
    pieces = [_word(key, fields.pop("size", 1))]
    if key == "pp" and "layers" in fields:
        layers = fields.pop("layers")
        if not isinstance(layers, list | tuple) or len(layers) > STAGES_MAX:
            _refuse(f"pp: layers must be a list of at most {STAGES_MAX} numbers")
        pieces += ["/".join(_word(key, n) for n in layers)]
    if key == "sharding" and "stage" in fields:
        pieces.append("stage" + _word(key, fields.pop("stage")).removeprefix("stage"))
    if key == "sharding" and "method" in fields:
        pieces.append(_word(key, fields.pop("method")))
    options = METHODS["flat"] + METHODS["whole"] if key == "sharding" else ()
    for name in fields:
        if name not in options:
            _unknown(f"option of {key}", str(name), ("size", *{"pp": ("layers",)}.get(key, ()), *options))
    return ":".join([*pieces, *(f"{name}={_word(key, fields[name])}" for name in fields)])


def _word(key: str, value: Any) -> str:
    if isinstance(value, str) and len(value) <= TEXT_BYTES_MAX:
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool) and -BUCKET_MAX <= value <= BUCKET_MAX:
        return str(value)
    shown = _shown(repr(value)) if isinstance(value, str | bool | float | None) else f"a {type(value).__name__}"
    raise InvalidRequest(f"{key}: expected a number or a word, not {shown}", hint=f'as in {{"{key}": 4}}')


def _add(parts: dict[str, str], key: str, value: str) -> None:
    if key not in KEYS:
        _unknown("part of a layout", key, KEYS)
    if key in parts:
        _refuse(f"the layout has {key} twice: {_shown(parts[key])} and {_shown(value)}")
    parts[key] = value


def _layout(parts: dict[str, str]) -> Layout:
    """The layout of the parts; each is text of the language."""
    pipeline, _, split = parts.get("pp", "1").partition(":")
    sharding, *options = parts.get("sharding", "1").split(":")
    sizes = {
        axis: _number(axis, parts[axis], 1, WORLD_MAX) for axis in AXES if axis in parts and axis not in ("pp", "sharding")
    }
    sizes |= {"pp": _number("pp", pipeline, 1, WORLD_MAX), "sharding": _number("sharding", sharding, 1, WORLD_MAX)}
    mesh = arrange(sizes, parts["order"].split("-") if "order" in parts else ORDER)
    layout = Layout(
        mesh,
        _sharding(mesh.sharding, options),
        _split(mesh, split) if ":" in parts.get("pp", "") else (),
        Forms(**{kind: _choice(kind, parts[kind], FORMS[kind]) for kind in FORMS if kind in parts}),
        _number("vocab", parts["vocab"], 1, VOCABULARY_MAX) if "vocab" in parts else 0,
        parts.get("rules", "auto"),
    )
    if not _RULES.fullmatch(layout.rules):
        _refuse(f"rules={_shown(layout.rules)} is not a table's name")
    if len(text(layout)) > TEXT_BYTES_MAX:
        _refuse(f"a layout whose text has {len(text(layout))} characters is too long", f"at most {TEXT_BYTES_MAX}")
    return layout


def _number(name: str, value: str, least: int, most: int) -> int:
    """Parse a whole number; `InvalidRequest` by name outside [least, most]."""
    number = int(value) if _NUMBER.fullmatch(value) else -1
    if not least <= number <= most:
        _refuse(f"{name}={_shown(value)} must be a whole number from {least} to {most}")
    return number


def _split(mesh: Mesh, value: str) -> tuple[int, ...]:
    stages = mesh.pp * mesh.vpp
    layers = tuple(_number("pp's layers", n.strip(), 0, LAYERS_MAX) for n in value.split("/"))
    if len(layers) != stages:
        _refuse(
            f"pp={mesh.pp}:{_shown(value)} lists {len(layers)} stages, but there are {stages}",
            f"give one number for each of the {mesh.pp}·{mesh.vpp} virtual stages, in order",
        )
    return layers


def _sharding(count: int, options: list[str]) -> Sharding:
    """Parse the text after the axis: `stage1:flat:align=128`. An axis without a stage shards what the
    lowest stage shards.
    """
    words = [word.strip() for word in options if "=" not in word]
    for word in words:
        if word not in STAGES and word not in METHODS:
            _unknown("way to shard", word, (*STAGES, *METHODS))
    stages, methods = ([word for word in words if word in known] for known in (STAGES, METHODS))
    if len(stages) > 1 or len(methods) > 1:
        _refuse(f"sharding={count} names more than one {'stage' if len(stages) > 1 else 'method'}: {', '.join(words)}")
    stage = STAGES.index(stages[0]) if stages else min(count - 1, 1)
    if methods and not stage:
        _refuse(f"sharding={count} has no method {methods[0]} at stage 0, which shards nothing", "name a stage")
    method = methods[0] if methods else USUAL_METHOD.get(stage, "")
    named: dict[str, Any] = {}
    for option in (option for option in options if "=" in option):
        name, _, value = (piece.strip() for piece in option.partition("="))
        if name in named:
            _refuse(f"sharding has {_shown(name)} twice")
        if name not in METHODS.get(method, ()):
            _unknown(f"option of {method or 'stage0'}", name, METHODS.get(method, ()))
        named[name] = _choice(name, value, SORTS) if name == "sort" else _number(name, value, *OPTIONS[name])
    return Sharding(stage, method, **named)


def _choice(key: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        _unknown(f"value of {key}", value, choices)
    return value


def text(layout: Layout) -> str:
    """The one text of a layout: default values are left out, the rest is in the order of `KEYS`."""
    return ",".join(f"{key}={value}" for key, value in _parts(layout).items())


def _parts(layout: Layout) -> dict[str, str]:
    mesh, sharding = layout.mesh, layout.sharding
    usual = Mesh(etp=mesh.tp)
    parts = {axis: str(getattr(mesh, axis)) for axis in AXES if getattr(mesh, axis) != getattr(usual, axis)}
    if layout.split:
        parts["pp"] = f"{mesh.pp}:{'/'.join(map(str, layout.split))}"
    if mesh.sharding > 1 or sharding.stage:
        parts["sharding"] = ":".join([str(mesh.sharding), f"stage{sharding.stage}", *_options(sharding)])
    if told_order(mesh):
        parts["order"] = "-".join(told_order(mesh))
    parts |= {kind: form for kind, form in layout.forms._asdict().items() if form}
    parts |= {"vocab": str(layout.vocabulary)} if layout.vocabulary else {}
    parts |= {"rules": layout.rules} if layout.rules != "auto" else {}
    return {key: parts[key] for key in KEYS if key in parts}


def _options(sharding: Sharding) -> list[str]:
    usual = Sharding()
    options = [name for name in METHODS.get(sharding.method, ()) if getattr(sharding, name) != getattr(usual, name)]
    method = [sharding.method] if sharding.method != USUAL_METHOD.get(sharding.stage, "") or options else []
    return method + [f"{name}={getattr(sharding, name)}" for name in options]


def _unknown(what: str, name: str, known: tuple[str, ...]) -> NoReturn:
    hint = did_you_mean(name.lower(), known, f"there is {', '.join(known) or 'none'}", CLOSE, most=1)
    _refuse(f"unknown {what}: {_shown(name)}", hint)


def _shown(value: str) -> str:
    return repr(value if len(value) <= SHOWN_MAX else value[:SHOWN_MAX] + "…")


def _refuse(detail: str, hint: str = _PARTS) -> NoReturn:
    raise InvalidRequest(detail, hint=hint)

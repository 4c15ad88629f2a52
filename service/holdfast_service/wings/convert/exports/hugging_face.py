"""Exports a model, its averages or its masters as a directory that `from_pretrained` of transformers loads."""

from __future__ import annotations

import json
from typing import Any

from holdfast_formats import naming
from holdfast_formats.dtypes import FLOATS
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.mapping.target_files import TargetFile
from holdfast_formats.rest.jobs import EXPORT_KINDS
from holdfast_service.wings.convert.exports import weights
from holdfast_service.wings.convert.exports.ordered_tensors import arrange, config_of
from holdfast_service.wings.convert.exports.plan import (
    ExportKind,
    ExportOptions,
    ExportPlan,
    copied_assets,
    other_groups,
    small_file,
    values_of_weights,
)
from holdfast_service.wings.convert.exports.safetensors_files import shard_set
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.exports.tied_tensors import said, tied

CONFIG = "config.json"
_DTYPE_KEYS = ("torch_dtype", "dtype")  # transformers' names, before version 5 and since
_TIES_KEY, _HEAD = "tie_word_embeddings", "lm_head.weight"
_OF_ADAPTERS = "adapter_config.json"  # beside a model, transformers would take the directory for an adapter's


def plan(source: ExportSource, options: ExportOptions) -> ExportPlan:
    """The weights in safetensors files with an index, and the checkpoint's small files beside them.

    Tied tensors are stored once if config.json ties them, as transformers does, else under each name. `options.dtype`
    is set in config.json, too.
    """
    if options.layout is not None:
        raise InvalidRequest("--layout does not apply to a Hugging Face directory", hint="leave --layout out")
    chosen = weights.choose(source, arrange(source, options.program), options)
    again, tie_notes = ({}, []) if options.program is not None else _ties(source)
    files = shard_set(weights.GROUP, tied(chosen.tensors, again).values(), "pt")
    index = files.index_file(naming.index_file_name(weights.GROUP))
    assets, notes = configured(source, options.dtype, frozenset({_OF_ADAPTERS}))
    used = frozenset({weights.GROUP, options.weights})
    left_out = other_groups(source, used, "a Hugging Face directory holds only a model") + values_of_weights(source, used)
    return ExportPlan((*files.files, index, *assets), (*chosen.notes, *tie_notes, *notes), (*chosen.left_out, *left_out))


def _ties(source: ExportSource) -> tuple[dict[str, str], list[str]]:
    """Ties that config.json lacks, whose tensors need a copy under the other name; and notes."""
    config, ties = config_of(source), source.ties(weights.GROUP)
    inner = config.get("text_config")
    ties_head = any(held.get(_TIES_KEY) is True for held in (config, inner) if isinstance(held, dict))
    once = {alias: name for alias, name in ties.items() if ties_head and alias.endswith(_HEAD)}
    again = {alias: name for alias, name in ties.items() if alias not in once}
    return again, [*said(once, f"tied weights are stored once, as {CONFIG} ties them"), *said(again)]


def configured(source: ExportSource, dtype: str | None, without: frozenset[str]) -> tuple[list[TargetFile], list[str]]:
    """The checkpoint's small files, with a requested dtype in config.json, and notes."""
    assets = copied_assets(source, without)
    if dtype is None or CONFIG not in source.assets:
        return assets, []
    changed = with_dtype(source.read_asset(CONFIG), FLOATS[dtype])
    if changed is None:
        return assets, [f"{CONFIG} was copied as it is: it names no dtype"]
    files = [small_file(CONFIG, changed) if asset.name == CONFIG else asset for asset in assets]
    return files, [f"the dtype in {CONFIG} is now {FLOATS[dtype]}"]


def with_dtype(config: bytes, dtype: str) -> bytes | None:
    """A config.json with this dtype wherever it has one, including those of its parts; None if nowhere."""
    try:
        document = json.loads(config)
    except (ValueError, RecursionError):
        return None
    if not _set_dtype(document, dtype):
        return None
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def _set_dtype(document: Any, dtype: str) -> bool:
    if not isinstance(document, dict):
        return False
    keys = [key for key in _DTYPE_KEYS if isinstance(document.get(key), str)]
    document.update(dict.fromkeys(keys, dtype))
    inner = [_set_dtype(value, dtype) for key, value in document.items() if key.endswith("_config")]
    return bool(keys) or any(inner)


KIND = ExportKind("hf", EXPORT_KINDS["hf"], plan)

"""Options of a `Checkpointer` that follow from a live Paddle model: its mapping program and its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.integrations.paddle import adapters
from holdfast.integrations.paddle import program as programs
from holdfast.integrations.paddle.aoa import LiveTensor
from holdfast.integrations.paddle.fleet.ranks import announce, of_all_ranks
from holdfast.integrations.paddle.fleet.wrappers import unwrapped
from holdfast.integrations.paddle.views import LayerViews
from holdfast.layout.rules_choice import ParallelLayout, ProgramSource, program_of
from holdfast.state import assets as asset_files


def layout(model: Any, program: ProgramSource = None) -> ParallelLayout | None:
    """The layout with which the checkpoints of a state of this model are Hugging Face's, for `Checkpointer(layout=…)`.

    `program` is a mapping program in place of the model's own. None is returned where Paddle's names and shapes are Hugging
    Face's, and of an adapter, which is stored as PEFT has it. Raises `InvalidRequest` for a model whose own statements
    cannot be used.
    """
    views = LayerViews(model)
    if views.places.adapter is not None:
        return None
    chosen = programs.program_of(model, views.tensors, _of_all_ranks) if program is None else program_of(program)
    return None if chosen is None else ParallelLayout(f"dp={_world()}", config=config(model), program=chosen)


def config(model: Any) -> Mapping[str, Any] | None:
    """What `layout` tells of the model: its config.json, None if it has none."""
    found = programs.config_of(unwrapped(model).layer)
    return None if found is None else programs.values_of(model, found, LayerViews(model).tensors)


def assets(model: Any) -> dict[str, Any]:
    """The model's config.json in Hugging Face's form, for `Checkpointer(assets=…)`; nothing for a model without a config.

    Of a LoRAModel also the adapter's configurations, as PEFT and as PaddleFormers read them.
    """
    known = config(model)
    layer = unwrapped(model).layer
    adapter = adapters.adapter_of(layer)
    own = {} if adapter is None else adapters.configs(layer, adapter)
    return own if known is None else {programs.CONFIG: known, **own}


def with_model(options: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """The options of a `Checkpointer`, with layout and config.json of the model where they have none of their own."""
    given = {} if options.get("assets") is None else asset_files.collect(options["assets"])
    own = {} if "layout" in options else {"layout": layout(model)}
    return {**own, **options, "assets": {**assets(model), **given}}


def _of_all_ranks(live: Mapping[str, LiveTensor]) -> Mapping[str, LiveTensor]:
    """A pipeline stage has a part of the model, and all ranks need one program."""
    ranks = announce()
    return live if ranks is None else of_all_ranks(ranks, "program", live, LiveTensor)


def _world() -> int:
    import paddle

    return int(paddle.distributed.get_world_size())

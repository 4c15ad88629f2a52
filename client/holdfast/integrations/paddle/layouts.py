"""How a live Paddle model is stored: through its mapping program, with its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.integrations.paddle import adapters
from holdfast.integrations.paddle import program as programs
from holdfast.integrations.paddle.aoa import SOURCE, TARGET, LiveTensor
from holdfast.integrations.paddle.fleet.ranks import announce, of_all_ranks
from holdfast.integrations.paddle.fleet.wrappers import unwrapped
from holdfast.integrations.paddle.views import LayerViews
from holdfast.layout.model_form import ModelForm
from holdfast.layout.rules_choice import ParallelLayout, ProgramSource, program_of
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.programs import Program


def layout(model: Any, program: ProgramSource) -> ParallelLayout:
    """The layout that stores a model through a mapping program in place of its own, for `layout=` of `attach` and of a
    `Checkpointer`.
    """
    chosen = program_of(program)
    if chosen is None:
        raise InvalidRequest(
            "layout() was given no program", hint="layout(model, 'mine.toml'); the model's own needs no layout="
        )
    return _layout(model, LayerViews(model), chosen._replace(source=SOURCE, target=TARGET))


def form_of(model: Any, views: LayerViews) -> ModelForm:
    """How a model is stored without `layout=`: through its own program, beside its config.json, if it has one. An adapter
    goes through none: it is stored as PEFT has it.

    The layout raises `InvalidRequest` for a model whose own statements cannot be used.
    """

    def own_layout() -> ParallelLayout | None:
        if views.places.adapter is not None:
            return None
        return _layout(model, views, views.program(_of_all_ranks))

    def parts() -> list[tuple[str, dict[str, Any]]]:
        return [(name, vars(layer)) for name, layer in views.places.layer.named_sublayers(include_self=True)]

    return ModelForm(own_layout, lambda: _assets(model, views), parts)


def _layout(model: Any, views: LayerViews, program: Program) -> ParallelLayout:
    return ParallelLayout(f"dp={_world()}", config=_config(model, views), program=program)


def _config(model: Any, views: LayerViews) -> Mapping[str, Any] | None:
    """The model's config.json, None if it has none."""
    found = programs.config_of(unwrapped(model).layer)
    return None if found is None else programs.values_of(model, found, views.tensors)


def _assets(model: Any, views: LayerViews) -> dict[str, Any]:
    """The model's config.json in Hugging Face's form; nothing for a model without a config.

    Of a LoRAModel also the adapter's configurations, as PEFT and as PaddleFormers read them.
    """
    known, adapter = _config(model, views), views.places.adapter
    own = {} if adapter is None else adapters.configs(views.places.layer, adapter)
    return own if known is None else {programs.CONFIG: known, **own}


def _of_all_ranks(live: Mapping[str, LiveTensor]) -> Mapping[str, LiveTensor]:
    """A pipeline stage has a part of the model, and all ranks need one program."""
    ranks = announce()
    return live if ranks is None else of_all_ranks(ranks, "program", live, LiveTensor)


def _world() -> int:
    import paddle

    return int(paddle.distributed.get_world_size())

"""Layout and files that the model of a state brings along, if its tensors are not stored as they are in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from holdfast.layout.rank_view import MODEL
from holdfast.layout.rules_choice import ParallelLayout
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.programs import AUTO


class ModelForm(NamedTuple):
    """How a framework's model is stored: `layout` returns the layout with the model's mapping program, and `assets` the
    files beside the weights. Both are called when a Checkpointer is constructed, the first unless it is given a layout.
    """

    layout: Callable[[], ParallelLayout]
    assets: Callable[[], Mapping[str, Any]]


def completed(state: Mapping[str, Any], layout: ParallelLayout | None, assets: Any) -> tuple[ParallelLayout | None, Any]:
    """The layout and the assets of a state, given those of its Checkpointer, which replace those of its model.

    Raises `InvalidRequest` for a layout without a program, in which the weights would have another orientation.
    """
    form = _form_of(state)
    if form is None:
        return layout, assets
    if layout is not None and layout.program in (None, AUTO):
        raise InvalidRequest(
            "layout= names no mapping program, and the tensors of this model are stored through one",
            hint="leave layout= out, which takes the program of the model; or name one: "
            f"layout=ParallelLayout({str(layout.layout)!r}, program=…)",
        )
    return layout or form.layout(), [form.assets(), *([] if assets is None else [assets])]


def _form_of(state: Mapping[str, Any]) -> ModelForm | None:
    found = {key: getattr(entry, "form", None) for key, entry in state.items()} if isinstance(state, Mapping) else {}
    forms = {key: form for key, form in found.items() if isinstance(form, ModelForm)}
    strangers = forms.keys() - {MODEL}
    if strangers:
        raise InvalidRequest(
            f"the entry {min(strangers)!r} is a model with a mapping program, which only the entry {MODEL!r} goes through",
            hint=f"put it into the state as {MODEL!r}",
        )
    return forms.get(MODEL)

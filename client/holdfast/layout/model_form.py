"""Layout and files that the model of a state brings along, if its tensors are not stored as they are in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.layout.rank_view import MODEL
from holdfast.layout.rules_choice import ParallelLayout
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.programs import AUTO


class ModelForm(NamedTuple):
    """How a framework's model is stored: `layout` returns the layout with the model's mapping program, None without one, and
    `assets` the files beside the weights. Both are called when a Checkpointer is constructed, the first unless it is given
    a program.

    `parts` returns names and attributes of the model, which is the first, and of all layers in it. They are asked for the
    mode, `training`.
    """

    layout: Callable[[], ParallelLayout | None]
    assets: Callable[[], Mapping[str, Any]]
    parts: Callable[[], Sequence[tuple[str, Mapping[str, Any]]]]


def completed(state: Mapping[str, Any], layout: ParallelLayout | None, assets: Any) -> tuple[ParallelLayout | None, Any]:
    """The layout and the assets of a state, given those of its Checkpointer, which replace those of its model.

    Raises `InvalidRequest` for a layout without a program, and for a model under another key: its weights would have another
    orientation.
    """
    entries = state.items() if isinstance(state, Mapping) else ()
    forms = {key: entry.form for key, entry in entries if isinstance(getattr(entry, "form", None), ModelForm)}
    key, form = next(iter(forms.items()), (MODEL, None))
    if form is None:
        return layout, assets
    files = [form.assets(), *([] if assets is None else [assets])]
    if key == MODEL and layout is not None and layout.program not in (None, AUTO):
        return layout, files
    own = form.layout()
    if own is None:
        return layout, files
    if key != MODEL:
        raise InvalidRequest(
            f"the entry {key!r} is a model with a mapping program, which only the entry {MODEL!r} goes through",
            hint=f"put it into the state as {MODEL!r}",
        )
    if layout is not None:
        raise InvalidRequest(
            "layout= names no mapping program, and the tensors of this model are stored through one",
            hint="leave layout= out, which takes the program of the model; or name one: "
            f"layout=ParallelLayout({str(layout.layout)!r}, program=…)",
        )
    return own, files

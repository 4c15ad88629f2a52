"""Train in PaddlePaddle, save through Holdfast.

    from holdfast.integrations import paddle as holdfast_paddle

    attached = holdfast_paddle.attach(model, optimizer, "run", at="/fast/checkpoints")
    for step in range(attached.restore() + 1, steps + 1):
        ...
        optimizer.step()
        attached.save(step)

`state()` has the same for a `Checkpointer` of one's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.integrations.paddle import entries
from holdfast.integrations.paddle.attached import Attached
from holdfast.integrations.paddle.entries import state
from holdfast.integrations.paddle.layouts import assets, layout, with_model

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from holdfast.checkpointer_options import Options

__all__ = ["Attached", "assets", "attach", "layout", "state"]


def attach(
    model: Any,
    optimizer: Any,
    run: str,
    /,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    more: Mapping[str, Any] | None = None,
    **options: Unpack[Options],
) -> Attached:
    """Save this training to a Holdfast run, and restore it from there.

    The checkpoints have Hugging Face's names and shapes, and the model's config.json, unless `layout` is given: a `layout()`
    with another program, or None for Paddle's names and shapes.
    `more` has further entries of the state, such as `{"progress": {"samples": 0}}`. `options` are those of `Checkpointer`.
    Every rank calls it. Raises `InvalidRequest` for what cannot be saved.
    """
    return Attached(run, entries.state(model, optimizer, scheduler, scaler, **(more or {})), with_model(options, model))

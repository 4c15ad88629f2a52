"""Train in PaddlePaddle, save through Holdfast.

    from holdfast.integrations import paddle as holdfast_paddle

    attached = holdfast_paddle.attach(model, optimizer, "run", at="/fast/checkpoints")
    for step in range(attached.restore() + 1, steps + 1):
        ...
        optimizer.step()
        attached.save(step)

`state()` has the same for a `Checkpointer` of one's own, which takes the model's mapping program and config.json from it.
A Trainer of PaddleFormers saves and resumes by itself:

    trainer = holdfast_paddle.attach(Trainer(...), "run", at="/fast/checkpoints")
    trainer.train()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

from holdfast.integrations.paddle import entries
from holdfast.integrations.paddle.attached import Attached
from holdfast.integrations.paddle.entries import state
from holdfast.integrations.paddle.layouts import layout
from holdfast_formats.errors import InvalidRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from holdfast.checkpointer_options import Options
    from holdfast.integrations.trainers.options import TrainerOptions

__all__ = ["Attached", "attach", "layout", "state"]

AnyTrainer = TypeVar("AnyTrainer")


@overload
def attach(trained: AnyTrainer, run: str, /, **options: Unpack[TrainerOptions]) -> AnyTrainer: ...


@overload
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
) -> Attached: ...


def attach(trained: Any, second: Any, run: str | None = None, /, **named: Any) -> Any:
    """Save this training to a Holdfast run, and restore it from there.

    Of a loop of your own: `attach(model, optimizer, "run", …)`. The checkpoints have Hugging Face's names and shapes, and
    the model's config.json; `layout=layout(model, program)` stores them through another program. `more` has further
    entries of the state, such as `{"progress": {"samples": 0}}`. `options` are those of `Checkpointer`. A Trainer of
    PaddleFormers, which is returned: `attach(trainer, "run", …)`, with the options of
    `holdfast.integrations.paddleformers.attach`.

    Every rank calls it. Raises `InvalidRequest` for what cannot be saved.
    """
    if run is not None:
        own = {name: named.pop(name, None) for name in ("scheduler", "scaler", "more")}
        more = own["more"] or {}
        entries.refuse_taken(more)
        state = entries.state(trained, second, own["scheduler"], own["scaler"], **more)
        return Attached(run, state, named)
    if not isinstance(second, str):
        raise InvalidRequest("attach() was given no run", hint='attach(model, optimizer, "run")')
    from holdfast.integrations import paddleformers

    return paddleformers.attach(trained, second, **named)

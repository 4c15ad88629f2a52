"""The objects of a Paddle training as entries of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.integrations.paddle.documents import Scaler, Scheduler
from holdfast.integrations.paddle.optimizer import PaddleOptimizer
from holdfast.integrations.paddle.random_streams import PaddleStreams
from holdfast.integrations.paddle.versions import check_version
from holdfast.integrations.paddle.views import LayerViews, is_parameter
from holdfast_formats.errors import InvalidRequest

MODEL, OPTIMIZER, SCHEDULER, SCALER, RANDOM = "model", "optimizer", "scheduler", "scaler", "paddle_random"


def state(model: Any, optimizer: Any = None, scheduler: Any = None, scaler: Any = None, **more: Any) -> dict[str, Any]:
    """The state of a Paddle training, for `Checkpointer`: `{"model": …, "optimizer": …, …}`.

    The optimizer's own scheduler is in it where none is given. `more` are further layers, optimizers, schedulers and
    scalers, and any other entries of a state, such as `progress={"samples": 0}`. Call it again for an optimizer that is
    constructed later.

    Raises `InvalidRequest` for what cannot be saved, with its name.
    """
    check_version()
    from paddle.optimizer.lr import LRScheduler

    own = getattr(optimizer, "_learning_rate", None)
    if scheduler is None and isinstance(own, LRScheduler):
        scheduler = own
    given = {MODEL: model, OPTIMIZER: optimizer, SCHEDULER: scheduler, SCALER: scaler}
    taken = sorted({MODEL, OPTIMIZER, SCHEDULER, SCALER, RANDOM} & more.keys())
    if taken:
        raise InvalidRequest(f"the entry {taken[0]!r} is one of the training's own", hint="give it another name")
    objects = {key: value for key, value in {**given, **more}.items() if value is not None or key in more}
    layers = {key: LayerViews(value) for key, value in objects.items() if _is_layer(value)}
    if MODEL not in layers:
        raise InvalidRequest(
            f"the model is a {type(model).__name__}, not a layer of Paddle", hint="pass the paddle.nn.Layer that is trained"
        )

    def names() -> Mapping[str, str]:
        found: dict[str, str] = {}
        for key, layer in layers.items():
            prefix = "" if key == MODEL else f"{key}."
            for name, tensor in layer.tensors.items():
                if is_parameter(tensor):
                    found.setdefault(tensor.name, prefix + name)
        return found

    entries = {key: layers[key].module if key in layers else _entry(value, names) for key, value in objects.items()}
    return {**entries, RANDOM: PaddleStreams()}


def _entry(value: Any, names: Any) -> Any:
    """What a state has in the place of an object of Paddle; any other object as it is."""
    import paddle
    from paddle.optimizer.lr import LRScheduler

    if isinstance(value, paddle.optimizer.Optimizer):
        return PaddleOptimizer(value, names).shards
    if isinstance(value, LRScheduler):
        return Scheduler(value)
    if isinstance(value, paddle.amp.AmpScaler):
        return Scaler(value)
    return value


def _is_layer(value: Any) -> bool:
    from paddle.nn import Layer

    return isinstance(value, Layer)

"""The objects of a Paddle training as entries of a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from holdfast.integrations.paddle import adapters
from holdfast.integrations.paddle import program as programs
from holdfast.integrations.paddle.documents import Scaler, Scheduler
from holdfast.integrations.paddle.fleet.places import ParameterPlace
from holdfast.integrations.paddle.fleet.ranks import RankTensor, announce, of_all_ranks
from holdfast.integrations.paddle.fleet.wrappers import innermost, unwrapped
from holdfast.integrations.paddle.layouts import form_of
from holdfast.integrations.paddle.optimizer import PaddleOptimizer
from holdfast.integrations.paddle.others import Others
from holdfast.integrations.paddle.random_streams import PaddleStreams
from holdfast.integrations.paddle.versions import check_version
from holdfast.integrations.paddle.views import LayerViews, is_parameter
from holdfast.integrations.paddle.watch import identical
from holdfast.launch import StartedRanks
from holdfast.state.modules import EMA
from holdfast.state.named import Named
from holdfast_formats.errors import InvalidRequest

Entry = TypeVar("Entry")
MODEL, OPTIMIZER, SCHEDULER, SCALER, RANDOM = "model", "optimizer", "scheduler", "scaler", "paddle_random"
# No program transposes the weights of layers beside the model. This entry keeps a state of torch from taking them.
ORIENTATION, _IN_OUT = "linear_weights", "[in, out]"


def state(model: Any, optimizer: Any = None, scheduler: Any = None, scaler: Any = None, **more: Any) -> dict[str, Any]:
    """The state of a Paddle training, for `Checkpointer`: `{"model": …, "optimizer": …, …}`.

    Of a LoRAModel the adapter alone is in it, as PEFT has it: `adapter_model`. The schedulers that optimizers step with are
    in it, given or not. `more` are further layers, optimizers, schedulers and scalers, and any other entries of a state,
    such as `progress={"samples": 0}`. Call it again for an optimizer that is constructed later.

    Raises `InvalidRequest` for what cannot be saved, with its name.
    """
    check_version()
    given = {MODEL: model, OPTIMIZER: optimizer, SCHEDULER: scheduler, SCALER: scaler}
    refuse_taken(more)
    if optimizer is not None and not _is_optimizer(optimizer):
        raise InvalidRequest(
            f"the optimizer is a {type(optimizer).__name__}, not an optimizer of Paddle",
            hint="pass one paddle.optimizer.Optimizer; further ones are entries of their own: state(model, first, "
            "second=other), or more={'second': other} of attach()",
        )
    objects = {key: value for key, value in {**given, **more}.items() if value is not None or key in more}
    objects = {**objects, **_own_schedulers(objects)}
    layers = {key: LayerViews(value) for key, value in objects.items() if _is_layer(value)}
    if MODEL not in layers:
        raise InvalidRequest(
            f"the model is a {type(model).__name__}, not a layer of Paddle", hint="pass the paddle.nn.Layer that is trained"
        )
    if layers[MODEL].places.adapter is not None:
        objects, layers = _as_adapter(objects), _as_adapter(layers)
    places = _Places(layers)
    rest = {key: value for key, value in objects.items() if key not in layers}
    others = Others(rest, places)
    optimizers = {key: PaddleOptimizer(value, places, others) for key, value in rest.items() if _is_optimizer(value)}
    ranks = announce()
    if ranks is not None:
        _exchange(ranks, layers, optimizers)
    entries: dict[str, Any] = {RANDOM: PaddleStreams()}
    for key, value in objects.items():
        if key in layers:
            layer = layers[key]
            form = form_of(value, layer) if value is model else None
            entries[key] = Named(layer.module, shards=None if ranks is None else layer.shard, form=form, views=True)
            if form is None and key != EMA and programs.turned(unwrapped(value).layer):
                entries[f"{key}_{ORIENTATION}"] = _IN_OUT
        else:
            entries[key] = optimizers[key].shards if key in optimizers else _entry(value)
    return entries


def _as_adapter(entries: dict[str, Entry]) -> dict[str, Entry]:
    return {adapters.GROUP if key == MODEL else key: value for key, value in entries.items()}


def refuse_taken(names: Iterable[str]) -> None:
    """Raise `InvalidRequest` for names of further entries that the training's own have."""
    taken = sorted({MODEL, OPTIMIZER, SCHEDULER, SCALER, RANDOM, adapters.GROUP} & set(names))
    if taken:
        raise InvalidRequest(f"the entry {taken[0]!r} is one of the training's own", hint="give it another name")


class _Places:
    """The place and the stored name of every parameter, by Paddle's name of it: the identical mapping while layers stay."""

    def __init__(self, layers: Mapping[str, LayerViews]) -> None:
        self._layers = layers
        self._of: list[dict[str, Any]] = []
        self._found: dict[str, ParameterPlace] = {}

    def __call__(self) -> Mapping[str, ParameterPlace]:
        of = [layer.tensors for layer in self._layers.values()]
        if not identical(self._of, of):
            self._found, self._of = self._find(), of
        return self._found

    def _find(self) -> dict[str, ParameterPlace]:
        found: dict[str, ParameterPlace] = {}
        for key, layer in self._layers.items():
            for name, tensor in layer.tensors.items():
                if is_parameter(tensor):
                    place = layer.places.place(name, tensor)
                    found.setdefault(tensor.name, place if key == MODEL else place._replace(name=f"{key}.{name}"))
        return found


def _exchange(ranks: StartedRanks, layers: Mapping[str, LayerViews], optimizers: Mapping[str, PaddleOptimizer]) -> None:
    """Tell each rank which tensors only other ranks have, as those of another pipeline stage: they are part of the state."""
    groups = {name: f"{key}/{group}" for key, one in optimizers.items() for name, group in one.keys_of_groups().items()}
    stored = {
        (key, name): name if key == MODEL else f"{key}.{name}" for key, layer in layers.items() for name in layer.tensors
    }
    own: dict[str, RankTensor] = {}
    for (key, name), full in stored.items():
        shape, dtype = layers[key].whole(name)
        own[full] = RankTensor(shape, dtype, groups.get(full, ""))
    for full, listed in of_all_ranks(ranks, "tensors", own, RankTensor).items():
        if full in own:
            continue
        key = next((key for key in layers if key != MODEL and full.startswith(f"{key}.")), MODEL)
        layers[key].add_other(full if key == MODEL else full.removeprefix(f"{key}."), listed)
        optimizer, _, group = listed.group.partition("/")
        if optimizer in optimizers:
            optimizers[optimizer].others[full] = listed._replace(group=group)


def _own_schedulers(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The schedulers of optimizers that are no entry yet: `scheduler` for the first optimizer's, else `KEY_scheduler`."""
    from paddle.optimizer.lr import LRScheduler

    found: dict[str, Any] = {}
    for key, value in objects.items():
        own = innermost(value)._learning_rate if _is_optimizer(value) else None
        if isinstance(own, LRScheduler) and not any(own is other for other in (*objects.values(), *found.values())):
            plain = key == OPTIMIZER and SCHEDULER not in objects
            found[SCHEDULER if plain else f"{key}_{SCHEDULER}"] = own
    return found


def _entry(value: Any) -> Any:
    """What a state has in the place of an object of Paddle; any other object as it is."""
    import paddle
    from paddle.optimizer.lr import LRScheduler

    if isinstance(value, LRScheduler):
        return Scheduler(value)
    if isinstance(value, paddle.amp.AmpScaler):
        return Scaler(value)
    return value


def _is_optimizer(value: Any) -> bool:
    from paddle.optimizer import Optimizer

    return not _is_layer(value) and isinstance(innermost(value), Optimizer)  # stage 3's layer holds one


def _is_layer(value: Any) -> bool:
    from paddle.nn import Layer

    return isinstance(value, Layer)

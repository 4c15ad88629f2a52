"""A Lightning Trainer's state for a Checkpointer, and Lightning's dictionary of everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.integrations.lightning import configs, framework
from holdfast.integrations.lightning.contents import AVERAGED, INSIDE, KEY, OPTIMIZERS, STATE, NotGathered
from holdfast.state.named import Named
from holdfast_formats.errors import InvalidRequest

WEIGHTS = ("model", "module", "ema")  # groups of modules


class LightningDocument:
    """An entry of the state: Lightning's dictionary, without what is saved in place."""

    def __init__(self) -> None:
        self.value: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state


class LiveState:
    """The state of one Trainer: `entries` for the Checkpointer, and the document among them."""

    def __init__(self, trainer: Any, weights: str | None, position: Any) -> None:
        """`weights` is the LightningModule's attribute whose own names the group `model` has."""
        self._trainer, self._weights, self._position = trainer, weights, position
        self.document = LightningDocument()
        self.entries: dict[str, Any] = {}

    def refresh(self, optimizers: bool) -> None:
        """Put everything that exists so far into the state."""
        trainer = self._trainer
        parts = self.modules()
        if optimizers and trainer.strategy.optimizers:
            parts["optim"] = list(trainer.strategy.optimizers)
        averaged = averaged_model(trainer)
        if averaged is not None:
            parts["ema"] = averaged
        parts |= {KEY: self.document, "data": self._position}
        self.entries.clear()
        self.entries.update(parts)

    def modules(self) -> dict[str, Any]:
        """The LightningModule under its own names; or one attribute under its own names, and the rest apart."""
        trainer = self._trainer
        module = trainer.strategy.model if is_flat(trainer) else trainer.lightning_module
        if self._weights is None:
            return {"model": module}
        self.inner()
        prefix = f"{self._weights}."
        parts: dict[str, Any] = {
            "model": Named(module, rename=_without(prefix), only=lambda name: name.startswith(prefix)),
        }
        if any(not name.startswith(prefix) for name in trainer.lightning_module.state_dict()):
            parts["module"] = Named(module, only=lambda name: not name.startswith(prefix))
        return parts

    def inner(self) -> Any:
        module = self._trainer.lightning_module
        if self._weights is None:
            return module
        try:
            return module.get_submodule(self._weights)
        except AttributeError as error:
            raise InvalidRequest(
                f"weights={self._weights!r}: {type(module).__name__} has no such module",
                hint='pass the name of an attribute that is a module: for self.net = …, pass weights="net"',
            ) from error

    def reduced(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Lightning's dictionary without what is saved in place. `InvalidRequest` if a hook replaced one of these values."""
        values = dict(checkpoint)
        tensors = values.pop(STATE, None)
        if averaged_model(self._trainer) is not None and isinstance(values.get("current_model_state"), NotGathered):
            values.pop("current_model_state")
            values.pop("averaging_state")
            values[AVERAGED] = True
        elif not isinstance(tensors, NotGathered):
            raise InvalidRequest(
                "a hook has replaced checkpoint['state_dict'], but Holdfast saves the live tensors",
                hint="put the hook's additions under their own key",
            )
        if OPTIMIZERS in values:
            values[OPTIMIZERS] = len(values[OPTIMIZERS])
        return configs.stored(values) | {INSIDE: self._weights}

    def shown(self) -> dict[str, Any]:
        """The document as Lightning's callbacks and hooks expect it, with live tensors."""
        found = configs.shown(self.document.value)
        averaged, optimizers = found.pop(AVERAGED, False), found.pop(OPTIMIZERS, None)
        found.pop(INSIDE, None)
        trainer = self._trainer
        if trainer.strategy.restore_checkpoint_after_setup:
            found[STATE] = NotGathered(STATE)
        else:
            found[STATE] = dict(trainer.lightning_module.state_dict())
        model = averaged_model(trainer)
        if averaged and model is not None:
            shown = model.state_dict()
            found["current_model_state"] = found[STATE]
            found[STATE] = {name[7:]: value for name, value in shown.items() if name.startswith("module.")}
            found["averaging_state"] = {n: value for n, value in shown.items() if not n.startswith("module.")}
        if optimizers is not None:
            found[OPTIMIZERS] = [NotGathered(OPTIMIZERS) for _ in range(optimizers)]
        return found


def _without(prefix: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(prefix)


def is_flat(trainer: Any) -> bool:
    """Whether FSDP1 has wrapped the LightningModule, whose parameters then are views of flat ones."""
    return (
        any(kind.__name__ == "FSDPStrategy" for kind in type(trainer.strategy).__mro__)
        and trainer.strategy.model is not None
    )


def averaged_model(trainer: Any) -> Any | None:
    """The averaged model of a WeightAveraging callback."""
    kind = getattr(framework.part("callbacks"), "WeightAveraging", None)
    averaged = [one._average_model for one in trainer.callbacks if kind is not None and isinstance(one, kind)]
    return next((one for one in averaged if one is not None), None)

"""Holdfast instead of DeepSpeed's own checkpoints, for engines with ZeRO 0 to 3.

    from holdfast.integrations import deepspeed as holdfast_deepspeed

    holdfast_deepspeed.attach(engine, "run", at="/fast/checkpoints")
    engine.save_checkpoint(directory, tag, client_state)  # returns when the state is staged
    path, client_state = engine.load_checkpoint(directory)

If a framework creates the engine, call `install("run", at=…)` before it does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast_formats.errors import InvalidRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from holdfast.checkpointer import Checkpointer
    from holdfast.checkpointer_options import Options

__all__ = ["attach", "checkpointer_of", "install", "uninstall"]

_ATTACHED = "_holdfast_attached"
_replaced: dict[str, Any] = {}  # methods of DeepSpeedEngine that `install` has replaced


def attach(
    engine: Any,
    run: str,
    *,
    state: Mapping[str, Any] | None = None,
    frozen: bool = True,
    **options: Unpack[Options],
) -> Any:
    """Make `save_checkpoint` and `load_checkpoint` of this engine save to and restore from a Holdfast run; returns the
    engine.

    `state` has more entries for the checkpoint, such as a data loader. `frozen=False` leaves out parameters that are
    not trained. `options` are those of `Checkpointer`; the default policy is `wait`. Every rank calls it. Raises
    `InvalidRequest` for unsupported engines and features.
    """
    from holdfast.integrations.deepspeed.engine import AttachedEngine

    if getattr(engine, _ATTACHED, None) is not None:
        raise InvalidRequest("this engine is already attached to a run")
    attached = AttachedEngine(engine, run, state or {}, frozen, options)
    setattr(engine, _ATTACHED, attached)
    own = _replaced.get("load_checkpoint") or type(engine).load_checkpoint
    load = partial(own, engine)
    engine.save_checkpoint = lambda *given, **named: _save(engine, *given, **named)
    engine.load_checkpoint = lambda *given, **named: _load(engine, load, *given, **named)
    return engine


def install(
    run: str | Callable[[Any, str], str],
    *,
    state: Callable[[Any], Mapping[str, Any]] | None = None,
    frozen: bool = True,
    **options: Unpack[Options],
) -> None:
    """Attach every engine of this process at its first save or load, for frameworks that make the engine themselves.

    `run` may be a function of the engine and the directory, because each engine of a process needs its own run. `state`
    is a function of the engine that returns more entries. Call it before the first save; `uninstall` undoes it for
    engines not attached yet.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    if _replaced:
        raise InvalidRequest("install() was already called", hint="call uninstall() first")
    _replaced.update({name: getattr(DeepSpeedEngine, name) for name in ("save_checkpoint", "load_checkpoint")})

    def attached(engine: Any, directory: Any) -> Any:
        return attach(
            engine,
            run if isinstance(run, str) else run(engine, os.fspath(directory)),
            state=None if state is None else state(engine),
            frozen=frozen,
            **options,
        )

    def save_checkpoint(self: Any, save_dir: Any, *given: Any, **named: Any) -> Any:
        return attached(self, save_dir).save_checkpoint(save_dir, *given, **named)

    def load_checkpoint(self: Any, load_dir: Any, *given: Any, **named: Any) -> Any:
        return attached(self, load_dir).load_checkpoint(load_dir, *given, **named)

    DeepSpeedEngine.save_checkpoint, DeepSpeedEngine.load_checkpoint = save_checkpoint, load_checkpoint


def uninstall() -> None:
    """Give DeepSpeedEngine its own methods back."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    for name in list(_replaced):
        setattr(DeepSpeedEngine, name, _replaced.pop(name))


def checkpointer_of(engine: Any) -> Checkpointer:
    """The `Checkpointer` of an attached engine: for tickets, notices and `fence()`."""
    attached = getattr(engine, _ATTACHED, None)
    if attached is None:
        raise InvalidRequest("this engine is not attached", hint="call holdfast.integrations.deepspeed.attach(engine, run)")
    checkpointer: Checkpointer = attached.checkpointer
    return checkpointer


def _save(
    engine: Any,
    save_dir: Any,
    tag: Any = None,
    client_state: Mapping[str, Any] = {},
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
    if not isinstance(client_state, Mapping):
        raise InvalidRequest(f"client_state must be a dict, not a {type(client_state).__name__}")
    attached = getattr(engine, _ATTACHED)
    attached.check_frozen(exclude_frozen_parameters)
    attached.save(os.fspath(save_dir), tag, client_state, save_latest)
    return True


def _load(  # noqa: PLR0913 - the signature is DeepSpeed's
    engine: Any,
    own: Callable[..., tuple[str | None, dict[str, Any] | None]],
    load_dir: Any,
    tag: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> tuple[str | None, dict[str, Any] | None]:
    from holdfast.integrations.deepspeed.engine import LoadRequest, is_deepspeeds, wanted_step

    attached = getattr(engine, _ATTACHED)
    how = LoadRequest(load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
    run, directory = attached.checkpointer.run, os.fspath(load_dir)
    if is_deepspeeds(run, directory, tag):
        attached.checkpointer.fence()
        return own(load_dir, tag, *how, custom_load_fn)
    if custom_load_fn is not None:
        raise InvalidRequest("custom_load_fn is not supported, because Holdfast restores directly into the live tensors")
    restored = attached.load(wanted_step(attached, directory, tag), how)
    if not restored:
        return None, None
    return attached.path(directory, tag, restored), attached.client_state

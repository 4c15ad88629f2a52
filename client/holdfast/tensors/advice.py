"""Suggests what to write instead of a value that cannot be stored."""

from __future__ import annotations

import datetime
import decimal
import enum
import pathlib
import random
from dataclasses import is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

GENERAL = "the state may contain tensors, numpy arrays and nested plain Python values; nothing is pickled"

_LINES: tuple[tuple[tuple[type, ...], str], ...] = (
    (
        (DataLoader,),
        "write StatefulDataLoader instead of DataLoader, with the same arguments (from "
        "torchdata.stateful_dataloader import StatefulDataLoader); or leave the loader out and store its "
        'position yourself: state["data"] = {{"epoch": epoch, "batch": batch}}',
    ),
    (
        (torch.Generator,),
        "write {at} = generator.get_state() before each save, and generator.set_state({at}) after the restore",
    ),
    (
        (np.random.Generator,),
        "write {at} = generator.bit_generator.state before each save, "
        "and generator.bit_generator.state = {at} after the restore",
    ),
    (
        (np.random.RandomState,),
        "write {at} = generator.get_state(legacy=False) before each save, and generator.set_state({at}) after the restore",
    ),
    (
        (random.Random,),
        "write {at} = generator.getstate() before each save, and generator.setstate({at}) after the restore",
    ),
    ((enum.Enum,), "write its name, value.name, and look it up after the restore"),
    ((pathlib.PurePath, decimal.Decimal), "write str(value), and make it again after the restore"),
    ((datetime.date, datetime.time), "write value.isoformat(), and make it again after the restore"),
    ((datetime.timedelta,), "write value.total_seconds(), and make it again after the restore"),
    ((FunctionType, BuiltinFunctionType, MethodType, type), "functions and classes cannot be saved: leave it out"),
    ((np.ndarray,), "write numpy.asarray(value), and its mask separately if there is one"),
    ((dict,), "write dict(value): what a subclass adds would be lost"),
    ((list,), "write list(value): what a subclass adds would be lost"),
    ((set,), "write set(value): what a subclass adds would be lost"),
)


def advice(value: object, path: str, trail: tuple[str, ...], inside: bool = False) -> str:
    """The line to write instead of `value`, at `trail` below the state's entry `path`. `inside`: it is in the result of
    an object's `state_dict`.
    """
    at = _expression("state_dict()" if inside else f'state["{path}"]', trail)
    if inside and (isinstance(value, nn.Module) or _is_stateful(value)):
        return f"write {at}.state_dict() in its place, and give that to its load_state_dict() after the restore"
    owned = isinstance(value, nn.Module | torch.optim.Optimizer) or _is_stateful(value)
    if trail and (owned or (isinstance(value, torch.Generator) and not inside)):
        own = "_".join((path, *(step.strip("[]") for step in trail)))
        return f'give it its own entry: state["{own}"] = {at}, and remove it from state["{path}"]'
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "write tuple(value) or value._asdict(), and make it again after the restore"
    if is_dataclass(value) and not isinstance(value, type):
        return (
            "write dataclasses.asdict(value), or give its class state_dict() and load_state_dict() and its own "
            "entry in the state"
        )
    for kinds, line in _LINES:
        if isinstance(value, kinds):
            return line.format(at=at)
    if isinstance(value, torch.Tensor):
        return "a tensor cannot be a dict key or a set member: put it into a dict value, list or tuple"
    return (
        f"{GENERAL}; other objects need state_dict() and load_state_dict(), and their own entry in the state; or two "
        f"functions that take one apart and make it again: holdfast.register_class({type(value).__name__}, take, make)"
    )


def _expression(start: str, trail: tuple[str, ...]) -> str:
    return start + "".join(step if step.startswith("[") else f'["{step}"]' for step in trail)


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))

"""Puts the entries of a DCP state dict where a Checkpointer would: groups, names, and documents of what is no tensor.

    path in the state dict                                      group    name
    model, … (also state_dict, model_state_dict; ema, master)   the key  the rest, joined with dots
    a tensor at the top, where no key is a model                model    its key
    k, … of only tensors, if there is no model                  k        the rest; model for the only such key
    state.NAME.KIND and param_groups.NAME.… beside these        optim    NAME/KIND, and the document
    optim…, state, NAME, KIND                                   optim    NAME/KIND
    optim…, param_groups                                        optim    the document of the optimizer
    any other tensor or value under k                           extra    k, k/…, or the document k

A key around all of these, as in `{"app": AppState()}`, is left away. Nothing is dropped: what has no better place is in
`extra`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast_formats.errors import Refused, StateMismatch
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.listing import RefusedPart, TensorKey
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import json_values
from holdfast_service.wings.convert.foreign.dcp import data_positions, optimizers
from holdfast_service.wings.convert.foreign.dcp.gathering import GatheredListing, Unread
from holdfast_service.wings.convert.foreign.dcp.metadata import Path, SavedState
from holdfast_service.wings.convert.foreign.dcp.optimizers import SavedOptimizer
from holdfast_service.wings.convert.foreign.dcp.payloads import Payloads
from holdfast_service.wings.convert.foreign.json_values import Trail

MODEL, EXTRA = "model", "extra"
_MODELS = ("model", "state_dict", "model_state_dict")
_WHOLE = {"ema": "ema", "master": "master", **dict.fromkeys(_MODELS, MODEL)}
_BESIDE = {"ema", "master"}
_OPTIMIZER = "optim"
MODEL_KEY = re.compile(r"(?!(?:extra|rng|ranks|random|train_state)\b)[a-z][a-z0-9_]{0,63}")  # of a model under its own key
_OWN_KEYS = ("optimizer", "optim", "optimizer_of_weights")  # for an optimizer without a key, the first that is free
_RESERVED = ("rng", "ranks")
_JOINED = re.compile(r"(optim\w*)\.((?:state|param_groups)\..+)")
STEPS = (("train_state", "step"), ("step",), ("global_step",), ("iteration",))


class _Leaf(NamedTuple):
    path: Path
    fqn: str


class _Json(NamedTuple):
    value: Any


class _Tensor(NamedTuple):
    fqn: str


class StateDictArrangement:
    """Arranges one saved state dict."""

    def __init__(self, saved: SavedState, payloads: Payloads, gathered: GatheredListing) -> None:
        self._saved, self._payloads, self._gathered = saved, payloads, gathered
        self._weights: set[str] = set()

    def arrange(self) -> int | None:
        """Put everything into the gathered listing. Returns the step of the training, if an entry has it.

        Raises `StateMismatch`, with a hint, if no key is a known name of a model.
        """
        leaves = self._leaves()
        flat = self._flat_model(leaves)
        parts: dict[str, list[_Leaf]] = {}
        for leaf in leaves:
            if leaf.fqn not in flat:
                parts.setdefault(str(leaf.path[0]), []).append(leaf)
        self._models(flat, parts)
        optims = [top for top, held in parts.items() if top.startswith(_OPTIMIZER) and len(held[0].path) > 1]
        for top in optims:
            self._optimizer(top, parts.pop(top))
        for top in list(parts):
            self._extra(top, parts.pop(top))
        data_positions.add(self._gathered, EXTRA)
        return self._step()

    def as_is(self) -> None:
        """List every tensor under its own key as a model's, and every value under its own key."""
        for fqn in self._saved.tensors:
            self._tensor(MODEL, fqn, fqn)
        for fqn in self._saved.values:
            self._put_value(EXTRA, fqn, fqn)

    def _leaves(self) -> list[_Leaf]:
        leaves = [_Leaf(self._path(fqn), fqn) for fqn in (*self._saved.tensors, *self._saved.values)]
        leaves = self._optimizer_apart(leaves)
        tops = {leaf.path[0] for leaf in leaves if len(leaf.path) > 1}
        if tops & set(_MODELS):
            return leaves
        around = {leaf.path[0] for leaf in leaves if len(leaf.path) > 2 and leaf.path[1] in _MODELS}
        if len(around) != 1:
            return leaves
        (key,) = around
        self._gathered.notes.append(f"the outer key {key!r} was removed: it only wraps model and optimizer")
        return [leaf._replace(path=leaf.path[1:]) if leaf.path[0] == key and len(leaf.path) > 1 else leaf for leaf in leaves]

    def _optimizer_apart(self, leaves: list[_Leaf]) -> list[_Leaf]:
        """Move the joined keys of an optimizer that are among the weights, as in `{**model, **optimizer}`, under a separate
        key. They are an optimizer's if its groups have the names of weights.
        """
        top = {leaf.fqn for leaf in leaves if len(leaf.path) == 1}
        joined = {fqn for fqn in top if fqn.startswith(optimizers.JOINED)}
        weights = {fqn for fqn in top - joined if fqn in self._saved.tensors}
        state = [fqn for fqn in joined if optimizers.owner(fqn, weights) in weights]
        if not any(fqn.startswith(optimizers.JOINED_GROUPS) for fqn in state):
            return leaves
        key = next(key for key in _OWN_KEYS if all(leaf.path[0] != key for leaf in leaves))
        self._gathered.notes.append(
            f"the keys state.… and param_groups.… beside the weights are imported as an optimizer, {key}"
        )
        moved = set(state)
        return [leaf._replace(path=(key, leaf.fqn)) if leaf.fqn in moved else leaf for leaf in leaves]

    def _path(self, fqn: str) -> Path:
        """The path of a key. Planners that do not flatten record none; then only joined optimizer keys are recognised."""
        known = self._saved.paths.get(fqn)
        joined = None if known else _JOINED.fullmatch(fqn)
        return known or (fqn,) if joined is None else (joined[1], joined[2])

    def _flat_model(self, leaves: list[_Leaf]) -> list[str]:
        """The tensors at the top, if they are the model: no key is one, and they are not merely beside mappings."""
        tensors = [leaf for leaf in leaves if leaf.fqn in self._saved.tensors]
        below = {str(leaf.path[0]) for leaf in tensors if len(leaf.path) > 1}
        top = [leaf.fqn for leaf in tensors if len(leaf.path) == 1]
        others = [key for key in below if not key.startswith(_OPTIMIZER) and key not in _WHOLE]
        beside = bool(others) and not any("." in fqn for fqn in top) and not _stepped(leaves, set(top))
        return [] if below & set(_MODELS) or beside else top

    def _models(self, flat: list[str], parts: dict[str, list[_Leaf]]) -> None:
        tops = [top for top in _WHOLE if top in parts and any(len(leaf.path) > 1 for leaf in parts[top])]
        if len({top for top in tops if _WHOLE[top] == MODEL}) > 1:
            raise StateMismatch(f"each of the keys {' and '.join(map(repr, tops))} could be the model", hint=_AS_IS)
        for fqn in flat:
            self._tensor(MODEL, fqn, fqn)
        groups = {top: _WHOLE[top] for top in tops}
        if not flat and MODEL not in groups.values():
            own = [top for top, leaves in parts.items() if self._is_model(top, leaves)]
            groups |= {top: MODEL if len(own) == 1 else top for top in own}
        for top, group in groups.items():
            for leaf in parts.pop(top):
                name = ".".join(map(str, leaf.path[1:]))
                if leaf.fqn in self._saved.tensors:
                    self._tensor(group, name or top, leaf.fqn)
                else:
                    self._put_value(group, name or top, leaf.fqn)
        self._weights = {key.name for key in self._gathered.tensors if key.group in {MODEL, *groups.values()} - _BESIDE}
        if not self._weights:
            keys = sorted({str(self._path(fqn)[0]) for fqn in self._saved.tensors})
            raise StateMismatch(
                f"no key is known to hold a model; the keys are {', '.join(keys[:8]) or '(no tensor)'}", hint=_AS_IS
            )

    def _is_model(self, top: str, leaves: list[_Leaf]) -> bool:
        """Whether a key that is no known one has the form of a model: tensors by name, and not only numbers."""
        tensors = [self._saved.tensors.get(leaf.fqn) for leaf in leaves]
        named = all(len(leaf.path) > 1 and all(isinstance(key, str) for key in leaf.path) for leaf in leaves)
        known = top in _WHOLE or top.startswith(_OPTIMIZER) or not MODEL_KEY.fullmatch(top)
        return not known and named and None not in tensors and any(one.shape for one in tensors if one is not None)

    def _optimizer(self, top: str, leaves: list[_Leaf]) -> None:
        optimizer = optimizers.parsed([(leaf.path[1:], leaf.fqn) for leaf in leaves], self._weights)
        held = dict(self._gathered.tensors)
        if not isinstance(optimizer, str):
            optimizer = self._take_optimizer(top, optimizer)
        if isinstance(optimizer, str):
            self._gathered.take_back(held)
            self._gathered.notes.append(f"{top} is kept unchanged in group extra: {optimizer}")
            self._extra(top, leaves)

    def _take_optimizer(self, top: str, saved_optimizer: SavedOptimizer) -> SavedOptimizer | str:
        """Store the state of an optimizer; returns the reason if it is impossible."""
        groups = self._groups(top, saved_optimizer)
        if isinstance(groups, str):
            return groups
        names = [name for params, _ in groups for name in params]
        unknown = sorted(saved_optimizer.state.keys() - set(names))
        if len(names) != len(set(names)) or unknown:
            return (
                f"its parameter groups lack {unknown[0]!r}" if unknown else "a parameter is in two of its parameter groups"
            )
        document = optimizer_state.document(groups)
        kept: dict[str, Any] = {}
        masters: dict[str, list[str]] = {}
        for name, kinds in saved_optimizer.state.items():
            for kind, fqn in kinds.items():
                if fqn in self._saved.values:
                    value = self._value(fqn, optimizer_state.GROUP, f"{top}/state/{name.replace('/', '|')}/{kind}")
                    if not isinstance(value, Unread):
                        kept.setdefault(name, {})[kind] = value
                elif kind in optimizer_state.MASTER_KEYS and self._is_master(name, fqn):
                    masters.setdefault(kind, []).append(name)
                    self._tensor(optimizer_state.MASTER_GROUP, name, fqn)
                else:
                    self._tensor(optimizer_state.GROUP, f"{name}/{kind}", fqn)
        document["state"] = json_values.ordered({name: json_values.ordered(held) for name, held in kept.items()})
        document["masters"] = json_values.ordered(masters)
        self._gathered.document(optimizer_state.GROUP, top, document)
        return saved_optimizer

    def _groups(self, top: str, saved_optimizer: SavedOptimizer) -> list[tuple[list[str], Mapping[str, Any]]] | str:
        hyper: list[Mapping[str, Any]] = []
        params: list[list[str]] = []
        for group in saved_optimizer.groups:
            held = {kind: self._hyper(top, kind, fqn) for kind, fqn in group.items()}
            names = held.pop(optimizers.PARAMS, None)
            if not saved_optimizer.names and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
                return "its parameters have no names"
            params.append(names or [])
            hyper.append({kind: value for kind, value in held.items() if not isinstance(value, Unread)})
        if saved_optimizer.names:
            return optimizers.grouped(saved_optimizer.names, hyper)
        return list(zip(params, hyper, strict=True))

    def _hyper(self, top: str, kind: str, fqn: str) -> Any:
        prefix = f"{top}/groups/{fqn.replace('/', '|')}"
        if fqn in self._saved.values:
            return self._value(fqn, optimizer_state.GROUP, prefix)
        self._tensor(optimizer_state.GROUP, prefix, fqn)
        return {"$tensor": prefix}

    def _is_master(self, name: str, fqn: str) -> bool:
        weight = self._gathered.tensors.get(TensorKey(MODEL, name))
        return weight is not None and weight.spec.shape == self._payloads.shape(self._saved.tensors[fqn])

    def _extra(self, top: str, leaves: list[_Leaf]) -> None:
        key = f"{top}_" if top in _RESERVED else top
        tensors = all(leaf.fqn in self._saved.tensors for leaf in leaves)
        plain = all(len(leaf.path) < 3 and all(isinstance(step, str) for step in leaf.path) for leaf in leaves)
        if tensors and plain and "/" not in key:
            for leaf in leaves:
                self._tensor(EXTRA, "/".join((key, *map(str, leaf.path[1:]))), leaf.fqn)
            return
        root: dict[str, Any] = {}
        for leaf in leaves:
            held: Any = _Tensor(leaf.fqn)
            if leaf.fqn in self._saved.values:
                value = self._value(leaf.fqn, EXTRA, "/".join((key, *(str(s).replace("/", "|") for s in leaf.path[1:]))))
                if isinstance(value, Unread):
                    continue
                held = _Json(value)
            _put(root, (key, *leaf.path[1:]), held, leaf.fqn)
        if key in root:
            self._gathered.document(EXTRA, key, json_values.encode(root[key], lambda t, v: self._placed(key, t, v)))

    def _placed(self, key: str, trail: Trail, value: Any) -> Any:
        if isinstance(value, _Json):
            return value.value
        name = "/".join((key, *(step.strip("[]").replace("/", "|") for step in trail)))
        self._tensor(EXTRA, name, value.fqn)
        return {"$tensor": name}

    def _tensor(self, group: str, name: str, fqn: str) -> None:
        saved = self._saved.tensors[fqn]
        spec = TensorSpec(group, name, saved.dtype, self._payloads.shape(saved))
        try:
            self._gathered.add(spec, self._payloads.pieces(saved))
        except Refused as error:
            self._gathered.refused.append(RefusedPart(fqn, error, group))

    def _put_value(self, group: str, key: str, fqn: str) -> None:
        value = self._value(fqn, group, key)
        if not isinstance(value, Unread):
            self._gathered.document(group, key, value)

    def _value(self, fqn: str, group: str, prefix: str) -> Any:
        value = self._gathered.encoded(self._saved.values[fqn], group, prefix)
        if isinstance(value, Unread):
            self._gathered.notes.append(f"{fqn} was left out: {value.reason}")
        return value

    def _step(self) -> int | None:
        held = self._gathered.documents.get(EXTRA, {})
        for path in STEPS:
            value: Any = held
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if type(value) is int and value >= 0:
                return value
        return None


def _stepped(leaves: list[_Leaf], names: set[str]) -> bool:
    """Whether an optimizer's state belongs to one of these tensors, which then are weights."""
    for _, head, *rest in (leaf.path for leaf in leaves if len(leaf.path) > 1 and str(leaf.path[0]).startswith(_OPTIMIZER)):
        joined = not rest and str(head).startswith(optimizers.JOINED)
        owner = optimizers.owner(str(head), names) if joined else rest[0] if rest and head == optimizers.STATE else None
        if owner in names:
            return True
    return False


_AS_IS = "import all tensors under their own keys with --as-is, or save the model under the key 'model'"


def _put(root: dict[str, Any], path: Path, value: Any, fqn: str) -> None:
    """Set a value at its path; lists grow as needed. `StateMismatch`, by key, for contradictory paths."""
    at: Any = root
    for position, key in enumerate(path):
        if isinstance(key, int) and isinstance(at, list) and key < len(at) + 2**16:
            at.extend([None] * (key + 1 - len(at)))
            inner = at[key]
        elif isinstance(key, str) and isinstance(at, dict):
            inner = at.get(key)
        else:
            raise StateMismatch(f"the path of {fqn!r} contradicts that of another entry", tensor=fqn)
        last = position + 1 == len(path)
        if last or inner is None:
            inner = value if last else [] if isinstance(path[position + 1], int) else {}
            at[key] = inner
        at = inner

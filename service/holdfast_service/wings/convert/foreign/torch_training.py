"""What stands under which key in a training's torch file: models, averages, optimizers, and everything else.

    key                                                      group    names
    state_dict, model_state_dict, model, module              model    those of the state dict
    the only other state dict, if there is none of these     model    those of the state dict
    several others, each under k                             k        those of the state dict
    state_dict_ema, model_ema, ema … with the model's names  ema      the model's
    a torch optimizer                                        optim    NAME/KIND, or NUMBER/KIND without names
    any other tensor or value under k                        extra    k, k/…, and the document k

Prefixes of wrappers that all tensors of a model have (`module.`, `_orig_mod.`) are removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, InvalidRequest, Refused
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.listing import ForeignTensor, RefusedPart
from holdfast_service.wings.convert.foreign import pickles, torch_optimizer, torch_values
from holdfast_service.wings.convert.foreign.dcp.gathering import GatheredListing, Unread, ValuePlace
from holdfast_service.wings.convert.foreign.pickles import AnyArray, PickledOpaque
from holdfast_service.wings.convert.foreign.torch_values import StateDict
from holdfast_service.wings.convert.foreign.trainers import numbered_optimizers
from holdfast_service.wings.convert.foreign.trainers.numbered_optimizers import HeldOptimizer

MODEL, EMA, EXTRA = "model", "ema", "extra"
NESTED = ("state_dict", "model_state_dict", "model", "module")  # keys under which programs put the model's
_AVERAGES = ("state_dict_ema", "model_ema", "ema", "ema_state_dict", "ema_model", "ema_model_state_dict")
_OPTIMIZER = (
    "import the directory in which its model is, or save both in one file: torch.save({'model': model.state_dict(), "
    "'optimizer': optimizer.state_dict()}, FILE)"
)
_COUNT = "n_averaged"  # of torch's own AveragedModel, beside the names
_STATE_DICT = (
    "save its state dict: saved = torch.load(FILE, weights_only=False), with the program that wrote it; then "
    "saved['{0}'] = saved['{0}'].state_dict(), and torch.save(saved, FILE)"
)
_WRAPPERS = ("module.", "_orig_mod.")
_RESERVED = ("rng", "ranks")  # keys of group extra that mean something in a checkpoint
_STEPS = ("global_step", "iter_num", "step", "iteration")


class TorchParts(NamedTuple):
    """The models of a file, with the parts of them that are refused, and the other keys. `notes` for the report."""

    models: StateDict
    beside: Mapping[str, Any]
    notes: tuple[str, ...]


def parts(value: Any, file: str) -> TorchParts:
    """Find the models in a file's value. `StateMismatch` if it has none."""
    keyed = value if isinstance(value, dict) else {}
    if torch_optimizer.is_state_dict(value):
        raise torch_values.mismatch(file, "", "holds the state dict of an optimizer, without its model", _OPTIMIZER)
    nested = [key for key in NESTED if isinstance(keyed.get(key), dict)]
    own = [] if nested else _own_models(keyed)
    whole = next((key for key in NESTED if isinstance(keyed.get(key), PickledOpaque)), None)
    if whole is not None and not nested and not own:
        what = f"has a {pickles.kind_of(keyed[whole])} as {whole!r}, not its state dict"
        raise torch_values.mismatch(file, whole, what, _STATE_DICT.format(whole))
    if not nested and not own:
        return _bare(value, file)
    groups = {key: MODEL for key in (nested or own)[:1]} if nested or len(own) == 1 else {key: key for key in own}
    found, notes = StateDict(()), list[str]()
    for key, group in groups.items():
        made, prefix = _unwrapped(keyed[key], file, group)
        notes += [f"the prefix {prefix!r} of the names in {key} was removed"] if prefix else []
        found = StateDict(found.tensors + made.tensors, found.refused + made.refused)
    for key in nested[1:]:
        why = torch_values.mismatch(file, key, f"has two state dicts, {nested[0]!r} and {key!r}")
        found = found._replace(refused=(*found.refused, RefusedPart(key, why, MODEL)))
    names = {tensor.spec.name for tensor in found.tensors if tensor.spec.group == MODEL}
    averages = [key for key in _AVERAGES if key not in groups and _is_average(keyed.get(key), names)][:1]
    for key in averages:
        made, _ = _unwrapped(_averaged(keyed[key]), file, EMA)
        found = found._replace(tensors=found.tensors + made.tensors, refused=found.refused + made.refused)
    beside = {str(key): one for key, one in keyed.items() if key not in (*groups, *nested, *averages)}
    beside |= {key: {_COUNT: keyed[key][_COUNT]} for key in averages if _COUNT in keyed[key]}
    return TorchParts(found, beside, tuple(notes))


def gather(
    beside: Mapping[str, Any], file: str, weights: tuple[ForeignTensor, ...], gathered: GatheredListing
) -> int | None:
    """Add optimizers, tensors and values beside the models. Returns the step of the training, if a key has it."""
    optimizers = [pair for key, one in beside.items() for pair in _optimizers(key, one)]
    for key, held in optimizers:
        _add_optimizer(key, held, file, weights, gathered, alone=len(optimizers) == 1)
    kept = []
    for key, one in beside.items():
        if any(_optimizers(key, one)):
            continue
        if key.startswith("optim") and isinstance(one, dict):
            why: CheckpointError = torch_optimizer.refused(file, key, "is not a state dict that torch writes")
            gathered.refused.append(RefusedPart(key, why, optimizer_state.GROUP))
            continue
        stored = f"{key}_" if key in _RESERVED else key
        value = gathered.json(one, ValuePlace(file, EXTRA, stored.replace("/", "|")))
        if isinstance(value, Unread):
            why = torch_values.mismatch(file, key, f"has {key!r}, which cannot be kept: {value.reason}")
            gathered.refused.append(RefusedPart(key, why))
            continue
        gathered.document(EXTRA, stored, value)
        kept.append(key)
    if kept:
        gathered.notes.append(f"{', '.join(sorted(kept))} of {file} are stored as documents in group {EXTRA}")
    return next((beside[key] for key in _STEPS if type(beside.get(key)) is int and beside[key] >= 0), None)


def _bare(value: Any, file: str) -> TorchParts:
    """A file that is a state dict itself."""
    made, prefix = _unwrapped(value, file, MODEL)
    return TorchParts(made, {}, (f"the prefix {prefix!r} of the names was removed",) if prefix else ())


def _own_models(keyed: Mapping[Any, Any]) -> list[str]:
    """The keys of state dicts that have no usual name; none beside tensors, which then are the model."""
    if any(isinstance(one, AnyArray) and one.shape and "." in str(key) for key, one in keyed.items()):
        return []
    return [key for key, one in keyed.items() if _is_state_dict(one) and _is_group(key)]


def _is_group(key: Any) -> bool:
    try:
        return isinstance(key, str) and key not in (EXTRA, *_RESERVED) and bool(naming.check_group(key))
    except InvalidRequest:
        return False


def _is_state_dict(value: Any) -> bool:
    """Whether a value is tensors by name, and not only numbers."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return False
    arrays = [one for one in value.values() if isinstance(one, AnyArray)]
    return len(arrays) == len(value) and any(one.shape for one in arrays)


def _is_average(value: Any, names: set[str]) -> bool:
    if not _is_state_dict(value):
        return False
    averaged = _averaged(value)
    prefix = _prefix(averaged)
    return {name.removeprefix(prefix) for name in averaged} <= names


def _averaged(value: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of an average's state dict, without their count."""
    return {name: one for name, one in value.items() if name != _COUNT}


def _unwrapped(value: Any, file: str, group: str) -> tuple[StateDict, str]:
    """The state dict without the prefix of wrappers, and the prefix."""
    prefix = _prefix(value) if isinstance(value, dict) else ""
    bare = {name.removeprefix(prefix): one for name, one in value.items()} if prefix else value
    return torch_values.state_dict(bare, file, group), prefix


def _prefix(value: Mapping[Any, Any]) -> str:
    prefix = ""
    while longer := next((prefix + one for one in _WRAPPERS if _all_begin(value, prefix + one)), None):
        prefix = longer
    return prefix


def _all_begin(value: Mapping[Any, Any], prefix: str) -> bool:
    return bool(value) and all(isinstance(name, str) and name.startswith(prefix) and name != prefix for name in value)


def _optimizers(key: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A value that is a torch optimizer's, or a list or dict of such, as Lightning has it."""
    inner = [(key, value)]
    if isinstance(value, list):
        inner = [(f"{key}[{number}]" if len(value) > 1 else key, one) for number, one in enumerate(value)]
    elif isinstance(value, dict) and not torch_optimizer.is_state_dict(value):
        inner = [(f"{key}.{name}", one) for name, one in value.items()]
    if inner and all(torch_optimizer.is_state_dict(one) for _, one in inner):
        yield from inner


def _add_optimizer(
    key: str,
    held: Mapping[str, Any],
    file: str,
    weights: tuple[ForeignTensor, ...],
    gathered: GatheredListing,
    alone: bool,
) -> None:
    """Add an optimizer by the names of its parameters, or by their numbers, if these are not certain and it is `alone`."""
    before = dict(gathered.tensors)
    try:
        if alone:
            numbered_optimizers.add(gathered, [HeldOptimizer(held, file)], weights, optimizer_state.KEY, key)
            return
        named = torch_optimizer.read(held, weights, file, key)
        if named is None:
            raise torch_optimizer.refused(file, key, "is one of several, and does not name its parameters")
        twice = next((tensor.spec.name for tensor in named.tensors if tensor.key in before), None)
        if twice is not None:
            raise torch_optimizer.refused(file, key, f"has state {twice!r}, as another one")
        gathered.tensors.update((tensor.key, tensor) for tensor in named.tensors)
        gathered.document(optimizer_state.GROUP, key, named.document)
        gathered.notes.extend([named.note] if named.note else [])
    except Refused as error:
        gathered.take_back(before)
        gathered.refused.append(RefusedPart(key, error, optimizer_state.GROUP))

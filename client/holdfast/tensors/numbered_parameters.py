"""Optimizer state of another program that numbers its parameters, by the names that they have in the live optimizer.

torch's optimizers number parameters through all groups, and the files of many trainers have no names. The document says
`"numbered": true` then, and tensors are `0/exp_avg`. As in `load_state_dict` of torch, the live groups decide: they must
have the same sizes, and state in the form of a parameter must have that of the parameter of its number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from holdfast.tensors import optimizer_documents
from holdfast.tensors.leaves import OfferedLeaves
from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.optimizer_state import GROUP, MASTER_GROUP, NUMBERED
from holdfast_formats.region import Shape

_HINT = (
    "make the optimizer of the same parameters, in the same groups and order, as the program that saved it, or leave its "
    "state out: restore(groups=…)"
)

Shapes = Sequence[Mapping[str, Shape]]  # by name, of each group


def is_numbered(stored: OfferedLeaves, key: str) -> bool:
    """Whether the optimizer document `key` of an imported checkpoint has numbers in place of names."""
    text = stored.value(GROUP, key) if stored.imported else None
    document = None if text is None else json.loads(text)
    return isinstance(document, dict) and document.get(NUMBERED) is True


def named(stored: OfferedLeaves, key: str, groups: Shapes) -> OfferedLeaves:
    """The checkpoint with the numbered parameters of the optimizer `key` as aliases under the names of these live groups.

    Raises `StateMismatch` if the groups have other sizes, or parameters other shapes.
    """
    document = {
        part: held for part, held in json.loads(stored.values[GROUP][key]).items() if part not in ("$keys", NUMBERED)
    }
    held = [group["params"] for name, group in document["groups"].items() if name != "$keys"]
    numbers = sorted((sorted(map(int, group)) for group in held if group), key=min)
    sizes, live = list(map(len, numbers)), [len(group) for group in groups if group]
    if sizes != live:
        raise StateMismatch(
            f"{key}: the checkpoint numbers its parameters in groups of {_shown(sizes)}, and the live optimizer has "
            f"groups of {_shown(live)}",
            hint=_HINT,
        )
    shapes = {str(number): one for number, one in enumerate(one for group in groups for one in group.items())}
    _check_shapes(stored, key, shapes)
    names = {number: name for number, (name, _) in shapes.items()}
    specs, aliases = {**stored.specs}, {**stored.aliases}
    for group in (GROUP, MASTER_GROUP):
        again = {found: name for name in stored.specs.get(group, {}) if (found := _renamed(name, names)) is not None}
        specs[group] = {**specs.get(group, {}), **{alias: stored.specs[group][name] for alias, name in again.items()}}
        aliases[group] = {**aliases.get(group, {}), **again}
    new = optimizer_documents.renamed(json.dumps(document), {number: (name,) for number, name in names.items()})
    values = {**stored.values, GROUP: {**stored.values[GROUP], key: new}}
    note = f"the {len(names)} numbered parameters of {GROUP}/{key} are those of the live optimizer, in its order"
    return stored._replace(specs=specs, aliases=aliases, values=values, notes=(*stored.notes, note))


def _check_shapes(stored: OfferedLeaves, key: str, shapes: Mapping[str, tuple[str, Shape]]) -> None:
    """Refuse state whose tensors have the form of their parameters, but of other ones."""
    alike: dict[str, list[str]] = {}
    differing: dict[str, list[str]] = {}
    for name, (_, shape) in stored.specs.get(GROUP, {}).items():
        number, _, kind = name.partition("/")
        if number in shapes and len(shape) > 0:
            (alike if tuple(shape) == tuple(shapes[number][1]) else differing).setdefault(kind, []).append(number)
    for kind in alike.keys() & differing.keys():
        number = differing[kind][0]
        raise StateMismatch(
            f"{key}: {kind} of parameter {number} has shape {list(stored.specs[GROUP][f'{number}/{kind}'][1])}, and number "
            f"{number} of the live optimizer, {shapes[number][0]}, has {list(shapes[number][1])}",
            hint=_HINT,
        )


def _renamed(name: str, names: Mapping[str, str]) -> str | None:
    number, slash, kind = name.partition("/")
    return f"{names[number]}{slash}{kind}" if number in names else None


def _shown(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) or "none"

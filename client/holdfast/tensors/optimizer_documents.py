"""Renames the parameters in an optimizer's document, and merges the documents of several ranks.

It works on the JSON text that `state_tensors` describes: parameters are named in `groups`, `state`, `masters`,
`wrapped` and `blocks`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast_formats.errors import StateMismatch

_PARTS = frozenset({"groups", "state", "masters", "kinds"})
WRAPPED = "wrapped"  # what wrapper tensors are; missing where there are none
BLOCKS = "blocks"  # of which parts of a tensor its blocks of codes are; missing where these are those of the whole
IDLE = "idle"  # the parameters of which a rank has no state, though it has some of others; missing where there are none
BEGAN = "began"  # the learning rates that groups began with where the user's own loop sets them; missing where it sets none


def renamed(text: str, names: Mapping[str, Sequence[str]]) -> str:
    """The document with every parameter under its new names: several, or none. Names missing in `names` stay.

    If parameters become one, the first's values are used. `StateMismatch` for state in wrapper tensors, whose blocks of
    codes cannot be cut or joined.
    """
    document = _parsed(text)
    if document is None:
        return text
    if kept := [name for part in (WRAPPED, BLOCKS) for name, _ in _items(document.get(part, {}))]:
        raise StateMismatch(
            f"the optimizer's state of {kept[0]} is in blocks of codes, which no layout or program can cut or join",
            hint="leave the optimizer out: save(groups=…) or restore(groups=…)",
        )
    state: dict[str, Any] = {}
    for name, kept in _items(document["state"]):
        for new in names.get(name, (name,)):
            state.setdefault(new, kept)
    masters = {key: _all_renamed(listed, names) for key, listed in _items(document["masters"])}
    groups: dict[str, Any] = {}
    began = dict(_items(document.get(BEGAN, {})))
    for first, group in _items(document["groups"]):
        params = _all_renamed(group["params"], names)
        if params or not group["params"]:
            groups[params[0] if params else first] = {**group, "params": params}
        if first in began and params:
            began[params[0]] = began.pop(first)
    others = {part: held for part, held in _items(document) if part != IDLE}  # ranks of a layout have other parameters
    renamed_parts = {"groups": _ordered(groups), "state": _ordered(state), "masters": _ordered(masters)}
    return _text(_ordered({**others, **renamed_parts, **({BEGAN: _ordered(began)} if began else {})}))


def conflict(text: str, names: Mapping[str, Sequence[str]]) -> str | None:
    """A new name shared by parameters with different values in the document; None if there is none."""
    document = _parsed(text)
    if document is None or len({new for news in names.values() for new in news}) == sum(map(len, names.values())):
        return None
    state, masters = dict(_items(document["state"])), dict(_items(document["masters"]))
    settings: dict[str, tuple[Any, ...]] = {}
    for _, group in _items(document["groups"]):
        hyper = _hyper(group)
        for name in group["params"]:
            mine = hyper, state.get(name), [key for key, listed in masters.items() if name in listed]
            for new in map(str, names.get(name, (name,))):
                if settings.setdefault(new, mine) != mine:
                    return new
    return None


def merged(texts: Sequence[str]) -> str:
    """One document with the parameters of all; the first's values are used if several have a parameter."""
    documents = [_parsed(text) for text in texts]
    known = [document for document in documents if document is not None]
    if len(known) < len(documents) or len(texts) == 1:
        return texts[0]
    state: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    masters: dict[str, dict[str, None]] = {}
    groups: dict[str, Any] = {}
    wrapped: dict[str, Any] = {}
    idle: dict[str, None] = {}
    blocks: dict[str, Any] = {}
    seen: set[str] = set()
    began: dict[str, Any] = {}
    for document in known:
        began.update(_items(document.get(BEGAN, {})))
        for name, kept in _items(document.get(WRAPPED, {})):
            wrapped.setdefault(name, kept)
        for name, kept in _items(document.get(BLOCKS, {})):
            blocks.setdefault(name, kept)
        idle.update(dict.fromkeys(document.get(IDLE, ())))
        for name, kept in _items(document["state"]):
            state.setdefault(name, kept)
        for key, kind in _items(document["kinds"]):
            kinds.setdefault(key, kind)
        for key, names in _items(document["masters"]):
            masters.setdefault(key, {}).update(dict.fromkeys(names))
        for first, group in _items(document["groups"]):
            params = [name for name in group["params"] if name not in seen]
            seen.update(params)
            _join(groups, first, {**group, "params": params})
    listed = {key: list(names) for key, names in masters.items()}
    parts: dict[str, Any] = {"groups": groups, "state": state, "masters": listed, "kinds": kinds}
    parts |= {part: held for part, held in ((WRAPPED, wrapped), (BLOCKS, blocks), (BEGAN, began)) if held}
    parts |= {IDLE: list(idle)} if idle else {}
    ordered = {part: _ordered(held) if isinstance(held, dict) else held for part, held in parts.items()}
    return _text(_ordered({**dict(_items(known[0])), **ordered}))


def _join(groups: dict[str, Any], first: str, group: dict[str, Any]) -> None:
    """Add parameters to the group that already has their hyper-parameters, or make one for them."""
    params = group["params"]
    alike = next((known for known in groups.values() if _hyper(known) == _hyper(group)), None)
    if alike is not None:
        alike["params"] += params
    elif params:
        groups[params[0]] = group
    else:
        groups.setdefault(first, group)


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _all_renamed(listed: Iterable[str], names: Mapping[str, Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(new for name in listed for new in names.get(name, (name,))))


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        document = json.loads(text)
    except ValueError:
        return None
    plain = isinstance(document, dict) and set(document) >= _PARTS | set(document.get("$keys", ()))
    plain = plain and all(isinstance(document[part], dict) and "$dict" not in document[part] for part in _PARTS)
    return document if plain and all("params" in group for _, group in _items(document["groups"])) else None


def _items(held: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return [(key, held[key]) for key in held.get("$keys", sorted(key for key in held if key != "$keys"))]


def _ordered(held: Mapping[str, Any]) -> dict[str, Any]:
    """An object with its order, if that is not the sorted one, as `json_values` writes it."""
    keys = list(held)
    return dict(held) if keys == sorted(keys) else {**held, "$keys": keys}


def _text(document: Any) -> str:
    return json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":"))

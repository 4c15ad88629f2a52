"""Parameters of each rank, from `model_meta.json` or the weights themselves: names, shapes, dtypes.

Paddle's optimizers name a parameter by a static name such as `linear_0.w_0`, its model by a structured one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.region import Shape
from holdfast_service.wings.convert.foreign.paddle.pickled_dicts import SavedDict

META = "model_meta.json"
_AXES = {"tp": "tp", "pp": "pp", "shard": "shard", "sharding": "shard", "moe": "moe", "ep": "moe"}
_DTYPES = {10: "F32", 11: "F64", 15: "F16", 16: "BF16", 4: "F16", 5: "F32", 6: "F64", 22: "BF16"}  # phi's, then VarType's


class RankPlace(NamedTuple):
    """A rank by its numbers in the axes of parallelism."""

    tp: int = 0
    pp: int = 0
    shard: int = 0
    moe: int = 0


def place_of(suffix: str) -> RankPlace:
    numbers = re.findall(r"([a-z]+)(\d+)", suffix)
    return RankPlace(**{_AXES[axis]: int(number) for axis, number in numbers if axis in _AXES})


def every_place(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All places of axes of these sizes, lazily: names of files may claim any size."""
    if not sizes:
        yield ()
        return
    for number in range(sizes[0]):
        for rest in every_place(sizes[1:]):
            yield (number, *rest)


class NamedParameter(NamedTuple):
    """A rank's parameter in the metadata."""

    name: str
    shape: Shape | None
    dtype: str | None
    distributed: bool | None


class StaticNames:
    """Structured names by static ones, and known parameters, for each tensor-parallel rank and stage."""

    def __init__(self, meta: Mapping[str, Any] | None) -> None:
        self.known = meta is not None
        self.flat = False
        self._static: dict[tuple[int, int, int], dict[str, str]] = {}
        self._canonical: dict[tuple[int, int, int], dict[str, str]] = {}
        self._parameters: dict[tuple[int, int, int], dict[str, NamedParameter]] = {}
        metas = {} if meta is None else meta.get("sharding_metas")
        if not isinstance(metas, dict):
            raise CorruptManifest(f"{META} has no sharding_metas", file=META)
        for key, stated in metas.items():
            at = place_of(key)
            names = stated.get("structure_name_mapping") if isinstance(stated, dict) else None
            described = (stated.get("param_meta") or {}) if isinstance(stated, dict) else None
            if not isinstance(names, dict) or not isinstance(described, dict):
                raise CorruptManifest(f"{META}: {key} has no structure_name_mapping or no param_meta", file=META)
            for name, static in names.items():
                where = (at.tp, at.pp, at.moe)
                self._name(where, name, str(static))
                self._parameters.setdefault(where, {})[name] = _parameter(name, described.get(name))
            self.flat |= str(stated.get("sharding_strategy")).lower().endswith("v2")

    def add(self, place: RankPlace, saved: SavedDict) -> None:
        """Add the names in a rank's weights."""
        for name, static in saved.static.items():
            self._name((place.tp, place.pp, place.moe), name, static)
        if not self.known:
            for name, tensor in saved.tensors.items():
                held = self._parameters.setdefault((place.tp, place.pp, place.moe), {})
                held[name] = NamedParameter(name, tensor.shape, tensor.dtype, None)

    def _name(self, where: tuple[int, int, int], name: str, static: str) -> None:
        """Tied parameters have one static name; the first of their names represents them."""
        first = self._static.setdefault(where, {}).setdefault(static, name)
        self._canonical.setdefault(where, {}).setdefault(name, first)

    def canonical(self, place: RankPlace, name: str) -> str:
        """The name under which tied parameters are saved; of others their own."""
        return self._canonical.get((place.tp, place.pp, place.moe), {}).get(name, name)

    def statics(self, place: RankPlace) -> Mapping[str, str]:
        at = (place.tp, place.pp, place.moe)
        return self._static.get(at) or self._static.get((place.tp, place.pp, 0)) or {}

    def parameter(self, place: RankPlace, name: str) -> NamedParameter:
        at = (place.tp, place.pp, place.moe)
        held = self._parameters.get(at) or self._parameters.get((place.tp, place.pp, 0)) or {}
        return held.get(name) or NamedParameter(name, None, None, None)

    def parameters(self) -> Iterator[tuple[RankPlace, NamedParameter]]:
        for (tp, pp, moe), held in sorted(self._parameters.items()):
            for parameter in held.values():
                yield RankPlace(tp, pp, 0, moe), parameter

    def split(self, place: RankPlace, key: str, file: str) -> tuple[str, str]:
        """The parameter and the type of a key of the optimizer, such as `linear_0.w_0_fp32_master_0_moment1_0`."""
        statics = self.statics(place)
        for at in range(len(key) - 1, 0, -1):
            if key[at] == "_" and key[:at] in statics:
                return statics[key[:at]], re.sub(r"^fp32_master_\d+_", "", key[at + 1 :])
        raise StateMismatch(
            f"{file}: {key!r} belongs to no parameter listed in {META if self.known else 'the weights'}",
            hint="copy the files of all ranks",
            file=file,
            tensor=key,
        )


def _parameter(name: str, stated: Any) -> NamedParameter:
    if stated is None:
        return NamedParameter(name, None, None, None)
    fits = isinstance(stated, list) and len(stated) >= 3 and isinstance(stated[0], list) and isinstance(stated[1], int)
    if not fits or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in stated[0]):
        raise CorruptManifest(f"{META}: {stated!r} does not describe {name!r}", file=META, tensor=name)
    return NamedParameter(name, tuple(stated[0]), _DTYPES.get(stated[1]), bool(stated[2]))

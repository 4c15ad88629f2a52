"""The methods of recipes: their parameters, defaults, and computation.

Names, meanings and defaults are mergekit's; `trim` and `rescale: density` are ours, `dialect: paddle` is PaddleFormers'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast, get_args

from holdfast_formats.errors import InvalidRequest
from holdfast_service.wings.merge.averages import AloneTerms, MeanTerms, SlerpTerms
from holdfast_service.wings.merge.differences import FusionTerms, NearTerms, RamTerms, SceTerms, StockTerms
from holdfast_service.wings.merge.scanning import Terms
from holdfast_service.wings.merge.sparsifying import Sparsification, Sparsity, Trim
from holdfast_service.wings.merge.spheres import NuSlerpTerms, SphereTerms
from holdfast_service.wings.merge.task_vectors import Dialect, Elect, Rescale, TaskTerms

Value = float | bool | str
Values = Mapping[str, Value]


class MergeParameter(NamedTuple):
    """A parameter: `needed` has no default. `of_model`: each model may have its own value."""

    name: str
    kind: type
    default: Value | None
    of_model: bool = False
    words: tuple[str, ...] = ()  # that it may be instead of a number or a truth value

    @property
    def needed(self) -> bool:
        return self.default is None

    def checked(self, value: Value) -> Value:
        """The value in the parameter's type; `ValueError` with what it should be."""
        if isinstance(value, str) and value in self.words:
            return value
        if self.kind is bool:
            if isinstance(value, str) or value not in (0, 1):  # mergekit writes 1.0 into model cards
                raise ValueError("true or false" + "".join(f", or {word}" for word in self.words))
            return bool(value)
        if self.kind is str:
            raise ValueError(" or ".join(self.words))
        try:
            number = float(value) if not isinstance(value, bool) else float("nan")
        except ValueError:
            number = float("nan")
        if not abs(number) < float("inf"):
            raise ValueError("a finite number")
        if self.kind is int and (number != int(number) or not 0 <= number <= _COUNT_MAX):
            raise ValueError(f"a whole number from 0 to {_COUNT_MAX}")
        if self.name in _SHARES and not 0 <= number <= 1:
            raise ValueError("a number from 0 to 1")
        return number


_SHARES = frozenset({"density", "gamma", "epsilon", "select_topk"})
_COUNT_MAX = 10_000


class MergedName(NamedTuple):
    """The merged tensor, with seed and dialect."""

    tensor: str
    seed: int
    dialect: Dialect


class Method(NamedTuple):
    """A method by its name. `models`: the minimum besides the base, and the maximum if not 0."""

    name: str
    parameters: tuple[MergeParameter, ...]
    needs_base: bool
    models_min: int
    models_max: int
    terms: Callable[[MergedName, Values, Sequence[Values]], Terms]  # of shared values and of each model's
    dialects: tuple[Dialect, ...] = ("mergekit", "paddle")
    may_have_base: bool = False  # it subtracts a base if there is one

    @property
    def takes_base(self) -> bool:
        return self.needs_base or self.may_have_base

    def parameter(self, name: str) -> MergeParameter | None:
        return next((one for one in self.parameters if one.name == name), None)


WEIGHT = MergeParameter("weight", float, None, of_model=True)
_WEIGHTS_MIN = 1e-6  # NuSLERP's: below, both models count the same
SCALE = MergeParameter("scale", float, 1.0, of_model=True)


def _mean(named: MergedName, shared: Values, models: Sequence[Values]) -> Terms:
    weights = tuple(float(one["weight"]) for one in models)
    if shared["normalize"] and not sum(weights):
        raise InvalidRequest(
            f"the weights for tensor {named.tensor!r} sum to 0 and cannot be normalized",
            hint="change a weight, or set `normalize: false`",
        )
    return MeanTerms(weights, bool(shared["normalize"]), named.dialect)


def _slerp(named: MergedName, shared: Values, models: Sequence[Values]) -> Terms:
    return SlerpTerms(float(shared["t"]), named.dialect)


def _alone(named: MergedName, shared: Values, models: Sequence[Values]) -> Terms:
    return AloneTerms(float(models[0]["scale"]))


def _nuslerp(named: MergedName, shared: Values, models: Sequence[Values]) -> Terms:
    first, second = (float(one["weight"]) for one in models)
    t = 0.5 if abs(first + second) < _WEIGHTS_MIN else second / (first + second)
    along = "all" if shared["nuslerp_flatten"] else "columns" if shared["nuslerp_row_wise"] else "rows"
    return NuSlerpTerms(t, along)


def _multislerp(named: MergedName, shared: Values, models: Sequence[Values]) -> Terms:
    weights = tuple(float(one["weight"]) for one in models)
    if shared["normalize_weights"]:
        weights = _shares(weights, named)
    return SphereTerms(named.tensor, len(models), weights, float(shared["eps"]))


def _karcher(named: MergedName, shared: Values, models: Sequence[Values]) -> Terms:
    return SphereTerms(named.tensor, len(models), (), float(shared["tol"]), int(shared["max_iter"]))


def _stock(named: MergedName, shared: Values, models: Sequence[Values]) -> Terms:
    return StockTerms(len(models), bool(shared["filter_wise"]))


def _sce(named: MergedName, shared: Values, models: Sequence[Values]) -> Terms:
    return SceTerms(len(models), float(shared["select_topk"]))


def _ram(named: MergedName, shared: Values, models: Sequence[Values]) -> Terms:
    r, alpha = (float(shared.get(name, 0.0)) for name in ("r", "alpha"))
    return RamTerms(len(models), float(shared["epsilon"]), r, alpha)


def _nearswap(named: MergedName, shared: Values, models: Sequence[Values]) -> Terms:
    return NearTerms(float(shared["t"]))


def _fusion(named: MergedName, shared: Values, models: Sequence[Values]) -> Terms:
    return FusionTerms()


class _Way(NamedTuple):
    """How a method of task vectors sparsifies, whether it elects signs, and mergekit's defaults."""

    name: str
    how: Sparsification
    consensus: bool
    normalize: bool
    rescale: bool


_WAYS = (
    _Way("task_arithmetic", "none", False, False, False),
    _Way("ties", "trim", True, True, False),
    _Way("dare_ties", "random", True, False, True),
    _Way("dare_linear", "random", False, False, True),
    _Way("breadcrumbs", "outliers", False, False, False),
    _Way("breadcrumbs_ties", "outliers", True, False, False),
    _Way("della", "ranked", True, True, True),
    _Way("della_linear", "ranked", False, False, True),
)
_OF_PADDLE = ("ties", "dare_ties", "dare_linear")


def _task(way: _Way) -> Callable[[MergedName, Values, Sequence[Values]], Terms]:
    def terms(named: MergedName, shared: Values, models: Sequence[Values]) -> Terms:
        paddle = named.dialect == "paddle"
        weights = tuple(float(one["weight"]) for one in models)
        normalize = bool(_given(shared, "normalize", True if paddle else way.normalize))
        if paddle and normalize and not way.consensus:
            weights = _shares(weights, named)
        trim = cast(Trim, _given(shared, "trim", "quantile" if paddle else "count"))
        sparsities = tuple(_sparsity(way, one, trim, named) for one in models)
        rescale = _rescale(way, shared, paddle)
        made = TaskTerms(named.tensor, weights, sparsities, rescale, way.consensus, normalize)
        elect = cast(Elect, shared.get("elect", "sum"))
        return made._replace(scale=float(shared["lambda"]), seed=named.seed, dialect=named.dialect, elect=elect)

    return terms


def _shares(weights: tuple[float, ...], named: MergedName) -> tuple[float, ...]:
    if not sum(weights):
        raise InvalidRequest(
            f"the weights for tensor {named.tensor!r} sum to 0 and cannot be normalized",
            hint="change a weight, so that they do not sum to 0",
        )
    return tuple(weight / sum(weights) for weight in weights)


def _given(values: Values, name: str, otherwise: Value) -> Value:
    """A parameter whose default depends on the dialect: empty text means the default."""
    return values[name] if name in values and values[name] != "" else otherwise


def _rescale(way: _Way, shared: Values, paddle: bool) -> Rescale:
    value = _given(shared, "rescale", True if paddle else way.rescale)
    if isinstance(value, bool):
        usual: Rescale = "density" if paddle and way.how == "random" else "l1"
        return usual if value else "none"
    return cast(Rescale, value)


def _sparsity(way: _Way, values: Values, trim: Trim, named: MergedName) -> Sparsity:
    density, gamma, epsilon = (float(values.get(name, 0.0)) for name in ("density", "gamma", "epsilon"))
    if way.how == "none":
        return Sparsity("none", 1.0)
    if density <= 0:
        raise InvalidRequest(
            f"density {density:g} for tensor {named.tensor!r} would drop a whole model", hint="set weight: 0 instead"
        )
    if way.how == "ranked" and density < 1 and not 0 < density - epsilon <= density + epsilon < 1:
        raise InvalidRequest(
            f"density {density:g} ± epsilon {epsilon:g} for tensor {named.tensor!r} is not between 0 and 1",
            hint="set a smaller epsilon",
        )
    return Sparsity(way.how, density, gamma, epsilon, trim if way.how == "trim" else "count")


def _of_tasks(way: _Way) -> Method:
    parameters = [WEIGHT, MergeParameter("normalize", bool, ""), MergeParameter("lambda", float, 1.0)]
    parameters.append(_INT8_MASK)
    if way.consensus:
        parameters.append(MergeParameter("elect", str, "sum", words=get_args(Elect)))
    if way.how != "none":
        parameters.append(MergeParameter("density", float, 1.0, of_model=True))
        parameters.append(MergeParameter("rescale", bool, "", words=get_args(Rescale)))
    if way.how == "trim":
        parameters.append(MergeParameter("trim", str, "", words=get_args(Trim)))
    if way.how == "outliers":
        parameters.append(MergeParameter("gamma", float, 0.01, of_model=True))
    if way.how == "ranked":
        parameters.append(MergeParameter("epsilon", float, 0.15, of_model=True))
    dialects: tuple[Dialect, ...] = ("mergekit", "paddle") if way.name in _OF_PADDLE else ("mergekit",)
    return Method(way.name, tuple(parameters), True, 1, 0, _task(way), dialects)


_OF_MERGEKIT: tuple[Dialect, ...] = ("mergekit",)
_INT8_MASK = MergeParameter("int8_mask", bool, False)  # only how mergekit holds a mask
_T = MergeParameter("t", float, None)
_NUSLERP = (WEIGHT, MergeParameter("nuslerp_flatten", bool, True), MergeParameter("nuslerp_row_wise", bool, False))
_MULTISLERP = (WEIGHT, MergeParameter("normalize_weights", bool, True), MergeParameter("eps", float, 1e-8))
_KARCHER = (MergeParameter("max_iter", int, 10), MergeParameter("tol", float, 1e-5))
_STOCK = (MergeParameter("filter_wise", bool, False),)
_RAM = (MergeParameter("epsilon", float, 1e-5),)
_RAMPLUS = (MergeParameter("r", float, 0.1), MergeParameter("alpha", float, 0.2), *_RAM)
_SCE = (_INT8_MASK, MergeParameter("select_topk", float, 1.0))

METHODS: dict[str, Method] = {
    one.name: one
    for one in (
        Method("linear", (WEIGHT, MergeParameter("normalize", bool, True)), False, 1, 0, _mean),
        Method("slerp", (_T,), True, 1, 1, _slerp),
        Method("nuslerp", _NUSLERP, False, 2, 2, _nuslerp, _OF_MERGEKIT, may_have_base=True),
        Method("multislerp", _MULTISLERP, False, 1, 0, _multislerp, _OF_MERGEKIT, may_have_base=True),
        Method("karcher", _KARCHER, False, 1, 0, _karcher, _OF_MERGEKIT),
        *map(_of_tasks, _WAYS),
        Method("model_stock", _STOCK, True, 2, 0, _stock, _OF_MERGEKIT),
        Method("sce", _SCE, True, 1, 0, _sce, _OF_MERGEKIT),
        Method("ram", _RAM, True, 1, 0, _ram, _OF_MERGEKIT),
        Method("ramplus_tl", _RAMPLUS, True, 1, 0, _ram, _OF_MERGEKIT),
        Method("nearswap", (_T,), True, 1, 1, _nearswap, _OF_MERGEKIT),
        Method("arcee_fusion", (), True, 1, 1, _fusion, _OF_MERGEKIT),
        Method("passthrough", (SCALE,), False, 1, 1, _alone, _OF_MERGEKIT),
    )
}


def _of_adapters(named: MergedName, shared: Values, models: Sequence[Values]) -> Terms:
    raise InvalidRequest(
        f"the dialect peft combines adapters, and {named.tensor!r} is a tensor of a model", hint="write `group: adapter`"
    )


_DENSITY = MergeParameter("density", float, None)
_MAJORITY = MergeParameter("majority_sign_method", str, "total", words=("total", "frequency"))
# PEFT's `add_weighted_adapter`, by its `combination_type`; adapters/combining.py computes them.
PEFT_METHODS: dict[str, Method] = {
    name: Method(name, (WEIGHT, *parameters), False, 1, 0, _of_adapters, ("peft",))
    for name, parameters in (
        ("linear", ()),
        ("cat", ()),
        ("svd", (MergeParameter("rank", float, 0.0),)),
        ("ties", (_DENSITY, _MAJORITY)),
        ("dare_linear", (_DENSITY,)),
        ("dare_ties", (_DENSITY, _MAJORITY)),
        ("magnitude_prune", (_DENSITY,)),
    )
}

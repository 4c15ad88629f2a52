"""Makes reference.npz and recipes.npz: what mergekit makes of the cases, and of the published recipes.

Run it where mergekit 0.1.5 is installed:

    python -m tests.wings.merge.make_reference

mergekit draws its random masks with torch; here it gets the draws that Holdfast would take, so that the arithmetic can be
compared. Torch sums whole tensors in F32 in an order that depends on the processor and the number of threads; `exact` are
the results with sums that are rounded once.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from mergekit.merge_methods import base, registry  # type: ignore[import-not-found, unused-ignore]
from safetensors.torch import load_file

from holdfast_service.wings.merge.draws import Draws
from tests.wings.merge import zoo
from tests.wings.merge.cases import CASES, SEED, TENSOR, Case, inputs
from tests.wings.merge.published import DRAWN, RECIPES, SAMPLED, by_token, text_of
from tests.wings.merge.published import REFERENCE as PUBLISHED

REFERENCE = Path(__file__).with_name("reference.npz")


def merged(case: Case, exact: bool = False) -> np.ndarray[Any, Any]:
    """The result of mergekit's own method; `exact`: its sums of whole tensors, or all of it, are computed in float64."""
    dtype = torch.float64 if exact and case.exact == "all" else torch.float32
    tensors = [torch.from_numpy(one).to(dtype) for one in inputs(case)]
    method = registry.get(case.method)
    drawing = (number for number, one in enumerate(case.models) if one.get("density", 1.0) < 1)

    def bernoulli(chances: torch.Tensor) -> torch.Tensor:
        drawn = Draws(SEED, next(drawing), TENSOR).uniform(0, chances.numel())
        return (torch.from_numpy(drawn).reshape(chances.shape) < chances).to(chances.dtype)

    def total(values: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        if given or named:
            return summed(values, *given, **named)
        return summed(values.double()).to(values.dtype)

    torch.bernoulli, kept, summed = bernoulli, torch.bernoulli, torch.Tensor.sum
    if exact:
        torch.Tensor.sum = total  # type: ignore[method-assign, assignment]
    try:
        root = len(case.models) if case.has_base else None
        group = base.TensorGroup.from_tensors(tensors, base_index=root, name=TENSOR)
        return np.asarray(_called(method, group, case).float())
    finally:
        torch.bernoulli, torch.Tensor.sum = kept, summed  # type: ignore[method-assign]


def _called(method: Any, group: Any, case: Case) -> Any:
    given: dict[str, Any] = {}
    for parameter in method.spec.parameters:
        if parameter.scope == base.ParameterScope.SHARED:
            given[parameter.name] = case.shared.get(parameter.name, parameter.default)
        else:
            given[parameter.name] = {
                number: one.get(parameter.name, parameter.default) for number, one in enumerate(case.models)
            }
    return method([group], parameters=given)[0]


def by_mergekit(recipe: str, place: Path, out: Path) -> dict[str, torch.Tensor]:
    """Run mergekit, with one thread, on models below `place`; the tensors of the result, which is in `out`."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    config = MergeConfiguration.model_validate(yaml.safe_load(recipe))
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        run_merge(config, str(out), MergeOptions(write_model_card=False, quiet=True))
    return {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}


def published() -> dict[str, np.ndarray[Any, Any]]:
    """Some tensors of every published recipe that draws nothing."""
    sampled = {}
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for animal in zoo.ANIMALS:
            zoo.put(place, animal)
        for name in sorted(RECIPES.keys() - DRAWN):
            for key, tensor in by_mergekit(text_of(name), place, place / name).items():
                if SAMPLED.search(key):
                    sampled[f"{name}/{key}"] = by_token(key, tensor.float().numpy(), place / name)
    return sampled


if __name__ == "__main__":
    exact = {f"{case.name} exact": merged(case, exact=True) for case in CASES if case.exact}
    np.savez_compressed(REFERENCE, **{case.name: merged(case) for case in CASES}, **exact)
    np.savez_compressed(PUBLISHED, **published())

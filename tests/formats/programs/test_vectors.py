"""AOA programs as Paddle runs them: what its engine makes of each element, and ERNIE 4.5's own programs bit for bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.programs import Program, Ranks, compile_program, inverted, statements_only
from holdfast_formats.tensors import TensorSpec
from tests.formats.programs.arrays import Arrays, applied, key, specs

GOLDEN = Path(__file__).parents[2] / "golden" / "foreign" / "programs"
VECTORS = json.loads((GOLDEN / "vectors.json").read_text())
_DTYPES = {"float32": "F32", "bfloat16": "BF16"}


def _declared(shards: dict[str, Any]) -> dict[TensorKey, TensorSpec]:
    return {
        key(name): TensorSpec("model", name, _DTYPES[held[0]["dtype"]], tuple(held[0]["global_shape"]))
        for name, held in shards.items()
    }


def _numbered(declared: dict[TensorKey, TensorSpec]) -> Arrays:
    """Every element has a number of its own."""
    found, at = {}, 0
    for each, spec in declared.items():
        count = int(np.prod(spec.shape))
        found[each] = np.arange(at, at + count, dtype="<f4").reshape(spec.shape)
        at += count
    return found


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_every_element_comes_from_where_paddle_takes_it(vector: dict[str, Any]) -> None:
    """All elements of every target are those that Paddle's engine mapped, and no more tensors are made than it has."""
    program = statements_only("\n".join(vector["statements"]))
    program = inverted(program, trusting=True) if vector["reverse"] else program
    source, target = _declared(vector["source"]), _declared(vector["destination"])
    ranks = Ranks(*({name: len(held) for name, held in vector[side].items()} for side in ("source", "destination")))
    compiled = compile_program(program, source, {}, targets=target, ranks=ranks)
    values = _numbered(source)
    made = applied(compiled, values)
    assert made.keys() == target.keys()
    written = {each: np.zeros(array.shape, bool) for each, array in made.items()}
    for one in vector["mapping"]:
        place = tuple(slice(o, o + n) for o, n in zip(one["target_offset"], one["target_shape"], strict=True))
        taken = tuple(slice(o, o + n) for o, n in zip(one["source_offset"], one["source_shape"], strict=True))
        wanted = values[key(one["source"])][taken]
        for post in one["post"] or []:
            wanted = wanted.transpose(json.loads(post)) if post.startswith("[") else wanted
        there = made[key(one["target"])]
        np.testing.assert_array_equal(there[place], wanted.astype(there.dtype))
        written[key(one["target"])][place] = True
    for each in compiled.added:
        assert not made[each].any() and not written.pop(each).any()
    assert all(places.all() for places in written.values())


def _digests(made: Arrays) -> dict[str, tuple[list[int], str]]:
    return {each.name: (list(values.shape), hashlib.sha256(values.tobytes()).hexdigest()) for each, values in made.items()}


def _ernie() -> tuple[Arrays, dict[str, Any]]:
    import ml_dtypes  # noqa: F401  # so that numpy knows bfloat16

    stored = load_file(GOLDEN / "ernie45" / "model-00001-of-00001.safetensors")
    expected = json.loads((GOLDEN / "ernie45" / "expected.json").read_text())
    return {key(name): values for name, values in stored.items()}, expected


def _program(statements: list[str]) -> Program:
    return statements_only("\n".join(statements))


def test_ernie_is_fused_as_paddle_holds_it() -> None:
    """The exported tensors become those that Paddle had in memory."""
    stored, expected = _ernie()
    made = applied(compile_program(_program(expected["aoa"]), specs(stored), {}), stored)
    wanted = {name: (held["shape"], held["sha256_u16"]) for name, held in expected["in_memory_paddle"].items()}
    assert _digests(made) == wanted


def test_ernie_goes_back_by_its_own_inverse() -> None:
    """What Paddle had in memory becomes, by its own inverse program, the tensors that it exported."""
    stored, expected = _ernie()
    held = applied(compile_program(_program(expected["aoa"]), specs(stored), {}), stored)
    back = applied(compile_program(_program(expected["inv_aoa"]), specs(held), {}), held)
    assert _digests(back) == _digests(stored)


def test_ernie_goes_back_by_the_derived_inverse() -> None:
    """The inverse that is derived gives the exported tensors back, and so does that of Paddle's own inverse."""
    stored, expected = _ernie()
    forward, backward = _program(expected["aoa"]), _program(expected["inv_aoa"])
    held = applied(compile_program(forward, specs(stored), {}), stored)
    back = applied(compile_program(inverted(forward), specs(held), {}), held)
    assert _digests(back) == _digests(stored)
    again = applied(compile_program(inverted(backward), specs(stored), {}), stored)
    assert _digests(again) == _digests(held)

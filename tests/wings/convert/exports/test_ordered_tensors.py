"""Tensors and documents as a program makes them of a checkpoint's, and what a program takes for granted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.mapping.optimizer_state import document
from holdfast_formats.mapping.reading import elements
from holdfast_service.wings.convert.exports import hugging_face, ordered_tensors
from holdfast_service.wings.convert.exports.paddle import flex as paddle_flex
from holdfast_service.wings.convert.exports.paddle import unified as paddle_unified
from holdfast_service.wings.convert.exports.plan import ExportOptions
from holdfast_service.wings.convert.exports.source import ExportSource
from tests.wings.convert.exports.paddle.test_flex import load_pickle
from tests.wings.convert.exports.sources import LLAMA, llama, made, trained, values_of, write

ASSETS = {"config.json": json.dumps(LLAMA).encode()}
WEIGHTS = llama(layers=1)
GROUPS = trained(WEIGHTS)
AT = "model.layers.0.mlp."
FUSED = f"""
name = "fused"
from = "hf"
to = "mine"
statements = '''
{AT}gate_proj.weight, {AT}up_proj.weight -> {AT}gate_up.weight, axis=0
* -> *
'''
"""


def _source(tmp_path: Path, groups: Any = GROUPS, ranks: Any = None) -> ExportSource:
    return made(tmp_path / "step", groups, assets=ASSETS, ranks=ranks or values_of(list(WEIGHTS)), step=2).source


def test_everything_follows_the_parameters(tmp_path: Path) -> None:
    """Weights, masters, averages and moments are fused alike; the document names what is there now."""
    source = _source(tmp_path)
    found = ordered_tensors.arrange(source, ordered_tensors.compiled(source, FUSED))
    name = f"{AT}gate_up.weight"
    for group, suffix in (("model", ""), ("master", ""), ("ema", ""), ("optim", "/exp_avg"), ("optim", "/exp_avg_sq")):
        mapped = found.group(group)[name + suffix]
        values = elements(source.files, source.listing.tensors, mapped, 0, int(np.prod(mapped.spec.shape)))
        parts = [GROUPS[group][f"{AT}{part}_proj.weight{suffix}"] for part in ("gate", "up")]
        assert values.tobytes() == np.concatenate(parts).tobytes()
    (group,) = ordered_tensors.renamed_documents(source, found)["optim"]["optimizer"]["groups"].values()
    assert name in group["params"] and f"{AT}up_proj.weight" not in group["params"] and group["lr"] == 1e-3
    assert any("'fused'" in note for note in found.notes)


def test_without_a_program_all_is_as_it_was(tmp_path: Path) -> None:
    """Names, and the very documents."""
    source = _source(tmp_path)
    found = ordered_tensors.arrange(source, None)
    assert {group: set(held) for group, held in found.groups.items()} == {g: set(h) for g, h in GROUPS.items() if h}
    assert ordered_tensors.renamed_documents(source, found) == source.listing.documents


def test_parameters_of_two_groups_do_not_become_one(tmp_path: Path) -> None:
    """Nobody could say which weight decay it has."""
    split = document([([f"{AT}up_proj.weight"], {"lr": 1.0}), ([n for n in WEIGHTS if n != f"{AT}up_proj.weight"], {})])
    source = _source(tmp_path, ranks={0: {"optim": {"optimizer": json.dumps(split)}}})
    found = ordered_tensors.arrange(source, ordered_tensors.compiled(source, FUSED))
    with pytest.raises(StateMismatch, match="two optimizer groups"):
        ordered_tensors.renamed_documents(source, found)


def test_steps_that_differ_do_not_become_one(tmp_path: Path) -> None:
    """A program that fuses parameters needs their steps to be equal."""
    optim = {**GROUPS["optim"], f"{AT}up_proj.weight/step": np.array(3, np.float32)}
    source = _source(tmp_path, {**GROUPS, "optim": optim})
    with pytest.raises(StateMismatch, match="are equal, but they differ"):
        ordered_tensors.arrange(source, ordered_tensors.compiled(source, FUSED))


def test_a_fused_model_of_paddle(tmp_path: Path) -> None:
    """A unified checkpoint keeps the model as Hugging Face has it, and fuses what trains it; a FlexCheckpoint fuses all."""
    statements = "".join(
        f"model.layers.0.self_attn.{n}_proj.weight^T -> model.layers.0.self_attn.{n}_proj.weight\n" for n in "qkvo"
    )
    statements += f"{AT}gate_proj.weight^T -> g\n{AT}up_proj.weight^T -> u\ng, u -> {AT}up_gate_proj.weight, axis=1\n"
    statements += f"{AT}down_proj.weight^T -> {AT}down_proj.weight\n* -> *\n"
    program = f"name = 'fused'\nfrom = 'hf'\nto = 'paddle'\nstatements = '''\n{statements}'''\n"
    source = _source(tmp_path)
    options = ExportOptions(program=ordered_tensors.compiled(source, program))
    unified = paddle_unified.plan(source, options)
    held = {one.mapped.spec.name for file in unified.files for one in file.tensors}
    assert {f"{AT}up_proj.weight", f"{AT}up_gate_proj.weight", f"{AT}up_gate_proj.weight/moment1_0"} <= held
    assert f"{AT}up_proj.weight/moment1_0" not in held
    out = write(source, paddle_flex.plan(source, options), tmp_path / "out")
    masters = load_pickle(out / "master_weight" / "0_0.distcp")
    parts = [GROUPS["master"][f"{AT}{part}_proj.weight"].T for part in ("gate", "up")]
    assert np.array_equal(masters[f"{AT}up_gate_proj.weight.w_0"], np.concatenate(parts, axis=1))
    assert f"{AT}up_gate_proj.weight" in load_pickle(out / "model_state" / "0_0.distcp")


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    """A name is one of those that are shipped; a text has to be right."""
    source = _source(tmp_path)
    with pytest.raises(InvalidRequest):
        ordered_tensors.compiled(source, "no-such-program")
    with pytest.raises(InvalidRequest):
        ordered_tensors.compiled(source, "statements = 3\n")


def test_the_config_is_an_object_or_nothing(tmp_path: Path) -> None:
    """Programs ask it for sizes; what is no JSON object has none."""
    for number, config in enumerate((b"[]", b"{", b"\xff")):
        source = made(tmp_path / str(number), {"model": WEIGHTS}, assets={"config.json": config}).source
        assert ordered_tensors.config_of(source) == {}
    assert ordered_tensors.config_of(_source(tmp_path)) == LLAMA
    plan = hugging_face.plan(source, ExportOptions())
    assert plan.tensors == len(WEIGHTS)

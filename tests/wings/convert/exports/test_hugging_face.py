"""A Hugging Face directory of a model, its averages or its masters: names, dtypes, config, and what is said or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchResource, StateMismatch
from holdfast_service.wings.convert.exports import hugging_face, ordered_tensors
from holdfast_service.wings.convert.exports.plan import ExportOptions
from tests.wings.convert.exports.sources import LLAMA, llama, made, trained, write

ASSETS = {"config.json": json.dumps(LLAMA, indent=2).encode(), "tokenizer.json": b"{}", "empty.txt": b""}
WEIGHTS = llama()
GROUPS = trained(WEIGHTS)


def _loaded(directory: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            assert file.metadata() == {"format": "pt"}
        found |= load_file(path)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in found.values())
    return found


def _equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes() for name, array in expected.items()
    )


def test_the_model_as_it_is(tmp_path: Path) -> None:
    """Equal tensors, the small files byte for byte, and a word about every group that stays behind."""
    source = made(tmp_path / "step", GROUPS, assets=ASSETS).source
    plan = hugging_face.plan(source, ExportOptions())
    out = write(source, plan, tmp_path / "out")
    assert _equal(_loaded(out), WEIGHTS)
    assert {name: (out / name).read_bytes() for name in ASSETS} == ASSETS
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*ASSETS, "model.safetensors", "model.safetensors.index.json"]
    )
    assert [left.what for left in plan.left_out] == [
        f"group ema ({len(WEIGHTS)} tensors)",
        f"group master ({len(WEIGHTS)} tensors)",
        f"group optim ({3 * len(WEIGHTS)} tensors)",
        "values extra/lr",
    ]
    assert plan.notes == () and plan.tensors == len(WEIGHTS)


@pytest.mark.parametrize("weights", ["ema", "master"])
@pytest.mark.parametrize("dtype", [None, "F32", "F16"])
def test_averages_and_masters_under_the_models_names(tmp_path: Path, weights: str, dtype: str | None) -> None:
    """Rounded to the model's dtype, to the nearest, ties to even; or in the dtype that was asked for, config included."""
    source = made(tmp_path / "step", GROUPS, assets=ASSETS).source
    plan = hugging_face.plan(source, ExportOptions(weights=weights, dtype=dtype))  # type: ignore[arg-type]
    out = write(source, plan, tmp_path / "out")
    wanted = {None: ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16}[dtype]
    assert _equal(_loaded(out), {name: array.astype(wanted) for name, array in GROUPS[weights].items()})
    config = json.loads((out / "config.json").read_text())
    assert config == {**LLAMA, "torch_dtype": {None: "bfloat16", "F32": "float32", "F16": "float16"}[dtype]}
    assert any("rounded" in note for note in plan.notes) == (dtype != "F32")


@pytest.mark.parametrize(
    ("value", "fits"), [(65504.0, True), (65536.0, False), (1e30, False), (np.inf, True), (np.nan, True)]
)
def test_numbers_that_the_dtype_cannot_hold(tmp_path: Path, value: float, fits: bool) -> None:
    """A weight that would become infinite is refused by its name, and not written; what is infinite stays so."""
    array = np.array([1.0, value, -value], np.float32)
    source = made(tmp_path / "step", {"model": {"model.norm.weight": array}}, assets=ASSETS).source
    plan = hugging_face.plan(source, ExportOptions(dtype="F16"))
    if fits:
        np.testing.assert_array_equal(_loaded(write(source, plan, tmp_path / "out"))["model.norm.weight"], array)
        return
    with pytest.raises(StateMismatch, match=r"model\.norm\.weight.* float16 cannot hold"):
        write(source, plan, tmp_path / "out")


def test_what_has_no_average_is_the_models_and_said(tmp_path: Path) -> None:
    """Buffers that are not averaged come from the model; the count of averages is left out."""
    count = {"n_averaged": np.array(9, np.int64)}
    buffers = {"rotary.inv_freq": np.arange(4, dtype=np.float32), "seen": np.array(3, np.int64)}
    groups = {"model": {**WEIGHTS, **buffers}, "ema": {**GROUPS["ema"], **count}}
    source = made(tmp_path / "step", groups, assets=ASSETS).source
    plan = hugging_face.plan(source, ExportOptions(weights="ema"))
    found = _loaded(write(source, plan, tmp_path / "out"))
    averages = {name: array.astype(ml_dtypes.bfloat16) for name, array in GROUPS["ema"].items()}
    assert _equal(found, {**averages, **buffers})
    assert "missing in group ema and taken from the model: rotary.inv_freq, seen" in plan.notes
    assert "ema/n_averaged" in [left.what for left in plan.left_out]


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    """Under the name that has the bytes, from the group that was asked for, whichever of the two names it uses."""
    tied = {name: array for name, array in WEIGHTS.items() if name != "lm_head.weight"}
    averages = {name: array for name, array in GROUPS["ema"].items() if name != "model.embed_tokens.weight"}
    aliases = {"model": {"lm_head.weight": "model.embed_tokens.weight"}}
    ties = {**ASSETS, "config.json": json.dumps({**LLAMA, "tie_word_embeddings": True}).encode()}
    source = made(tmp_path / "step", {"model": tied, "ema": averages}, assets=ties, aliases=aliases).source
    plan = hugging_face.plan(source, ExportOptions(weights="ema", dtype="F32"))
    found = _loaded(write(source, plan, tmp_path / "out"))
    assert found.keys() == tied.keys()
    assert np.array_equal(found["model.embed_tokens.weight"], averages["lm_head.weight"])
    assert not any(note.startswith("not in group") for note in plan.notes)


def test_what_is_tied_only_in_the_model_is_refused(tmp_path: Path) -> None:
    """One of two averages would be lost."""
    tied = {name: array for name, array in WEIGHTS.items() if name != "lm_head.weight"}
    aliases = {"model": {"lm_head.weight": "model.embed_tokens.weight"}}
    source = made(tmp_path / "step", {"model": tied, "ema": GROUPS["ema"]}, assets=ASSETS, aliases=aliases).source
    with pytest.raises(StateMismatch, match=r"'lm_head.weight' and 'model.embed_tokens.weight' are tied in the model"):
        hugging_face.plan(source, ExportOptions(weights="ema"))


def _prefixed(group: Mapping[str, np.ndarray], lost: int) -> dict[str, np.ndarray]:
    return {(f"module.{name}" if number < lost else name): array for number, (name, array) in enumerate(group.items())}


@pytest.mark.parametrize(
    ("groups", "options", "error", "says"),
    [
        (
            {"optim": GROUPS["optim"]},
            ExportOptions(),
            NoSuchResource,
            r"(?s)no group 'model'.*: optim; leave --as out",
        ),
        ({"model": WEIGHTS}, ExportOptions(weights="ema"), NoSuchResource, "no group 'ema'"),
        ({"model": WEIGHTS, "ema": _prefixed(WEIGHTS, 99)}, ExportOptions(weights="ema"), StateMismatch, "module.lm_head"),
        ({"model": WEIGHTS, "ema": _prefixed(WEIGHTS, 1)}, ExportOptions(weights="ema"), StateMismatch, "embed_tokens"),
        (
            {"model": WEIGHTS, "ema": {**GROUPS["ema"], "lm_head.weight": np.zeros((3, 3), np.float32)}},
            ExportOptions(weights="ema"),
            StateMismatch,
            "'lm_head.weight' has shape",
        ),
        (
            {"model": {"codes": np.zeros(4, np.int8)}, "ema": {"codes": np.zeros(4, np.float32)}},
            ExportOptions(weights="ema"),
            StateMismatch,
            "'codes' cannot be converted from F32 to I8",
        ),
        ({"model": WEIGHTS}, ExportOptions(layout="torchtitan"), InvalidRequest, "layout does not apply"),
    ],
)
def test_what_is_refused(
    tmp_path: Path,
    groups: Mapping[str, Mapping[str, np.ndarray]],
    options: ExportOptions,
    error: type[CheckpointError],
    says: str,
) -> None:
    """By name, before anything is written."""
    source = made(tmp_path / "step", groups, assets=ASSETS).source
    with pytest.raises(error, match=says):
        hugging_face.plan(source, options)


def test_numbers_that_are_no_weights_keep_their_type(tmp_path: Path) -> None:
    """`--dtype` is for floats: counts, masks and codes of a quantised model stay as they are."""
    rest = {
        "count": np.array(3, np.int64),
        "mask": np.array([True, False]),
        "codes": np.arange(6, dtype=np.int8),
    }
    source = made(tmp_path / "step", {"model": {**WEIGHTS, **rest}}, assets={}).source
    found = _loaded(write(source, hugging_face.plan(source, ExportOptions(dtype="F32")), tmp_path / "out"))
    assert _equal(found, {**{name: array.astype(np.float32) for name, array in WEIGHTS.items()}, **rest})
    scaled = {"fp8": np.arange(6).astype(ml_dtypes.float8_e4m3fn)}
    plan = hugging_face.plan(made(tmp_path / "other", {"model": scaled}, assets={}).source, ExportOptions(dtype="F32"))
    assert plan.files[0].tensors[0].mapped.spec.dtype == "F8_E4M3"


def test_the_dtype_of_a_config(tmp_path: Path) -> None:
    """Set wherever the file names one, also for parts; where it names none, or is no JSON, it is copied and that is said."""
    inner = {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16", "layers": 2}, "名": "模型", "list": [{}]}
    changed = hugging_face.with_dtype(json.dumps(inner).encode(), "float32")
    assert changed is not None
    expected = {"dtype": "float32", "text_config": {"torch_dtype": "float32", "layers": 2}, "名": "模型", "list": [{}]}
    assert json.loads(changed) == expected and list(json.loads(changed)) == list(expected)
    for config in (b"{", b"[]", b'{"a": 1}', b"\xff", b'{"torch_dtype": null}'):
        assert hugging_face.with_dtype(config, "float32") is None
    source = made(tmp_path / "step", {"model": WEIGHTS}, assets={"config.json": b"{}"}).source
    plan = hugging_face.plan(source, ExportOptions(dtype="F32"))
    assert "config.json was copied as it is: it names no dtype" in plan.notes
    assert (write(source, plan, tmp_path / "out") / "config.json").read_bytes() == b"{}"


def test_an_adapters_configuration_stays_behind(tmp_path: Path) -> None:
    """Beside a model, transformers would take the directory for an adapter's."""
    source = made(tmp_path / "step", {"model": WEIGHTS}, assets={**ASSETS, "adapter_config.json": b"{}"}).source
    names = {file.name for file in hugging_face.plan(source, ExportOptions()).files}
    assert "adapter_config.json" not in names and names > ASSETS.keys()


def test_what_only_the_trainer_ties_is_there_under_each_name(tmp_path: Path) -> None:
    """transformers would start a tensor at random that config.json does not tie."""
    tied = {name: array for name, array in WEIGHTS.items() if name != "lm_head.weight"}
    aliases = {"lm_head.weight": "model.embed_tokens.weight", "model.norm2.weight": "model.norm.weight"}
    source = made(tmp_path / "step", {"model": tied}, assets=ASSETS, aliases={"model": aliases}).source
    plan = hugging_face.plan(source, ExportOptions())
    found = _loaded(write(source, plan, tmp_path / "out"))
    assert _equal(found, {**tied, **{alias: tied[name] for alias, name in aliases.items()}})
    assert any("under both names" in note and "model.norm2.weight = model.norm.weight" in note for note in plan.notes)


def test_averages_that_are_tied_among_themselves(tmp_path: Path) -> None:
    """They are the average of each name, not the model's own weight."""
    averages = {name: array for name, array in GROUPS["ema"].items() if name != "lm_head.weight"}
    aliases = {"ema": {"lm_head.weight": "model.embed_tokens.weight"}}
    source = made(tmp_path / "step", {"model": WEIGHTS, "ema": averages}, assets=ASSETS, aliases=aliases).source
    plan = hugging_face.plan(source, ExportOptions(weights="ema", dtype="F32"))
    found = _loaded(write(source, plan, tmp_path / "out"))
    assert _equal(found, {**averages, "lm_head.weight": averages["model.embed_tokens.weight"]})
    assert not any("taken from the model" in note for note in plan.notes)


@pytest.mark.parametrize("program", [None, "* -> *"])
def test_what_modules_keep_beside_weights_is_left_out_and_said(tmp_path: Path, program: str | None) -> None:
    """A tensor of get_extra_state is no weight: transformers knows no such name."""
    groups = {"model": {**WEIGHTS, "ranks/00000/fp8._extra_state/amax": np.ones(3, np.float32)}}
    ranks = {0: {"model": {"fp8._extra_state": '{"amax": {"$tensor": "ranks/00000/fp8._extra_state/amax"}}'}}}
    source = made(tmp_path / "step", groups, assets=ASSETS, ranks=ranks).source
    text = f"name = 'p'\nfrom = 'a'\nto = 'b'\nstatements = '{program}'"
    compiled = None if program is None else ordered_tensors.compiled(source, text)
    plan = hugging_face.plan(source, ExportOptions(program=compiled))
    assert _equal(_loaded(write(source, plan, tmp_path / "out")), WEIGHTS)
    left = [one.what for one in plan.left_out]
    assert left == ["values model/fp8._extra_state", "model/ranks/00000/fp8._extra_state/amax"]

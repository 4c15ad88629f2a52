"""Merges from the recipe to the commit: what is computed of which sources, what is told, what is refused, what goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import state_json
from holdfast_formats.errors import (
    AlreadyCommitted,
    CheckpointError,
    CorruptExtent,
    InvalidRequest,
    NoSuchCheckpoint,
    NoSuchResource,
    StateMismatch,
)
from holdfast_formats.rest.jobs import MergeJob
from holdfast_service.control.jobs.runner import Interrupted
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying import target_bytes
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.storage import PosixTier
from holdfast_service.wings.convert import importing
from holdfast_service.wings.convert.import_jobs import Importer
from holdfast_service.wings.convert.sources import open_source
from holdfast_service.wings.merge import merged_tensor
from holdfast_service.wings.merge.merge_jobs import Merger
from tests.daemon.copies_world import CopiesWorld, copies_world
from tests.job_requests import a_merge, an_import
from tests.wings.convert.transfers import Transfers

Arrays = dict[str, NDArray[Any]]
BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(23)
BASE: Arrays = {
    "model.embed_tokens.weight": RNG.standard_normal((50, 16), np.float32).astype(BF16),
    "model.layers.0.mlp.up_proj.weight": RNG.standard_normal((24, 16), np.float32).astype(BF16),
    "model.layers.1.mlp.up_proj.weight": RNG.standard_normal((24, 16), np.float32).astype(BF16),
    "model.norm.weight": RNG.standard_normal(16, np.float32).astype(BF16),
    "model.positions": np.arange(9),
}
CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16"}


def near(base: Arrays, seed: int) -> Arrays:
    chance = np.random.default_rng(seed)

    def moved(array: NDArray[Any]) -> NDArray[Any]:
        if array.dtype.kind == "i":
            return array
        return (array.astype(np.float32) + 0.1 * chance.standard_normal(array.shape, np.float32)).astype(array.dtype)

    return {name: moved(array) for name, array in base.items()}


MODELS = {"base": BASE, "one": near(BASE, 1), "two": near(BASE, 2)}
LINEAR = "merge_method: linear\nmodels: [{model: one@1}, {model: two@1}]\nparameters: {weight: 1}\n"
DARE = """
merge_method: dare_ties
base_model: base@1
models: [{model: one@1}, {model: two@1}]
parameters: {weight: 0.7, density: 0.5}
dtype: float32
"""


def stored(directory: Path, arrays: Arrays, config: dict[str, Any] | None = None) -> Path:
    directory.mkdir(parents=True)
    save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (directory / "tokenizer.json").write_text(json.dumps({"of": directory.name}))
    return directory


class MergeWorld:
    """A root with runs `base`, `one` and `two`, of a step each, and directories to merge from."""

    def __init__(self, world: CopiesWorld, place: Path) -> None:
        self.root, self.tier, self.control, self.place = world.root, world.tier, world.control, place
        self.importer = Importer(world.control)
        self.merger = Merger(world.control)
        for name, arrays in MODELS.items():
            self.add(name, arrays)

    def add(self, name: str, arrays: Arrays) -> None:
        directory = stored(self.place / name, arrays)
        self.importer.bring(PosixTier(directory), an_import(name, 1), Quiet())

    def merge(self, recipe: str, step: int = 1, progress: Any = None, again: bool = False, **wanted: Any) -> dict[str, Any]:
        told = a_merge("merged", step, recipe, **wanted)
        return self.merger.merge(told, lambda path: open_source(self.place / path), progress or Quiet(), again)

    def path(self, step: int = 1) -> Path:
        return self.root / naming.checkpoint_path("merged", step)

    def arrays(self, step: int = 1) -> Arrays:
        found: Arrays = {}
        for file in sorted(self.path(step).glob("model*.safetensors")):
            found |= load_file(file)
        return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[MergeWorld]:
    with copies_world(tmp_path, replicas=()) as made:
        yield MergeWorld(made, tmp_path / "place")


def mean(*models: Arrays) -> Arrays:
    made: Arrays = {}
    for name, first in models[0].items():
        if first.dtype.kind == "i":
            made[name] = first
        else:
            total = np.sum([model[name].astype(np.float64) for model in models], axis=0)
            made[name] = (total.astype(np.float32) / np.float32(len(models))).astype(first.dtype)
    return made


def check_equal(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def test_checkpoints_of_the_root(world: MergeWorld) -> None:
    """An ordinary checkpoint comes out, verified, with the small files of the first model and a full account."""
    done = world.merge(LINEAR)
    made = verify(world.tier, naming.checkpoint_path("merged", 1))
    assert made.groups == ("model",) and done["tensors"] == len(BASE)
    check_equal(world.arrays(), mean(MODELS["one"], MODELS["two"]))
    assert json.loads((world.path() / "tokenizer.json").read_text()) == {"of": "one"}
    source = state_json.source_of((world.path() / naming.STATE).read_bytes())
    assert source == done["source"] and source is not None
    assert (source["kind"], source["method"], source["dialect"], source["seed"]) == ("merge", "linear", "mergekit", 0)
    assert source["recipe"] == LINEAR and source["files"] == []
    commits = [digest((world.root / naming.checkpoint_path(run, 1) / naming.COMMIT).read_bytes()) for run in ("one", "two")]
    assert [(model["run"], model["step"], model["commit"]) for model in source["models"]] == [
        ("one", 1, commits[0]),
        ("two", 1, commits[1]),
    ]
    assert not world.tier.list(f"merged/{naming.STAGING}")


def test_directories_are_read_as_imports_read_them(world: MergeWorld) -> None:
    """The same bits as with checkpoints; state.json has their files, and what of them was not used."""
    world.merge(DARE)
    text = DARE.replace("base@1", "./base").replace("two@1", "two/")
    done = world.merge(text, 2)
    check_equal(world.arrays(2), world.arrays())
    assert json.loads((world.path(2) / "config.json").read_text())["torch_dtype"] == "float32"
    files = {one["file"]: one for one in done["source"]["files"]}
    assert files["0/model.safetensors"]["xxh3"] == digest((world.place / "base" / "model.safetensors").read_bytes())
    assert files["2/tokenizer.json"]["use"] == "unused" and "./base" in files["2/tokenizer.json"]["reason"]
    assert [model["model"] for model in done["source"]["models"]] == ["./base", "one@1", "two/"]


@pytest.mark.parametrize("how", ["is gone", "changed"])
def test_a_source_that_does_not_stay(world: MergeWorld, how: str) -> None:
    """The error names the model and its file; nothing of the result is there."""
    for name in ("left", "right"):
        (world.place / name).mkdir()
        save_file({"model.norm.weight": np.ones(64, np.float32)}, world.place / name / "model.safetensors")

    class Meddling:
        def report(self, done_bytes: int, total_bytes: int) -> None:
            file = world.place / "right" / "model.safetensors"
            if how == "changed":
                os.utime(file, ns=(1, 1))
            else:
                file.unlink(missing_ok=True)

    recipe = "{merge_method: linear, models: [{model: ./left}, {model: ./right}], parameters: {weight: 1}}"
    with pytest.raises(StateMismatch, match=rf"^\./right/model\.safetensors {how} while the source was being read"):
        world.merge(recipe, progress=Meddling())
    assert not world.path().exists()


def test_a_seed_is_a_result(world: MergeWorld) -> None:
    for step, seed in enumerate(("", "seed: 0", "seed: 1"), 1):
        world.merge(f"{DARE}{seed}\n", step)
    check_equal(world.arrays(2), world.arrays(1))
    name = "model.embed_tokens.weight"
    assert world.arrays(3)[name].tobytes() != world.arrays(1)[name].tobytes()


def test_bands_and_chunks_change_no_bit(world: MergeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor that is longer than both."""
    wide = {"w": RNG.standard_normal((600, 500), np.float32)}
    for name, arrays in (("base", wide), ("one", near(wide, 1)), ("two", near(wide, 2))):
        stored(world.place / "wide" / name, arrays)
    recipe = DARE.replace("base@1", "wide/base").replace("one@1", "wide/one").replace("two@1", "wide/two")
    world.merge(recipe)
    merge = merged_tensor.MergedTensor
    monkeypatch.setattr(merged_tensor, "MergedTensor", partial(merge, chunk=1003))
    monkeypatch.setattr(target_bytes, "band_bytes", lambda mapped, tensors: 2**18)
    world.merge(recipe, 2)
    check_equal(world.arrays(2), world.arrays())


def test_a_dry_run_writes_nothing(world: MergeWorld) -> None:
    before = sorted(world.root.rglob("*"))
    dry = world.merge(DARE, dry_run=True)
    assert dry["dry_run"] and sorted(world.root.rglob("*")) == before
    done = world.merge(DARE)
    assert dry["groups"] == done["groups"] and dry["source"]["notes"] == done["source"]["notes"]
    with pytest.raises(AlreadyCommitted):
        world.merge(DARE)


class Interrupting:
    """Ends the service at the n-th report of progress."""

    def __init__(self, at: int) -> None:
        self.left = at

    def report(self, done_bytes: int, total_bytes: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise Interrupted


def test_an_interrupted_merge_goes_on(world: MergeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any point, to the same bits; other terms begin anew."""
    pack = importing.pack
    monkeypatch.setattr(importing, "pack", lambda specs: pack(specs, file_bytes_max=1000))
    world.merge(DARE)
    for point in range(8):
        step = 2 + point
        with pytest.raises(Interrupted):
            world.merge(DARE, step, Interrupting(point))
        staged = world.tier.list(f"merged/{naming.STAGING}")
        assert staged or point == 0
        world.merge(DARE, step, again=True)
        check_equal(world.arrays(step), world.arrays())
        assert not world.tier.list(f"merged/{naming.STAGING}")
        assert world.merge(DARE, step, again=True)["step"] == step  # it was committed before
        with pytest.raises(AlreadyCommitted):
            world.merge(DARE + "seed: 4\n", step, again=True)


def lora(rank: int, **config: Any) -> tuple[Arrays, dict[str, Any]]:
    chance = np.random.default_rng(8)
    prefix = "base_model.model.model.layers.1.mlp.up_proj"
    arrays = {
        f"{prefix}.lora_A.weight": chance.standard_normal((rank, 16), np.float32),
        f"{prefix}.lora_B.weight": chance.standard_normal((24, rank), np.float32),
    }
    return arrays, {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none", **config}


def put_adapter(world: MergeWorld, name: str, arrays: Arrays, config: dict[str, Any]) -> None:
    (world.place / name).mkdir()
    save_file(arrays, world.place / name / "adapter_model.safetensors", metadata={"format": "pt"})
    (world.place / name / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("rslora", "scale"), [(False, 6 / 4), (True, 6 / 2)])
def test_an_adapter_into_its_base(world: MergeWorld, rslora: bool, scale: float) -> None:
    """W + s·B·A, rounded once, of a directory and of a checkpoint; all else is the base, to the last bit."""
    arrays, config = lora(4, use_rslora=rslora)
    put_adapter(world, "tuned", arrays, config)
    world.importer.bring(PosixTier(world.place / "tuned"), an_import("tuned", 7), Quiet())
    wanted, name = dict(BASE), "model.layers.1.mlp.up_proj.weight"
    low, high = (array.astype(np.float64) for array in arrays.values())
    wanted[name] = (BASE[name].astype(np.float64) + scale * high @ low).astype(np.float32).astype(BF16)
    for step, adapter in enumerate(("./tuned", "tuned@7"), 1):
        done = world.merge(f"{{merge_method: passthrough, models: [{{model: base@1+{adapter}}}]}}", step)
        check_equal(world.arrays(step), wanted)
        assert [model["model"] for model in done["source"]["models"]] == ["base@1", adapter]
    assert not (world.path() / "adapter_config.json").exists()
    world.merge("{merge_method: linear, models: [{model: base@1+tuned@7}], parameters: {weight: 1}}", 3)
    check_equal(world.arrays(3), wanted)


def test_adapters_with_each_other(world: MergeWorld) -> None:
    """Their mean is an adapter, with its configuration; those that count differently are refused."""
    arrays, config = lora(4)
    for number, alpha in enumerate((6, 6, 8)):
        put_adapter(
            world, f"tuned{number}", {name: array + number for name, array in arrays.items()}, config | {"lora_alpha": alpha}
        )
        world.importer.bring(PosixTier(world.place / f"tuned{number}"), an_import("tuned", number), Quiet())
    recipe = "{merge_method: linear, group: adapter, models: [{model: tuned@0}, {model: tuned@1}], parameters: {weight: 1}}"
    world.merge(recipe)
    made = verify(world.tier, naming.checkpoint_path("merged", 1))
    found = load_file(
        world.path() / next(one.name for one in made.files if "adapter" in one.name and "json" not in one.name)
    )
    wanted = mean(arrays, {name: array + 1 for name, array in arrays.items()})
    assert sorted(array.tobytes() for array in found.values()) == sorted(array.tobytes() for array in wanted.values())
    assert "adapter" in made.groups and json.loads((world.path() / "adapter_config.json").read_text()) == config
    with pytest.raises(StateMismatch, match="lora_alpha"):
        world.merge(recipe.replace("tuned@1", "tuned@2"), 2)


def test_other_groups(world: MergeWorld) -> None:
    """`group` is what is read, `out_group` what it becomes: a model again, perhaps, that Hugging Face loads."""
    recipe = "{merge_method: linear, GROUPS, models: [{model: one@1}, {model: two@1}], parameters: {weight: 1}}"
    world.merge(recipe.replace("GROUPS", "out_group: ema"))
    assert "ema" in verify(world.tier, naming.checkpoint_path("merged", 1)).groups
    done = world.merge("{merge_method: passthrough, group: ema, out_group: model, models: [{model: merged@1}]}", 2)
    assert verify(world.tier, naming.checkpoint_path("merged", 2)).groups == ("model",)
    check_equal(world.arrays(2), mean(MODELS["one"], MODELS["two"]))
    assert (done["source"]["group"], done["source"]["out_group"]) == ("ema", "model")
    with pytest.raises(NoSuchResource, match="no group 'master'"):
        world.merge(recipe.replace("GROUPS", "group: master"), 3)
    with pytest.raises(InvalidRequest, match="out_group"):
        world.merge(recipe.replace("GROUPS", "out_group: ../up"), 3)


OTHER: dict[str, Any] = {
    "dora": {"use_dora": True},
    "biases of lora_B": {"lora_bias": "all"},
    "an initialization": {"init_lora_weights": "pissa"},
    "another kind": {"peft_type": "IA3"},
    "no alpha": {"lora_alpha": None},
    "saved modules": {"modules_to_save": ["lm_head"]},
    "invocation tokens": {"alora_invocation_tokens": [27, 71226]},
    "a key of a newer PEFT": {"future_option": False},
    "another rank": {"r": 8},
    "parameters without tensors": {"target_parameters": ["experts.up"]},
    "tokens without tensors": {"trainable_token_indices": [3]},
}


@pytest.mark.parametrize("what", OTHER)
def test_other_adapters_are_refused(world: MergeWorld, what: str) -> None:
    arrays, config = lora(4, **OTHER[what])
    put_adapter(world, "tuned", arrays, config)
    with pytest.raises(StateMismatch, match="tuned"):
        world.merge("{merge_method: passthrough, models: [{model: base@1+./tuned}]}")


def test_adapters_of_other_models_are_refused(world: MergeWorld) -> None:
    """By the name of what is missing, or does not fit; the nearest name is said."""
    arrays, config = lora(4)
    recipe = "{merge_method: passthrough, models: [{model: base@1+./tuned}]}"
    for number, (old, new, hint) in enumerate((("up_proj", "up_prj", "up_proj"), (".lora_A", ".lora_X", ""))):
        put_adapter(world, f"tuned{number}", {name.replace(old, new): array for name, array in arrays.items()}, config)
        with pytest.raises(StateMismatch) as refused:
            world.merge(recipe.replace("tuned", f"tuned{number}"))
        assert refused.value.members["tensor"] and hint in refused.value.hint
    put_adapter(world, "wide", {name: np.ones((5, 5), np.float32) for name in arrays}, config | {"r": 5})
    with pytest.raises(StateMismatch, match="cannot be added"):
        world.merge(recipe.replace("tuned", "wide"))
    with pytest.raises(NoSuchResource, match="no adapter"):
        world.merge(recipe.replace("./tuned", "one@1"))


def changed(**others: NDArray[Any]) -> Arrays:
    return {**MODELS["two"], **others}


UNLIKE: dict[str, tuple[Arrays, str, str]] = {
    "a name": (
        {name.replace("1.mlp.up_proj", "1.mlp.up_prj"): array for name, array in BASE.items()},
        "model.layers.1.mlp.up_proj.weight",
        "up_prj",
    ),
    "another tensor": ({**BASE, "model.norm.bias": BASE["model.norm.weight"]}, "model.norm.bias", ""),
    "a shape": (changed(**{"model.norm.weight": np.ones(8, BF16)}), "model.norm.weight", "equal sizes"),
    "a dtype": (changed(**{"model.norm.weight": np.ones(16, np.float32)}), "model.norm.weight", "`dtype`"),
    "a number type": (changed(**{"model.positions": np.arange(9, dtype=np.int32)}), "model.positions", ""),
    "whole numbers": (changed(**{"model.positions": np.arange(9)[::-1].copy()}), "model.positions", "equal"),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_models_that_do_not_match_are_refused(world: MergeWorld, what: str) -> None:
    """By the tensor's name, and with the nearest; nothing stays behind."""
    arrays, name, hint = UNLIKE[what]
    world.add("other", arrays)
    with pytest.raises(StateMismatch) as refused:
        world.merge(LINEAR.replace("two", "other"))
    assert refused.value.members["tensor"] == name and hint in refused.value.hint
    assert not world.tier.list(f"merged/{naming.STAGING}")


def test_dtypes_may_differ_where_one_is_said(world: MergeWorld) -> None:
    world.add("other", changed(**{"model.norm.weight": np.ones(16, np.float32)}))
    world.merge(LINEAR.replace("two", "other") + "dtype: float16\n")
    found = world.arrays()
    assert found["model.norm.weight"].dtype == np.float16 and found["model.positions"].dtype == np.int64


def test_quantised_weights_are_refused(world: MergeWorld) -> None:
    arrays = {"w": np.ones((4, 4), ml_dtypes.float8_e4m3fn)}
    for name in ("eight", "another"):
        world.add(name, arrays)
    with pytest.raises(StateMismatch, match="F8_E4M3"):
        world.merge("{merge_method: linear, models: [{model: eight@1}, {model: another@1}], parameters: {weight: 1}}")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("one@2", NoSuchCheckpoint),
        ("one@latest", InvalidRequest),
        ("nowhere", InvalidRequest),
        ("nobody@1", NoSuchCheckpoint),
    ],
)
def test_models_that_are_not_there(world: MergeWorld, name: str, error: type[CheckpointError]) -> None:
    with pytest.raises(error):
        world.merge(LINEAR.replace("two@1", name))


def test_damage_is_not_merged(world: MergeWorld) -> None:
    """A flipped bit of a source ends the merge by its file, and nothing is left."""
    path = world.root / naming.checkpoint_path("two", 1) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptExtent):
        world.merge(LINEAR)
    assert not world.tier.list(f"merged/{naming.STAGING}")


def test_jobs_are_refused_before_they_wait(world: MergeWorld, tmp_path: Path) -> None:
    """What must fail fails at once; models in directories are below the export root only."""
    transfers = Transfers(world.control, None, world.place)  # type: ignore[arg-type]

    def request(recipe: Any, **arguments: Any) -> MergeJob:
        return MergeJob(run="merged", step=1, arguments={"recipe": recipe, **arguments})

    transfers.check(request(LINEAR.replace("two@1", "./two")))
    for wrong, error in (
        ({"recipe": LINEAR.replace("two@1", "two@9")}, NoSuchCheckpoint),
        ({"recipe": LINEAR.replace("linear", "no")}, InvalidRequest),
        ({"recipe": LINEAR.replace("two@1", "../place/two")}, InvalidRequest),
        ({"recipe": LINEAR, "program": "x"}, InvalidRequest),
        ({"recipe": LINEAR, "dry_run": "yes"}, InvalidRequest),
        ({"recipe": 5}, InvalidRequest),
    ):
        with pytest.raises(error):
            transfers.check(request(**wrong))
    world.merge(LINEAR)
    with pytest.raises(AlreadyCommitted):
        transfers.check(request(LINEAR))

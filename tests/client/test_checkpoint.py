"""A checkpoint as a mapping: whole tensors, boxes, shards of any layout, from a directory and from the service."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import holdfast
from holdfast.checkpoint import Checkpoint
from holdfast.read.directory_root import DirectoryRoot
from holdfast.read.root_directory import listed_steps
from holdfast_formats import naming
from holdfast_formats.disk.manifests import TensorEntry
from holdfast_formats.errors import (
    CorruptExtent,
    CorruptManifest,
    InvalidRequest,
    NoSuchCheckpoint,
    NoSuchResource,
    NotCommitted,
    StateMismatch,
)
from holdfast_formats.layout import parts
from holdfast_formats.programs import choice
from holdfast_formats.region import Box
from tests.checkpoints import Built, build, flip
from tests.client import llama
from tests.local_tensors import fill
from tests.serving import served


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A small Llama in a root of its own, with optimizer state beside it."""
    whole = llama.arrays()
    held = {"model": whole, "optim": {f"{name}/exp_avg": array * 2 for name, array in whole.items()}, "extra": {}}
    path = tmp_path_factory.mktemp("model") / "root" / naming.checkpoint_path("tiny", 5)
    return build(path, held, config=llama.CONFIG_BYTES)


@pytest.fixture(scope="module")
def url(model: Built) -> Iterator[str]:
    with served(root_of(model)) as running:
        yield running.url


def root_of(built: Built) -> Path:
    return built.path.parents[2]


def same(found: dict, expected: dict) -> None:
    """Equal names, dtypes, shapes and bytes."""
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def test_every_way_to_name_one(model: Built, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory, RUN@STEP under a root or at a service, and an address all open the same checkpoint."""
    monkeypatch.chdir(model.path.parent)
    ways = [
        holdfast.open(model.path),
        holdfast.open(str(model.path)),
        holdfast.open(Path(model.path.name)),
        holdfast.open("tiny@5", root=root_of(model)),
        holdfast.open("tiny", url=url),
        holdfast.open(f"{url}/v1/runs/tiny/checkpoints/5"),
        holdfast.open(f"{url}/v1/runs/tiny/checkpoints/latest/"),
    ]
    for checkpoint in ways:
        with checkpoint:
            assert (checkpoint.run, checkpoint.step, checkpoint.groups) == ("tiny", 5, ("model", "optim", "extra"))
            assert checkpoint.config == llama.CONFIG
            array = model.arrays["model"]["lm_head.weight"]
            assert checkpoint.tensors["model"]["lm_head.weight"] == ("F32", array.shape, array.nbytes)
            np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), array)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9/v1/runs/tiny", "http://127.0.0.1:9/v1/runs/tiny/checkpoints/five", "ftp://x/y"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    """An address that is no checkpoint's is refused, and the hint shows one that is."""
    with pytest.raises(InvalidRequest, match="not a checkpoint's URL") as refused:
        holdfast.open(address)
    assert "/checkpoints/STEP" in refused.value.hint


def test_what_is_not_there_is_said(model: Built, url: str, tmp_path: Path) -> None:
    """An unknown step, and a directory that is no checkpoint, are errors by name."""
    with pytest.raises(NoSuchCheckpoint):
        holdfast.open("tiny@6", root=root_of(model))
    with pytest.raises(NoSuchCheckpoint):
        holdfast.open(f"{url}/v1/runs/tiny/checkpoints/6")
    with pytest.raises(NotCommitted):
        holdfast.open(tmp_path)


def test_reading_boxes(shared: Built) -> None:
    """A box is the slice of its tensor, an alias the tensor it stands for; every dtype comes as itself."""
    with holdfast.open(shared.path) as checkpoint:
        for group, named in shared.arrays.items():
            same({name: checkpoint.read(name, group=group) for name in named}, dict(named))
        box = checkpoint.read("lm_head.weight", Box((3, 5), (11, 7)))
        assert box.tobytes() == shared.arrays["model"]["embed.weight"][3:14, 5:12].tobytes()
        assert checkpoint.read("layers.0.q.weight", ([0, 0], [2, 0])).shape == (2, 0)
        with pytest.raises(StateMismatch, match=r"'embed\.weight'.*outside"):
            checkpoint.read("embed.weight", Box((60, 0), (5, 24)))
        with pytest.raises(StateMismatch, match="nope"):
            checkpoint.read("nope")


def test_torch_tensors_share_the_memory_they_were_read_into(shared: Built) -> None:
    """With framework="torch" dtypes are torch's, bf16 and fp8 too, and writable; another framework is refused."""
    with holdfast.open(shared.path) as checkpoint:
        for name, dtype in (("embed.weight", torch.bfloat16), ("layers.0.fp8", torch.float8_e4m3fn)):
            tensor, array = checkpoint.read(name, framework="torch"), shared.arrays["model"][name]
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, array.shape)
            assert tensor.view(torch.uint8).numpy().tobytes() == array.tobytes()
        assert checkpoint.read("layers.0.none", framework="torch").shape == (0, 5)
        assert checkpoint.read("layers.0.scale", framework="torch").shape == ()
        with pytest.raises(InvalidRequest, match="numpy, torch"):
            checkpoint.read("embed.weight", framework="jax")  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_are_what_slicing_gives(model: Built, tp: int) -> None:
    """Each rank's tensors equal the whole ones cut with numpy, unfused and fused, of the model and of its optimizer."""
    whole = dict(model.arrays["model"])
    if tp == 4:
        whole = {name: array for name, array in whole.items() if "embed" not in name and "head" not in name}
    with holdfast.open(model.path) as checkpoint:
        for rank in range(tp):
            found = checkpoint.shard(f"tp={tp},vocab=1", rank)
            same({name: found[name] for name in whole}, llama.cut(whole, tp, rank))
            found = checkpoint.shard(f"tp={tp},vocab=1,qkv=ranks,gate_up=ranks", rank)
            expected = llama.fused(llama.cut(whole, tp, rank))
            same({name: found[name] for name in expected}, expected)
            kept = checkpoint.shard(f"tp={tp},vocab=1", rank, group="optim")
            same(
                {name: kept[f"{name}/exp_avg"] for name in whole},
                {name: array * 2 for name, array in llama.cut(whole, tp, rank).items()},
            )


def test_padding_is_zero(model: Built, url: str) -> None:
    """Rows that pad the vocabulary are zero, by either way of reading, and the others are the vocabulary's."""
    expected = llama.cut(dict(model.arrays["model"]), 4, 3, padding=32)["lm_head.weight"]
    assert not expected[-2:].any() and expected[:-2].all()
    for checkpoint in (holdfast.open(model.path), holdfast.open("tiny", url=url)):
        with checkpoint:
            same({"x": checkpoint.shard("tp=4,vocab=8", 3)["lm_head.weight"]}, {"x": expected})
            tensor = checkpoint.shard("tp=4,vocab=8", 3, framework="torch")["lm_head.weight"]
            assert torch.equal(tensor, torch.from_numpy(expected))


def test_stages_and_what_cannot_be(model: Built) -> None:
    """A stage has its layers and nothing else; ranks and layouts that are not there are refused with the numbers."""
    with holdfast.open(model.path) as checkpoint:
        second = checkpoint.shard("pp=2", 1)
        assert set(second) == set(llama.shapes(range(1, 2), first=False))
        with pytest.raises(StateMismatch, match=r"proj.*4 heads.*tp=3"):
            checkpoint.shard("tp=3", 0)
        with pytest.raises(InvalidRequest, match="rank 2"):
            checkpoint.shard("tp=2", 2)
        with pytest.raises(NoSuchResource, match="nope"):
            checkpoint.shard("tp=2", 0, group="nope")
        with pytest.raises(InvalidRequest, match="tpp"):
            checkpoint.shard("tpp=2", 0)


def test_what_is_noted(model: Built) -> None:
    """An uneven split is in the notes, and only the extents that hold the shard are planned to be read."""
    with holdfast.open(model.path) as checkpoint:
        held = checkpoint.held("tp=4", 0)
        assert any("lm_head.weight" in note and "4" in note for note in held.notes), held.notes
        plan = checkpoint.plan(held.tensors)
        assert plan.needed == sum(4 * local.volume for local in held.tensors)
        assert plan.needed <= plan.read < sum(array.nbytes for array in model.arrays["model"].values())


def test_rules_of_ones_own(model: Built, tmp_path: Path) -> None:
    """A TOML file extends the tables; one that is none, or not there, is refused by its path."""
    own = tmp_path / "team.toml"
    own.write_text('name = "team"\nextends = "llama"\n[[tensors]]\nname = "lm_head.weight"\nstage = "last"\n')
    with holdfast.open(model.path) as checkpoint:
        for rules in (
            own,
            str(own),
            {"name": "team", "extends": "llama", "tensors": [{"name": "lm_head.weight", "stage": "last"}]},
        ):
            assert checkpoint.shard("tp=2", 1, rules=rules)["lm_head.weight"].shape == (llama.ROWS, llama.HIDDEN)
        with pytest.raises(InvalidRequest, match=r"missing\.toml"):
            checkpoint.held("tp=2", 0, rules=tmp_path / "missing.toml")
        own.write_text("name = ")
        with pytest.raises(InvalidRequest, match="TOML"):
            checkpoint.held("tp=2", 0, rules=own)


def test_a_config_that_is_none(tmp_path: Path) -> None:
    """A config.json that is no JSON object is said to be none, rather than taken for none."""
    for number, config in enumerate((b"[1]", b"{")):
        built = build(tmp_path / str(number), {"model": llama.arrays()}, config=config)
        with holdfast.open(built.path) as checkpoint, pytest.raises(CorruptManifest, match=r"config\.json"):
            checkpoint.shard("tp=2", 0)


def test_damage_is_not_handed_over(tmp_path: Path) -> None:
    """A shard that touches a damaged extent is an error naming the tensor; one that does not is read."""
    built = build(tmp_path / "c", {"model": llama.arrays()}, config=llama.CONFIG_BYTES)
    entry = built.manifest.tensors["model"]["model.layers.1.self_attn.q_proj.weight"]
    flip(built.path / entry.file, entry.start + entry.nbytes - 1)
    with holdfast.open(built.path) as checkpoint:
        assert checkpoint.shard("pp=2", 0)
        with pytest.raises(CorruptExtent, match="q_proj"):
            checkpoint.shard("pp=2", 1)


def test_elements_smaller_than_a_byte(tmp_path: Path) -> None:
    """Sub-byte tensors are cut at whole bytes, for torch where it has the dtype, and are refused elsewhere."""
    raw = np.arange(24, dtype=np.uint8).reshape(4, 6)
    built = build(tmp_path / "c", {"model": {"w": raw}})
    with holdfast.open(built.path) as checkpoint:
        entry = built.manifest.tensors["model"]["w"]
        packed = TensorEntry("F4", (4, 12), entry.file, entry.start, entry.extents)
        checkpoint.manifest.tensors["model"]["w"] = packed
        box = Box((1, 4), (2, 6))
        if hasattr(torch, "float4_e2m1fn_x2"):
            tensor = checkpoint.read("w", box, framework="torch")
            assert tensor.view(torch.uint8).numpy().tobytes() == raw[1:3, 2:5].tobytes()
        with pytest.raises(InvalidRequest, match="F4"):
            checkpoint.read("w", box)
        with pytest.raises(StateMismatch, match="inside a byte"):
            checkpoint.read("w", Box((1, 3), (2, 6)), framework="torch")


def test_parts_of_many_tensors(shared: Built) -> None:
    """Local tensors made by hand, a flat range and a fused one, are filled from the parts they name."""
    q = shared.arrays["optim"]["layers.0.q.weight/exp_avg"]
    flat = parts.flat(parts.full("layers.0.q.weight/exp_avg", "F64", q.shape), 17, 500)
    box = Box((0, 0), (4, 40))
    doubled = parts.fuse("twice", "F64", [("layers.0.q.weight/exp_avg", box)] * 2, 0, 2)
    empty = parts.LocalTensor("empty", "BF16", (0, 3), ())
    with holdfast.open(shared.path) as checkpoint:
        found = checkpoint.fill([flat, doubled, empty], "optim")
    same(
        found,
        {
            flat.name: q.reshape(-1)[17:500],
            "twice": np.concatenate([q[:2], q[:2], q[2:4], q[2:4]]),
            "empty": np.zeros((0, 3), ml_dtypes.bfloat16),
        },
    )


def test_it_needs_no_torch(model: Built) -> None:
    """Opening, reading and cutting import no torch; asking for torch tensors without it is refused with a hint."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import holdfast\n"
        f"with holdfast.open({str(model.path)!r}) as c:\n"
        "    assert c.shard('tp=2', 1)['model.norm.weight'].shape == (16,)\n"
        "    try: c.read('model.norm.weight', framework='torch')\n"
        "    except holdfast.CheckpointError as e: assert '[torch]' in e.hint; print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_the_public_names() -> None:
    """What `holdfast` exports, and that every name can be had."""
    assert sorted(holdfast.__all__) == [
        "Api",
        "Checkpoint",
        "CheckpointError",
        "CheckpointReader",
        "Checkpointer",
        "Ema",
        "Fragment",
        "LeftOutWarning",
        "Named",
        "OptimizerShards",
        "ParallelLayout",
        "RestoreReport",
        "SaveResult",
        "SaveTicket",
        "SaveWarning",
        "__version__",
        "open",
        "register_class",
    ]
    assert all(getattr(holdfast, name) is not None for name in holdfast.__all__)
    assert holdfast.Checkpoint is Checkpoint


@pytest.mark.parametrize("name", ["hf-megatron", "hf-paddle", "hf-titan-legacy"])
def test_a_shard_through_a_program(model: Built, url: str, name: str, tmp_path: Path) -> None:
    """Ranks get what their parts say, turned ones too, from a directory and from a service; only what they need is read."""
    program = tmp_path / "mine.toml"
    program.write_text(choice.written(name))
    for where in (holdfast.open(model.path), holdfast.open("tiny@5", url=url)):
        with where as checkpoint:
            for group in ("model", "optim"):
                held = checkpoint.held("tp=2,pp=2", 3, group, program=name)
                expected = {local.name: fill(local, model.arrays[group]) for local in held.tensors}
                same(checkpoint.shard("tp=2,pp=2", 3, group, program=name), expected)
                found = checkpoint.shard("tp=2,pp=2", 3, group, framework="torch", program=program)
                same({of: tensor.numpy() for of, tensor in found.items()}, expected)
            plan = checkpoint.plan(held.tensors, "optim")
            assert plan.needed == sum(array.nbytes for array in expected.values())
            assert plan.read < sum(entry.nbytes for entry in model.manifest.tensors["optim"].values())


def test_a_damaged_byte_reaches_nobody_through_a_program(model: Built, tmp_path: Path) -> None:
    """A flipped bit under a turned tensor is an error with file and tensor."""
    whole = {"model": model.arrays["model"], "extra": {}}
    built = build(tmp_path / "copy", whole, config=llama.CONFIG_BYTES)
    entry = built.manifest.tensors["model"]["model.layers.1.mlp.up_proj.weight"]
    flip(built.path / entry.file, entry.start + 40)
    with holdfast.open(built.path) as checkpoint:
        assert checkpoint.shard("pp=2", 0, program="hf-paddle")
        with pytest.raises(CorruptExtent, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            checkpoint.shard("pp=2", 1, program="hf-paddle")


def test_repr_says_run_step_and_groups(model: Built) -> None:
    """A checkpoint in a debugger says which one it is, also after it was closed."""
    with holdfast.open("tiny@5", root=root_of(model)) as checkpoint:
        assert repr(checkpoint) == f"<Checkpoint tiny@5: {', '.join(checkpoint.groups)}>"
        assert "model" in repr(checkpoint)
    assert repr(checkpoint).startswith("<Checkpoint tiny@5: ")


def test_steps_are_listed_from_the_directory_and_over_http(model: Built, url: str) -> None:
    """Both give the same; a run without checkpoints has no steps, and without directory and address the root is named."""
    for place in ((DirectoryRoot(root_of(model)), None), (None, url)):
        assert listed_steps(*place, "tiny") == [5]
        assert listed_steps(*place, "none-yet") == []
    with pytest.raises(InvalidRequest, match="the daemon's root /far is not visible here"):
        listed_steps(None, None, "tiny", "/far")


def test_dir_shows_the_public_names_before_their_modules_are_imported() -> None:
    """In a fresh interpreter `dir()` lists what `__all__` has, nothing else, and imports no torch for it."""
    code = (
        "import sys, holdfast; assert 'torch' not in sys.modules; print(*dir(holdfast)); assert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert shown == sorted(holdfast.__all__) and "Checkpointer" in shown

"""`holdfast restore --layout`: files of ranks, and what they would hold, on bare directories and from the service."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from holdfast.commands import shard
from holdfast_formats import naming
from tests.checkpoints import build, flip
from tests.client import llama
from tests.kit import commands
from tests.serving import served

FUSED = "tp=2,pp=2,vocab=8,qkv=ranks,gate_up=ranks"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_service: None) -> Path:
    """A root with a small Llama."""
    whole = llama.arrays()
    held = {"model": whole, "optim": {f"{name}/exp_avg": array * 2 for name, array in whole.items()}, "extra": {}}
    build(tmp_path / "root" / naming.checkpoint_path("tiny", 5), held, run="tiny", config=llama.CONFIG_BYTES)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "root"


call = partial(commands.call, "restore", "tiny@5")
call_json = partial(commands.call_json, "restore", "tiny@5")


def expected(rank: int) -> llama.Arrays:
    """What a rank of `FUSED` holds: two stages of two tensor-parallel ranks, the vocabulary padded to 32."""
    stage = rank // 2
    names = llama.shapes(range(stage, stage + 1), first=stage == 0, last=stage == 1)
    return llama.fused(llama.cut({name: llama.arrays()[name] for name in names}, 2, rank % 2, padding=16))


def same(path: Path, arrays: llama.Arrays) -> None:
    found = load_file(path)
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_one_rank(place: list[str], tmp_path: Path) -> None:
    """A rank's file holds what numpy cuts for it; the output names file, size and layout."""
    out = tmp_path / "rank3.safetensors"
    result = call("--layout", FUSED, "--rank", 3, "--out", out, *place)
    assert result.exit_code == 0, result.output
    assert f"{out}: " in result.stdout and "rank 3 of" in result.stdout
    same(out, expected(3))


def test_another_group_as_json(place: list[str], tmp_path: Path) -> None:
    """--group takes the optimizer's tensors; --json says what was written and what was read for it."""
    out = tmp_path / "optim.safetensors"
    said = call_json("--layout", "tp=2,vocab=1", "--rank", 1, "--out", out, "--group", "optim", *place)
    same(out, {f"{name}/exp_avg": array * 2 for name, array in llama.cut(llama.arrays(), 2, 1).items()})
    assert said["files"] == [{"rank": 1, "out": str(out), "bytes": out.stat().st_size}]
    assert said["ranks"][0]["bytes"] == said["ranks"][0]["bytes_needed"] <= said["ranks"][0]["bytes_read"]


def test_the_file_is_the_one_that_the_service_sends(root: Path, tmp_path: Path) -> None:
    """What is written here, and what the shard's address answers, are the same bytes, header and all."""
    with served(root) as running:
        for rank in range(4):
            address = f"{running.url}/v1/runs/tiny/checkpoints/5/shard"
            answer = httpx.get(address, params={"layout": FUSED, "rank": rank}, trust_env=False)
            assert answer.status_code == 200
            out = tmp_path / f"{rank}.safetensors"
            assert call("--layout", FUSED, "--rank", rank, "--out", out, "--root", root).exit_code == 0
            assert out.read_bytes() == answer.content


def test_every_rank(place: list[str], tmp_path: Path) -> None:
    """--all-ranks writes a file for each rank into a directory that is made."""
    directory = tmp_path / "deep" / "shards"
    result = call("--layout", FUSED, "--all-ranks", directory, *place)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in directory.iterdir()) == [f"rank-{rank:05d}.safetensors" for rank in range(4)]
    for rank in range(4):
        same(directory / f"rank-{rank:05d}.safetensors", expected(rank))


def test_where_everything_goes(place: list[str], tmp_path: Path) -> None:
    """With a layout and no rank, a table of all ranks is printed and nothing is written."""
    result = call("--layout", FUSED, *place)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[1] == ["RANK", "TP", "PP", "ETP", "TENSORS", "BYTES", "TO", "READ"]
    assert [line[:5] for line in lines[2:]] == [
        [str(rank), str(rank % 2), str(rank // 2), str(rank % 2), str(len(expected(rank)))] for rank in range(4)
    ]
    said = call_json("--layout", FUSED, *place)
    assert [rank["bytes"] for rank in said["ranks"]] == [
        sum(array.nbytes for array in expected(rank).values()) for rank in range(4)
    ]
    assert (said["world"], said["ranks"][3]["coordinates"]["pp"]) == (4, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_of_large_worlds_ranks_are_counted_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number of tensors nothing is planned: what each rank holds is said, what it would read is not."""
    monkeypatch.setattr(shard, "PLANNED_TENSORS_MAX", 10)
    counted = call_json("--layout", FUSED, "--root", root)["ranks"]
    monkeypatch.undo()
    planned = call_json("--layout", FUSED, "--root", root)["ranks"]
    assert [rank["bytes"] for rank in counted] == [rank["bytes"] for rank in planned]
    assert {"bytes_read", "tensors"}.isdisjoint(counted[0])
    monkeypatch.setattr(shard, "PLANNED_TENSORS_MAX", 10)
    assert "–" in call("--layout", FUSED, "--root", root).stdout
    assert call_json("--layout", FUSED, "--rank", 1, "--root", root)["ranks"] == [planned[1]]


@pytest.mark.parametrize("flag", ["--plan", "--dry-run"])
def test_what_one_rank_would_hold(root: Path, tmp_path: Path, flag: str) -> None:
    """--plan lists the rank's tensors, what they are made of and the notes, and writes nothing, --out or not."""
    out = tmp_path / "not-written"
    result = call("--layout", "tp=4,qkv=ranks", "--rank", 0, "--out", out, flag, "--root", root)
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if "layers.0.self_attn.qkv_proj" in line)
    assert "[12, 16]" in line and "q_proj.weight, model.layers.0.self_attn.k_proj.weight" in line
    assert "note: " in result.stderr and "lm_head.weight" in result.stderr
    assert not out.exists()
    told = call_json("--layout", "tp=4,qkv=ranks", "--rank", 0, flag, "--root", root)["ranks"][0]
    assert told["notes"] and {"name", "dtype", "shape", "padding"} == set(told["tensors"][0])


def test_rules_of_ones_own(root: Path, tmp_path: Path) -> None:
    """--rules extends the tables by a TOML file."""
    own = tmp_path / "team.toml"
    own.write_text('name = "team"\nextends = "llama"\n[[tensors]]\nname = "lm_head.weight"\nstage = "last"\n')
    said = call_json("--layout", "tp=2", "--rank", 0, "--rules", own, "--root", root)["ranks"][0]
    assert next(t for t in said["tensors"] if t["name"] == "lm_head.weight")["shape"] == [llama.ROWS, llama.HIDDEN]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--layout", "tp=3", "--rank", "0", "--out", "x"], 2, "4 heads"),
        (["--layout", "tpp=3"], 2, "tpp"),
        (["--layout", "tp=2", "--rank", "2"], 2, "rank 2"),
        (["--layout", "tp=2", "--out", "x"], 2, "--rank N"),
        (["--layout", "tp=2", "--rank", "1", "--all-ranks", "x"], 2, "--all-ranks"),
        (["--layout", "tp=2", "--group", "model", "--group", "optim"], 2, "one group"),
        (["--layout", "tp=2", "--group", "nope"], 3, "nope"),
        (["--rank", "1", "--out", "x"], 2, "--layout"),
        ([], 2, "--out DIR"),
    ],
)
def test_what_is_wrong_is_said(root: Path, tmp_path: Path, arguments: list[str], code: int, text: str) -> None:
    """Wrong layouts and options end with 2 or 3, say what to do, and write nothing."""
    result = call(*arguments, "--root", root)
    assert result.exit_code == code
    assert text in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_damage_leaves_no_file_of_any_rank(root: Path, tmp_path: Path) -> None:
    """When a later rank's bytes are damaged, the earlier ranks' files are removed too; exit status 5."""
    from holdfast.read.reader import CheckpointReader
    from holdfast.read.sources import DirectorySource

    path = root / naming.checkpoint_path("tiny", 5)
    with CheckpointReader.open(DirectorySource(path)) as reader:
        entry = reader.entry("model", "model.norm.weight")
    flip(path / entry.file, entry.start)
    result = call("--layout", "pp=2", "--all-ranks", tmp_path / "out", "--root", root)
    assert result.exit_code == 5
    assert "model.norm.weight" in result.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_through_a_program(place: list[str], tmp_path: Path) -> None:
    """Files of what a shipped program makes, or one of a file; the metadata and the plan have its name."""
    fused = llama.fused(llama.cut(llama.arrays(), 2, 1))
    done = call("--layout", "tp=2", "--program", "hf-megatron", "--rank", 1, "--out", "one.safetensors", *place)
    assert done.exit_code == 0, done.output
    found = load_file("one.safetensors")
    at = "decoder.layers.1.mlp.linear_fc1.weight"
    np.testing.assert_array_equal(found[at], fused["model.layers.1.mlp.gate_up_proj.weight"])
    with safe_open("one.safetensors", "np") as opened:
        assert opened.metadata()["program"] == "hf-megatron"
    document = call_json("--layout", "tp=2", "--program", "hf-megatron", "--rank", 1, *place)
    assert document["program"] == "hf-megatron"
    assert {made["name"] for made in document["ranks"][0]["tensors"]} == set(found)
    Path("mine.toml").write_text(
        "name = 'mine'\nfrom = 'a'\nto = 'b'\nstatements = '''\nmodel.norm.weight -> norm\n* -> *\n'''\n"
    )
    printed = call("--layout", "tp=2", "--program", "mine.toml", "--rank", 0, *place)
    assert "tp=2, group model, through mine" in printed.output and "norm" in printed.output
    refused = call("--layout", "tp=2,qkv=groups", "--program", "hf-megatron", *place)
    assert refused.exit_code != 0 and "qkv=groups cannot be combined with a program" in refused.output
    assert "need a layout" in call("--program", "hf-megatron", *place).output

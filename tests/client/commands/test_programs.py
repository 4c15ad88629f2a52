"""`holdfast programs`: what an author sees of a program, alone and on a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from holdfast.cli import app
from holdfast_formats.programs import packaged
from tests.checkpoints import build_root

PROGRAM = """
name = "mine"
from = "hf"
to = "ours"
statements = '''
gate, up -> fc1{}
embed -> tok, slice=[0:{{rows}}]
unused -> _
'''
[sizes]
rows = "vocab_size"
"""


def _run(*words: str) -> Result:
    return CliRunner().invoke(app, ["programs", *words])


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(PROGRAM.format(""))
    return str(path)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    made = tmp_path / "model"
    made.mkdir()
    tensors = {name: np.zeros((4, 2), "<f4") for name in ("gate", "up", "embed", "unused")}
    save_file(tensors, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps({"vocab_size": 3}))
    return str(made)


def test_all_programs_are_listed_and_shown() -> None:
    """`list` names each with its layouts and models, `show` prints its file."""
    listed = _run("list", "--json")
    assert listed.exit_code == 0
    assert {one["name"] for one in json.loads(listed.stdout)} == set(packaged())
    assert all(one["inverse"] for one in json.loads(listed.stdout))
    shown = _run("show", "hf-titan")
    assert shown.exit_code == 0 and "rotary=interleaved" in shown.stdout
    assert _run("show", "nothing").exit_code == 2


def test_a_program_alone_is_checked(program: str, tmp_path: Path) -> None:
    """Without a checkpoint, its statements are read, and the reason why there is no inverse is told."""
    found = _run("check", program, "--json")
    assert found.exit_code == 0
    assert "what is dropped is lost" in json.loads(found.stdout)["no_inverse"]
    broken = tmp_path / "broken.toml"
    broken.write_text(PROGRAM.format(", axes=1"))
    failed = _run("check", str(broken))
    assert failed.exit_code == 2
    assert "line 1, column 18" in failed.stderr and "axes" in failed.stderr
    assert _run("check", str(tmp_path / "none.toml")).exit_code == 2


def test_what_becomes_of_what_is_printed(program: str, directory: str) -> None:
    """With a directory, every tensor that would be made, and what is lost; nothing is made."""
    found = _run("check", program, "--checkpoint", directory, "--json")
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert {(one["name"], one["how"], tuple(one["shape"])) for one in document["tensors"]} == {
        ("fc1", "joined", (8, 2)),
        ("tok", "rearranged", (3, 2)),
    }
    assert {(one["name"], one["elements"]) for one in document["lost"]} == {("embed", 2), ("unused", 8)}
    shown = _run("check", program, "--checkpoint", directory)
    assert "lost: 8 elements of unused" in shown.stdout and "no inverse" in shown.stdout
    other = Path(directory).parent / "other.json"
    other.write_text('{"vocab_size": 9}')
    refused = _run("check", program, "--checkpoint", directory, "--config", str(other))
    assert refused.exit_code == 2 and "not 0:9" in refused.stderr


def test_a_committed_checkpoint_is_checked(tmp_path: Path, program: str) -> None:
    """RUN@STEP works as everywhere; what the program does not name is refused by name."""
    build_root(tmp_path / "root", {"tiny": (5,)})
    path = tmp_path / "any.toml"
    path.write_text('name = "any"\nfrom = "a"\nto = "b"\nstatements = "* -> *"\n')
    found = _run("check", str(path), "--checkpoint", "tiny@5", "--root", str(tmp_path / "root"), "--json")
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["no_inverse"] is None and document["tensors"]
    assert {one["how"] for one in document["tensors"]} <= {"kept", "rearranged"}
    refused = _run("check", program, "--checkpoint", "tiny@5", "--root", str(tmp_path / "root"))
    assert refused.exit_code == 2 and "no tensor has the name 'gate'" in refused.stderr

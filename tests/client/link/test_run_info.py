"""What a launch says of itself: what is found out, what is given, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import Checkpointer
from holdfast.link import run_info
from holdfast.link.run_info import RunInfo
from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.staging import wire
from holdfast_formats.staging.messages import INFO_BYTES_MAX


def test_what_is_found_out_needs_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Command without secrets, directory, user, host and versions; nothing of the environment."""
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py", "--hf-token", "mine", "--lr", "1"])
    monkeypatch.setenv("SOMETHING_ELSE", "of-the-environment")
    told = RunInfo({}).document(60)
    assert told["command"] == ["python", "train.py", "--hf-token", "***", "--lr", "1"]
    assert "launcher" not in told and told["directory"] == str(Path.cwd())
    assert told["torch"] == torch.__version__ and told["user"] and told["host"] and told["python"]
    assert "of-the-environment" not in json.dumps(told)


_TOLD = """import json, sys
from holdfast.link.run_info import RunInfo
json.dump(RunInfo({"git": None}).document(), sys.stdout)
"""
_LAUNCHER = """import subprocess, sys
print(subprocess.run([sys.executable, "-u", *sys.argv[2:]], capture_output=True, text=True, check=True).stdout)
"""


def test_the_launcher_is_the_parent_that_names_the_script(tmp_path: Path) -> None:
    """As torchrun does. A parent whose command line does not end in the script and its arguments is no launcher."""
    (tmp_path / "train.py").write_text(_TOLD)
    (tmp_path / "run.py").write_text(_LAUNCHER)
    launched = [sys.executable, "run.py", "--ranks=1", "train.py", "--lr", "1", "--api-key", "mine"]
    told = json.loads(subprocess.run(launched, cwd=tmp_path, capture_output=True, check=True).stdout)
    assert told["launcher"] == [*launched[:-1], "***"] and told["directory"] == str(tmp_path)
    assert told["command"] == [sys.executable, "-u", "train.py", "--lr", "1", "--api-key", "***"]
    alone = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, check=True)
    assert "launcher" not in json.loads(alone.stdout)


def test_what_is_given_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """None leaves out what would be found out."""
    told = RunInfo(run_info.check({"git": None, "command": None, "host": "elsewhere", "config": {"lr": 1}})).document(60)
    assert "git" not in told and "command" not in told and told["host"] == "elsewhere" and told["config"] == {"lr": 1}


def test_a_long_command_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["python", *(["word"] * 5000)])
    command = RunInfo({"git": None}).document()["command"]
    assert len(command) < 2000 and command[-1].endswith("more")


def test_half_characters_do_not_keep_a_trainer_from_its_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's name that is no UTF-8, in the command or a config: it is shown with `?`, and can be sent."""
    monkeypatch.setattr("sys.orig_argv", ["python", "caf\udce9.py"])
    told = RunInfo(run_info.check({"git": None, "x": {"\ud800": "\udfff"}})).document()
    assert told["command"] == ["python", "caf?.py"] and told["x"] == {"?": "?"}
    wire.encode_frame(
        wire.Hello(id=1, run="r", rank=0, world=1, launch="l", process="p", session="s", keep_last=None, info=told)
    )


def test_tags_that_the_run_could_not_have_are_refused() -> None:
    """Before the training begins, by their text."""
    assert run_info.check({"tags": ("sweep:lr", "big")})["tags"] == ["sweep:lr", "big"]
    for tags, text in (("big", "list of strings"), ([1], "list of strings"), (["two words"], "'two words'")):
        with pytest.raises(InvalidRequest, match=text):
            run_info.check({"tags": tags})
    with pytest.raises(LimitExceeded, match="33 tags"):
        run_info.check({"tags": [str(number) for number in range(33)]})


class Broken(dict[str, int]):
    """As a lazy config whose values are found out when they are read."""

    def __iter__(self) -> Any:
        raise RuntimeError("unresolved")

    def items(self) -> Any:
        raise RuntimeError("unresolved")


class NoPath:
    def __fspath__(self) -> str:
        raise RuntimeError("unresolved")


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({"model": torch.nn.Linear(1, 1)}, "Linear"),
        ({"x": float("nan")}, "JSON"),
        ({1: "x"}, "keys"),
        ("text", "mapping"),
        ({"owner": 5}, "owner"),
        ({"x": {1, 2}}, "set"),
        ({"x": [{"y": 2**63}]}, "64 bits"),
        ({"x": NoPath()}, "unresolved"),
        ({"x": Broken(a=1)}, "unresolved"),
    ],
)
def test_what_is_no_json_is_refused(info: Any, why: str) -> None:
    """By the checkpointer's constructor, before anything is contacted."""
    with pytest.raises(InvalidRequest, match=why):
        Checkpointer("r", {"x": torch.ones(1)}, info=info)


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(LimitExceeded, match="65536"):
        run_info.check({"x": "y" * INFO_BYTES_MAX})
    told = RunInfo(run_info.check({"x": "y" * (INFO_BYTES_MAX - 60)})).document(60)
    assert len(json.dumps(told)) <= INFO_BYTES_MAX and told["x"]


def test_paths_dtypes_and_secrets() -> None:
    """Values whose text says it all are taken, and what stands under the name of a secret is not."""
    said = run_info.check({"config": {"data": Path("/data"), "dtype": torch.bfloat16, "api_key": "mine"}})
    assert said == {"config": {"data": "/data", "dtype": "torch.bfloat16", "api_key": "***"}}

"""What the shell offers: asked as a shell asks, through the command's own completion."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.terminal import completion
from tests.checkpoints import build_root
from tests.serving import served


def offered(words: str) -> list[str]:
    """What bash is offered for a command line that ends in the word to complete."""
    count = len(words.split(" ")) - 1
    environment = {"_HOLDFAST_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    return CliRunner().invoke(app, [], env=environment, prog_name="holdfast").output.split()


def test_runs_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs first, steps behind the @, the newest before the others; a command's own names too."""
    build_root(tmp_path, {"tiny": (5, 10), "titan": (1,), "other": (2,)})
    monkeypatch.setenv("HOLDFAST_URL", "")
    assert offered(f"holdfast show --root {tmp_path} ti") == ["tiny", "titan"]
    assert offered(f"holdfast verify --root {tmp_path} tiny@") == ["tiny@latest", "tiny@10", "tiny@5"]
    assert offered(f"holdfast diff --root {tmp_path} tiny@5 tiny@1") == ["tiny@10"]
    assert "doctor" in offered("holdfast doc")
    with served(tmp_path) as service:
        monkeypatch.setenv("HOLDFAST_URL", service.url)
        assert offered("holdfast show tiny@") == ["tiny@latest", "tiny@latest-healthy", "tiny@best", "tiny@10", "tiny@5"]
        for command in ("ls", "keep", "rename", "archive", "acknowledge", "note", "events"):
            assert offered(f"holdfast {command} tin") == ["tiny"]
        assert offered("holdfast undelete ti") == []
        httpx.delete(f"{service.url}/v1/runs/titan").raise_for_status()
        assert offered("holdfast undelete ti") == ["titan"]


def test_what_cannot_be_asked_offers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No service, no run, no directory: TAB stays silent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_URL", "http://127.0.0.1:9")
    assert offered("holdfast show ti") == []
    assert offered("holdfast show tiny@") == []
    assert offered(f"holdfast show --root {tmp_path} nope@") == []


def test_a_service_that_hangs_holds_up_no_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection and says nothing, as a daemon that was stopped does."""
    monkeypatch.setattr(completion, "WAIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HOLDFAST_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert offered("holdfast show ti") == offered("holdfast show tiny@") == offered("holdfast undelete ") == []


_TAB = """
import os, sys
from holdfast.cli import app
for command in "ls show verify diff restore export keep rename note archive acknowledge events undelete".split():
    os.environ.update(_HOLDFAST_COMPLETE="complete_bash", COMP_WORDS=f"holdfast {command} ti", COMP_CWORD="2")
    try:
        app([], prog_name="holdfast")
    except SystemExit:
        print(command)
print([name for name in ("httpx", "numpy", "rich", "torch", "holdfast_formats.body") if name in sys.modules])
"""


def test_tab_imports_no_library_that_takes_long(tmp_path: Path) -> None:
    """The shell waits for it at every TAB. Commands import what they work with when they run."""
    build_root(tmp_path, {"tiny": (5,)})
    with served(tmp_path) as service:
        environment = {**os.environ, "HOLDFAST_URL": service.url}
        done = subprocess.run([sys.executable, "-c", _TAB], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split().count("tiny") == 12
    assert done.stdout.splitlines()[-1] == "[]"

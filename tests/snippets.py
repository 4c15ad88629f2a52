"""Runs the snippets of a page in order, as a reader would who copies each of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from click import Command, Group
from typer.main import get_command

from holdfast.cli import app
from tests import forked_programs
from tests.daemons import free_port

TOP = Path(__file__).parent.parent
TIMEOUT_S = 300
BESIDE = "In a second terminal"  # the title of a command that goes on beside the others
# pip is not run: what it would install is checked to be there.
PIP = """#!/bin/sh
exec {python} -m tests.snippets "$@"
"""


class Snippet(NamedTuple):
    language: str
    title: str
    text: str


def snippets(page: Path) -> list[Snippet]:
    found = re.findall(r"^```(\w+)([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [
        Snippet(language, title[1] if (title := re.search(r'title="([^"]*)"', options)) else "", text)
        for language, options, text in found
    ]


def script(parts: list[Snippet]) -> str:
    """One shell script of all snippets: files are written, daemons go on in the background, Python runs."""
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"]
    for language, title, text in parts:
        if language == "python":
            lines.append(f"cat > {shlex.quote(title or 'snippet.py')} <<'SNIPPET'\n{text}SNIPPET")
            lines += [] if title else ["python snippet.py"]
        elif language == "sh" and title == BESIDE:
            lines += [f"{{\n{text}}} &", "until holdfast whoami > /dev/null 2>&1; do kill -0 $!; sleep 0.1; done"]
        elif language == "sh":
            lines.append(text)
    return "\n".join(lines)


def session(parts: list[Snippet], before: dict[int, str]) -> list[Snippet]:
    """All Python snippets of a page as one script, as in a notebook, each after the lines that a test puts before it."""
    cells = [text for language, _, text in parts if language == "python"]
    text = "\n".join(before.get(number, "") + "\n" + cell for number, cell in enumerate(cells))
    return [Snippet("python", "page.py", text), Snippet("sh", "", "python page.py\n")]


def run(page: Path, before: Sequence[Snippet] = (), parts: Sequence[Snippet] | None = None, **variables: str) -> str:
    """What the snippets printed, after those of a test. The page's daemon has its own port, socket and home."""
    with tempfile.TemporaryDirectory(prefix="page", dir="/tmp") as place:
        programs, started = Path(place) / "bin", forked_programs.programs()
        programs.mkdir()
        (programs / "pip").write_text(PIP.format(python=sys.executable))
        (programs / "pip").chmod(0o755)
        started.write(programs / "python", "rank")
        started.write(programs / "torchrun", "rank", str(Path(sys.executable).with_name("torchrun")))
        started.write(programs / "holdfast", "daemon", str(Path(sys.executable).with_name("holdfast")))
        port = free_port()
        about = os.environ | {
            "HOME": place,
            "HOLDFAST_LISTEN": f"127.0.0.1:{port}",
            "HOLDFAST_URL": f"http://127.0.0.1:{port}",
            "OMP_NUM_THREADS": "1",
            "PYTHON_EXEC": str(programs / "python"),  # what torchrun starts
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(TOP), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "XDG_CONFIG_HOME": place,
            "XDG_RUNTIME_DIR": place,
        }
        for name in ("DISPLAY", "HOLDFAST_TOKEN", "RANK", "WAYLAND_DISPLAY", "WORLD_SIZE"):
            about.pop(name, None)
        (Path(place) / "work").mkdir()
        with tempfile.TemporaryFile() as output:
            shell = subprocess.Popen(
                ["bash", "-c", _at_home(script([*before, *(snippets(page) if parts is None else parts)]), port)],
                cwd=Path(place) / "work",
                env=about | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                status = shell.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                status = -1
            finally:
                _end(place)
            output.seek(0)
            said = output.read().decode(errors="replace")
    assert status == 0, f"{page.name} ended with {status}:\n{said[-8000:]}"
    return said


def _at_home(text: str, port: int) -> str:
    """The page's places, in the directory and at the port of the test."""
    for there, here in (("/fast/checkpoints", "holdfast-data"), ("/mnt/", "mnt/"), ("127.0.0.1:8420", f"127.0.0.1:{port}")):
        text = text.replace(there, here)
    return text


def _end(place: str) -> None:
    """Ends what the page has left, ranks and holders too, which have sessions of their own: all know the page's place."""
    mark = f"XDG_RUNTIME_DIR={place}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell snippet, without redirections; variables stay as they are written."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in {"<", ">", ">>", "<<"}:
                continue
            if re.fullmatch(r"[();|&]+", word) or word in {"do", "then", "{", "}"}:
                yield words
                words = []
            else:
                words.append(word)


def validate(snippet: Snippet, curl: str = "curl") -> None:
    """Parse a snippet in its language; of a shell's also every `holdfast` command, with its options, and every curl,
    which `curl` is an alias of."""
    if snippet.language == "python":
        compile(snippet.text, "snippet", "exec")
    elif snippet.language == "json":
        json.loads(snippet.text)
    elif snippet.language == "toml":
        msgspec.toml.decode(snippet.text)
    elif snippet.language == "yaml":
        msgspec.yaml.decode(snippet.text)
    elif snippet.language in {"sh", "bash"}:
        subprocess.run(["bash", "-n", "-c", snippet.text], check=True)
        for words in commands(snippet.text):
            command = [word for word in words if not re.match(r"[A-Z_]+=", word)]
            if command[:1] == ["holdfast"] and command[1:2] not in ([], ["serve"], ["--install-completion"]):
                _parse(get_command(app), command[1:])
            if command[:1] == ["curl"]:
                assert "-f" in [*command, *curl.split()] and "$HOLDFAST_TOKEN" in " ".join([*command, curl]), words


def _parse(command: Command, words: list[str]) -> None:
    """Raise click's error for an unknown command or option, or a wrong or missing value; nothing is run."""
    context = command.make_context("holdfast", words)
    while isinstance(command, Group):
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        name, found, rest = command.resolve_command(context, rest)
        assert name is not None and found is not None
        command = found
        context = command.make_context(name, rest, parent=context)


def check_installed(words: list[str]) -> int:
    """In the place of pip: that the extras which a page installs are those of the project, and are installed here."""
    extras = set(msgspec.toml.decode((TOP / "pyproject.toml").read_bytes())["project"]["optional-dependencies"])
    command, *packages = words
    named = re.fullmatch(r"\.\[([\w,]+)\]", packages[0])
    assert command == "install" and named is not None and set(named[1].split(",")) <= extras, words
    for package in packages[1:]:
        __import__(package)
    return 0


if __name__ == "__main__":
    sys.exit(check_installed(sys.argv[1:]))

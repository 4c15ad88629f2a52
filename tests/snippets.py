"""Runs the snippets of a page in order, as a reader would who copies each of them."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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


def run(page: Path, before: Sequence[Snippet] = (), **variables: str) -> str:
    """What the snippets printed, after those of a test. The page's daemon has a port, a socket and a home of its own."""
    with tempfile.TemporaryDirectory(prefix="page", dir="/tmp") as place:
        programs = Path(place) / "bin"
        programs.mkdir()
        (programs / "pip").write_text(PIP.format(python=sys.executable))
        (programs / "pip").chmod(0o755)
        port = free_port()
        about = os.environ | {
            "HOME": place,
            "HOLDFAST_LISTEN": f"127.0.0.1:{port}",
            "HOLDFAST_URL": f"http://127.0.0.1:{port}",
            "OMP_NUM_THREADS": "1",
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
                ["bash", "-c", script([*before, *snippets(page)])],
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


def _end(place: str) -> None:
    """Ends what the page has left, ranks and holders too, which have sessions of their own: all know the page's place."""
    mark = f"XDG_RUNTIME_DIR={place}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def check_installed(words: list[str]) -> int:
    """In the place of pip: that the extras which a page installs are those of the project, and are installed here."""
    import msgspec

    extras = set(msgspec.toml.decode((TOP / "pyproject.toml").read_bytes())["project"]["optional-dependencies"])
    command, *packages = words
    named = re.fullmatch(r"\.\[([\w,]+)\]", packages[0])
    assert command == "install" and named is not None and set(named[1].split(",")) <= extras, words
    for package in packages[1:]:
        __import__(package)
    return 0


if __name__ == "__main__":
    sys.exit(check_installed(sys.argv[1:]))

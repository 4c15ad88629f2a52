"""Interpreters of other versions than the tests' own, and environments with the project installed from its wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).parents[2]
INSTALL_S = 900.0
EXTRAS = "service,postgres,otel"
LOCK, LOCKED = TOP / "deploy" / "lock" / "service.txt", "locked"


def interpreter(version: str) -> str | None:
    """A Python of this version: on the path, of pyenv, or one that uv brings; None where there is none."""
    named = shutil.which(f"python{version}")
    if named is not None and _runs(named, version):
        return named
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for found in sorted(pyenv.glob(f"{version}*/bin/python")):
        if _runs(str(found), version):
            return str(found)
    brought = subprocess.run(
        [*uv(), "python", "find", "--managed-python", version], capture_output=True, text=True, check=False
    )
    return brought.stdout.strip() if brought.returncode == 0 else None


def _runs(python: str, version: str) -> bool:
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return said.stdout.strip() == version


def uv() -> list[str]:
    """The command of uv, which the development extra installs."""
    return [sys.executable, "-m", "uv"]


def installed(python: str, directory: Path, resolution: str) -> Path:
    """The interpreter of a new environment with the project installed from its wheel, and packages of this resolution, or
    those of the lock that the daemon's image has (LOCKED).
    """
    run([*uv(), "venv", "--quiet", "--python", python, str(directory)])
    made = directory / "bin" / "python"
    install = [*uv(), "pip", "install", "--quiet", "--python", str(made)]
    wanted = f"holdfast-checkpoint[{EXTRAS}] @ {TOP.as_uri()}"
    if resolution == LOCKED:
        run([*install, "--require-hashes", "--requirement", str(LOCK)])
        run([*install, "--no-deps", wanted])
        run([*uv(), "pip", "check", "--python", str(made)])
    else:
        run([*install, "--resolution", resolution, wanted])
    return made


def run(command: list[str], within_s: float = INSTALL_S, **environment: str) -> str:
    """What a command prints; fails the test with its output when it does not succeed."""
    known = {**os.environ, **environment}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=within_s, env=known, cwd=TOP, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout

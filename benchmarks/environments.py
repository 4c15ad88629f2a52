"""Each peer in an environment of its own, on top of the project's: its torch is shared, and no other is fetched."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from .peers import Spec

PLOTS = "plots"
PLOTS_REQUIRE = ("matplotlib>=3.8",)
KEPT = ("torch", "numpy")  # the project's own versions, in every environment


class Prepared(NamedTuple):
    """The interpreter that runs a peer, or why there is none."""

    python: Path | None
    reason: str = ""


def prepare(specs: Iterable[Spec], home: Path) -> Mapping[str, Prepared]:
    """By environment name ("" is the project's own); what is there already is kept."""
    needed = {spec.environment: spec.requires for spec in specs}
    found = {"": Prepared(Path(sys.executable))}
    for name, requires in needed.items():
        if name:
            found[name] = environment(home / name, requires)
    return found


def environment(directory: Path, requires: tuple[str, ...]) -> Prepared:
    """A virtual environment that sees the project's packages and has `requires` besides."""
    python, ready = directory / "bin" / "python", directory / "ready"
    wanted = "\n".join((sys.executable, *requires))
    if ready.is_file() and ready.read_text() == wanted:
        return Prepared(python)
    print(f"bench: preparing {directory} for {', '.join(requires)}", flush=True)
    commands = [
        [sys.executable, "-m", "venv", "--without-pip", "--clear", str(directory)],
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"],
    ]
    commands[1] += [*_constraints(directory), *requires]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines()
            return Prepared(None, f"cannot be installed: {next((x for x in reversed(lines) if 'ERROR' in x), lines[-1])}")
        if command[2] == "venv":
            _see_the_project(directory)
    ready.write_text(wanted)
    return Prepared(python)


def _see_the_project(directory: Path) -> None:
    """`addsitedir` and not a plain path, so that editable installs there are seen as well."""
    inside = next((directory / "lib").glob("python3*")) / "site-packages"
    line = f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
    (inside / "project.pth").write_text(line)


def _constraints(directory: Path) -> list[str]:
    directory.parent.mkdir(parents=True, exist_ok=True)
    path = directory.with_name(f"{directory.name}-constraints.txt")
    path.write_text("".join(f"{name}=={version(name).partition('+')[0]}\n" for name in KEPT))
    return ["--constraint", str(path)]

"""The lock that the daemon's image installs from: it is whole, and is what pyproject.toml asks for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TOP = Path(__file__).parent.parent
LOCK = TOP / "deploy" / "lock"
PROJECT = msgspec.toml.decode((TOP / "pyproject.toml").read_bytes())
EXTRAS = ("service", "postgres", "otel")  # what the image has
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
WANTED = {
    "service.txt": [
        *PROJECT["project"]["dependencies"],
        *(one for extra in EXTRAS for one in PROJECT["project"]["optional-dependencies"][extra]),
    ],
    "build.txt": PROJECT["build-system"]["requires"],
}


class Locked(NamedTuple):
    """A package of a lock: its version, where it counts, and the hashes of its files."""

    needed: Requirement
    hashes: list[str]


def locked(name: str) -> list[Locked]:
    """What a lock says, read as pip reads it."""
    text = re.sub(r"\s*#.*", "", (LOCK / name).read_text()).replace("\\\n", " ")
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        needed, *hashes = re.split(r"\s+--hash=", line)
        found.append(Locked(Requirement(needed), hashes))
    return found


@pytest.mark.parametrize("name", WANTED)
def test_every_package_is_of_one_version_and_has_hashes(name: str) -> None:
    """So that pip takes this file or none."""
    found = locked(name)
    assert found
    for one in found:
        assert re.fullmatch(r"==[^*,]+", str(one.needed.specifier)), one.needed
        assert one.hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", text) for text in one.hashes), one.needed


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", WANTED)
def test_the_lock_has_what_the_project_asks_for(name: str, python: str) -> None:
    """On every Python: each requirement has one version, which it allows. If not: make lock."""
    where = {**default_environment(), "python_version": python, "python_full_version": f"{python}.1"}
    there: dict[str, list[Requirement]] = {}
    for one in locked(name):
        if one.needed.marker is None or one.needed.marker.evaluate(where):
            there.setdefault(canonicalize_name(one.needed.name), []).append(one.needed)
    assert all(len(versions) == 1 for versions in there.values()), there
    for wanted in map(Requirement, WANTED[name]):
        if wanted.marker is not None and not wanted.marker.evaluate(where):
            continue
        (found,) = there[canonicalize_name(wanted.name)]
        (version,) = found.specifier
        assert wanted.specifier.contains(version.version), f"{found} is not {wanted}: make lock"


def test_the_image_installs_nothing_else() -> None:
    """Packages come with their hashes, the wheel alone comes without, and brings none."""
    daemons = (TOP / "deploy" / "Dockerfile").read_text().partition("# An example of a trainer")[0].replace("\\\n", "")
    commands = [command for line in re.findall(r"^RUN (.*)$", daemons, re.MULTILINE) for command in line.split("&&")]
    installs = [command for command in commands if re.search(r"pip (install|wheel)|\$into ", command)]
    assert len(installs) == 4 and all("--require-hashes" in one or "--no-deps" in one for one in installs), installs
    made = (TOP / "Makefile").read_text()
    assert all(f"--extra {extra}" in made for extra in EXTRAS) and all(f"deploy/lock/{name}" in made for name in WANTED)

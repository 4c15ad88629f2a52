"""The lock that the daemon's image installs from: it is whole, and is what pyproject.toml asks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import botocore
import msgspec
import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.kit.objects import BucketServer, fresh_bucket

TOP = Path(__file__).parent.parent
LOCK = TOP / "deploy" / "lock"
PROJECT = msgspec.toml.decode((TOP / "pyproject.toml").read_bytes())
EXTRAS = ("service", "postgres", "otel", "s3")  # what the image has
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


def test_what_the_image_keeps_of_botocore_is_enough(tmp_path: Path, moto: BucketServer) -> None:
    """For the client of S3 and for keys that STS lends. Of the other services, 25 MB, the image has nothing."""
    (kept,) = re.findall(r'^ARG SERVICES="(.*)"$', (TOP / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    whole, cut = Path(str(botocore.__file__)).parent, tmp_path / "botocore"
    (cut / "data").mkdir(parents=True)
    for path in whole.iterdir():
        if path.name != "data":
            (cut / path.name).symlink_to(path)
    for path in (whole / "data").iterdir():
        if path.is_file() or path.name in kept.split():
            (cut / "data" / path.name).symlink_to(path)
    assert all((whole / "data" / name).is_dir() for name in kept.split())
    (tmp_path / "token").write_text("token")
    found = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/holdfast",
        "AWS_ENDPOINT_URL": moto.endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        found.pop(name, None)
    with fresh_bucket(moto) as bucket:
        program = (
            "import botocore; from holdfast_files.objects import client; from holdfast_files.objects.probe import probe\n"
            f"assert botocore.__file__.startswith({str(tmp_path)!r}), botocore.__file__\n"
            f"print(probe(client.opened({bucket.url!r})).if_absent)"
        )
        ended = subprocess.run([sys.executable, "-c", program], env=found, capture_output=True, text=True, check=False)
    assert ended.stdout == "honoured\n", ended.stderr

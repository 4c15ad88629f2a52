"""The name: the distribution is `holdfast-checkpoint`, because `holdfast` on PyPI is somebody else's package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import holdfast
import holdfast_service
from holdfast.terminal import doctor

TOP = Path(__file__).parent.parent.parent
PLACES = [".ci", "client", "deploy", "docs", "formats", "service", "tests"]
KINDS = {"", ".c", ".css", ".html", ".in", ".js", ".json", ".md", ".py", ".service", ".sh", ".toml", ".txt", ".yaml", ".yml"}
# What would hand the other package to somebody: an extra of it, a command that installs it, a pin, a wheel, a look-up.
OLD_NAME = re.compile(
    r"\bholdfast\["
    r"|\b(?:pip3?|pipx|uv|poetry)\b[^\n]*\b(?:install|uninstall|add|download|wheel)\b[^\n]*[\s'\"]holdfast(?![\w.\[/-])"
    r"|\binstall(?:ed|s)? [`'\"]?holdfast(?![\w./-])"
    r"|\bholdfast ?[=~<>!]="
    r"|/holdfast-(?:\*|\d)"
    r"|(?:version|distribution|metadata|requires)\(\s*['\"]holdfast['\"]"
)


def files() -> Iterator[Path]:
    yield from (path for path in TOP.iterdir() if path.is_file() and path.suffix in KINDS)
    for place in PLACES:
        yield from (path for path in (TOP / place).rglob("*") if path.is_file() and path.suffix in KINDS)


@pytest.mark.parametrize(
    "line",
    [
        "pip install 'holdfast[service]'",
        "pip install -U holdfast",
        "pip install holdfast==0.1.0",
        "uv add holdfast",
        "see the extras of holdfast[otel]",
        "needs `pip install holdfast` and",
        "ls /wheels/holdfast-*.whl",
        'metadata.version("holdfast")',
        "holdfast>=0.1",
    ],
)
def test_the_search_finds_the_old_name(line: str) -> None:
    """Each way to name the other package is one that the next test sees."""
    assert OLD_NAME.search(line) and not OLD_NAME.search(
        line.replace("/holdfast-", "/holdfast_checkpoint-").replace("holdfast", "holdfast-checkpoint")
    )


def test_no_file_names_somebody_elses_package() -> None:
    """Messages, documents, images, units and tests tell nobody to install `holdfast`."""
    looked, wrong = 0, []
    for path in files():
        if path == Path(__file__):
            continue
        looked += 1
        lines = path.read_text(errors="replace").splitlines()
        wrong += [
            f"{path.relative_to(TOP)}:{number}: {line.strip()}"
            for number, line in enumerate(lines, 1)
            if OLD_NAME.search(line)
        ]
    assert looked > 300
    assert wrong == []


def test_the_project_carries_its_own_name() -> None:
    """Name, extras that name the project itself, versions, and the command and import that stay."""
    project = msgspec.toml.decode((TOP / "pyproject.toml").read_bytes())["project"]
    assert project["name"] == "holdfast-checkpoint"
    assert project["scripts"] == {"holdfast": "holdfast.cli:main"}
    assert project["version"] == holdfast.__version__ == holdfast_service.__version__
    itself = [need for needs in project["optional-dependencies"].values() for need in needs if need.startswith("holdfast")]
    assert itself and all(need.startswith("holdfast-checkpoint[") for need in itself)


def test_doctor_tells_the_version_of_what_runs() -> None:
    """The version is the imported code's: a distribution that happens to be called `holdfast` is not asked."""
    found = {finding.name: finding for finding in doctor._software()}
    assert found["holdfast"].what == holdfast.__version__

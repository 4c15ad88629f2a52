"""The command that hints name: it can be typed, and finds Holdfast where this installation came from."""

from __future__ import annotations

import json
import re
import shlex
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast_formats import installing

TOP = Path(__file__).parents[2]


def found(monkeypatch: pytest.MonkeyPatch, origin: object) -> str:
    text = None if origin is None else json.dumps(origin)
    made = SimpleNamespace(read_text=lambda name: text if name == "direct_url.json" else None)
    monkeypatch.setattr(installing, "distribution", lambda name: made)
    return installing.install("service")


def test_it_is_where_this_installation_came_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A clone, in place or copied, whatever its path; a repository; else a clone that is still to be made."""
    clone = tmp_path / "my clone"
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    for editable, words in ((True, ["-e"]), (False, [])):
        said = found(monkeypatch, {"url": clone.as_uri(), "dir_info": {"editable": editable}})
        assert shlex.split(said) == ["pip", "install", *words, f"{clone}[service]"]
    said = found(monkeypatch, {"url": "https://example.org/h.git", "vcs_info": {"vcs": "git"}})
    assert shlex.split(said)[2] == "holdfast-checkpoint[service] @ git+https://example.org/h.git"
    for origin in (None, {"url": (tmp_path / "gone").as_uri(), "dir_info": {}}, {"url": "https://example.org/h.whl"}):
        assert found(monkeypatch, origin).startswith("pip install '.[service]' in a clone")


def test_without_a_distribution_it_is_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installing, "distribution", missing)
    assert installing.install("otel") == "pip install '.[otel]' in a clone of Holdfast's repository"


def test_no_message_names_a_package_that_no_index_has() -> None:
    """Everything that says how to install a part asks this module."""
    for place in ("client", "formats", "service"):
        for path in (TOP / place).rglob("*.py"):
            if path.name != "installing.py":
                assert not re.search(r"pip install[^\n]*holdfast-checkpoint", path.read_text()), path

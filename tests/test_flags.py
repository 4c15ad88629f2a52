"""The help of `holdfast serve`: its groups and options are those of the documents, and its examples can be run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_service.config import parse

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as ended:
        parse(["--help"], {})
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_groups_and_options_are_those_of_the_documents(said: str) -> None:
    """In the same order; `--help` is in no document."""
    page = (DOCS / "operating.md").read_text().partition("## Options of `holdfast serve`")[2].partition("\n## ")[0]
    documented = {
        title: re.findall(r"(?m)^\| `(--[a-z-]+)", table)
        for title, table in re.findall(r"(?m)^([A-Z][a-z]+[a-z ]*)(?:, [^\n]*)?:\n\n((?:\|[^\n]*\n)+)", page)
    }
    helped = {
        title: re.findall(r"(?m)^ +(--[a-z-]+)", lines)
        for title, lines in re.findall(r"(?m)^([A-Z][a-z ]+):\n((?:  [^\n]*\n)+)", said)
    }
    assert helped.pop("Examples") == []
    assert helped == documented


def test_defaults_are_those_of_the_configuration(said: str) -> None:
    for line in (
        "PERCENT .*[default: 96]",
        "DAYS .*[default: 7]",
        "NAME .*[default: the host name]",
        "DIR .*[default: holdfast-data]",
    ):
        assert re.search(line.replace("[", r"\["), said), line
    assert "%%" not in said and "None" not in said and "()" not in said


def test_examples_are_accepted(said: str) -> None:
    found = re.findall(r"(?m)^  holdfast serve (.*)$", said)
    assert len(found) == 3
    for example in found:
        assert parse(shlex.split(example), {}).root == Path("/fast/checkpoints")


@pytest.mark.parametrize("flag", ["--state", "--export-root", "--replica"])
def test_a_refused_value_is_told_in_our_words(flag: str) -> None:
    """pydantic puts words of its own before the text of a refusal."""
    with pytest.raises(InvalidRequest) as caught:
        parse([flag, "s3://bucket/place"], {})
    assert caught.value.detail.startswith(f"{flag}: s3:/") and "is a URL, not a directory" in caught.value.detail

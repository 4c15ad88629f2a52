"""The page on retention: it names every rule and every option, and says the same in both languages."""

from __future__ import annotations

import re

import pytest
from typer.main import get_command

from holdfast.cli import app
from holdfast_formats.rest.retention import RetentionPolicy
from tests.test_documents import TOP, code_blocks, outline, prose

PAGES = [TOP / "docs/retention.md", TOP / "docs/retention.zh-CN.md"]
BESIDE_THE_RULES = {"--dry-run", "--yes", "--url", "--json", "--help"}


def test_the_two_pages_say_the_same() -> None:
    """One outline, the same code, and the same things in backquotes."""
    english, chinese = (page.read_text() for page in PAGES)
    assert outline(english) == outline(chinese)
    assert code_blocks(english) == code_blocks(chinese)
    named = [set(re.findall(r"`([^`\n]+)`", prose(text))) for text in (english, chinese)]
    assert named[0] == named[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_rule_and_option_is_in_the_table(page: object) -> None:
    """A rule that is added to the policy or to `holdfast keep` has a row."""
    text = page.read_text()  # type: ignore[attr-defined]
    rows = re.findall(r"^\| `(--[a-z-]+)[^|]*\| (?:`(\w+)`)? ?\|", text, re.MULTILINE)
    options = {name for p in get_command(app).load("keep").params for name in p.opts if name.startswith("--")}  # type: ignore[attr-defined]
    assert {option for option, _ in rows} == options - BESIDE_THE_RULES
    assert {member for _, member in rows if member} == set(RetentionPolicy.model_fields)

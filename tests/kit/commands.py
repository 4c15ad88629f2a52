"""The command line, called in the process of the test."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from holdfast.cli import app


def call(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def call_json(*arguments: object) -> Any:
    return json.loads(call(*arguments, "--json").stdout)


@pytest.fixture
def no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find no service by themselves, and write tables for a wide terminal."""
    monkeypatch.setenv("HOLDFAST_URL", "")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("holdfast.config.DEFAULT_URL", "http://127.0.0.1:9")  # where nothing listens

"""Attaches every Accelerator that prepares a model to a run of its test: a pytest plugin."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from accelerate import Accelerator

from holdfast.integrations.accelerate import attach
from holdfast_formats.errors import CheckpointError

AT = os.environ["HOLDFAST_OFFICIAL"]


@pytest.fixture(autouse=True)
def holdfast_instead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`prepare()` attaches, as a script does in the line after it."""
    run = f"test-{zlib.crc32(request.node.nodeid.encode()):08x}"
    own = Accelerator.prepare
    attached: list[Accelerator] = []

    def prepare(accelerator: Accelerator, *given: Any, **options: Any) -> Any:
        prepared = own(accelerator, *given, **options)
        if accelerator._models and getattr(accelerator, "holdfast", None) is None:
            attach(accelerator, run, at=AT)
            attached.append(accelerator)
        return prepared

    monkeypatch.setattr(Accelerator, "prepare", prepare)
    yield
    for accelerator in attached:
        with suppress(CheckpointError):  # of a test that has failed
            accelerator.holdfast.close()

"""A world of one rank in the process of the tests, for those that need no other."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import free_port


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """The environment of a rank without others."""
    with pytest.MonkeyPatch.context() as patch:
        named = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        named |= {"LOCAL_WORLD_SIZE": 1, "DS_ACCELERATOR": "cpu", "HOLDFAST_LAUNCH": uuid.uuid4().hex}
        for name, value in named.items():
            patch.setenv(name, str(value))
        yield


@pytest.fixture
def make(alone: None, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes engines, attached to a run in this test's directory unless `run` is empty."""
    from holdfast.integrations import deepspeed as holdfast_deepspeed
    from tests.integrations.deepspeed import engines

    made: list[Any] = []

    def new(stage: int = 1, kind: str = "fp32", run: str = "run", **more: Any) -> Any:
        own = {name: more.pop(name) for name in ("state", "frozen", "assets") if name in more}
        given = {name: more.pop(name) for name in ("seed", "optimizer", "model") if name in more}
        engine = engines.engine(engines.config(stage, kind, **more), **given)
        if run:
            holdfast_deepspeed.attach(engine, run, at=tmp_path / "checkpoints", **own)
            made.append(engine)
        return engine

    yield new
    for engine in made:
        holdfast_deepspeed.checkpointer_of(engine).close()

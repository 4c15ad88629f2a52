"""rest: bodies that service and client read the same way."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from holdfast_formats import rest

BODIES: list[BaseModel] = [
    rest.Run(name="run", attempt=2, keep_last=None, checkpoints=1, newest=500, bytes=10),
    rest.Checkpoint(
        run="run",
        step=500,
        attempt=2,
        created="2026-01-01T00:00:00Z",
        world=2,
        groups=["model"],
        tensors=3,
        files=2,
        bytes=10,
        metrics={"loss": 2.5},
        verified=True,
    ),
    rest.Tensor(
        group="model",
        name="w",
        dtype="BF16",
        shape=[2, 3],
        bytes=12,
        file="f",
        start=4096,
        extents=1,
        placement="",
        alias_of="v",
    ),
    rest.Round(
        id=1, run="run", step=5, attempt=1, world=2, state="open", sealed=1, opened="t", ended=None, code=None, detail=None
    ),
    rest.Node(name="n", pid=1, version="v", root="/r", socket=None, started="t", arena_bytes=0, ranks=0),
    rest.Health(status="ok", version="v", root="/r"),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_bodies_survive_json(body: BaseModel) -> None:
    """What the service writes is what the client reads, alone and in a page."""
    assert type(body).model_validate_json(body.model_dump_json()) == body
    kind = rest.Page[type(body)]  # type: ignore[misc]
    page = kind(items=[body], next="cursor")
    assert kind.model_validate_json(page.model_dump_json()) == page
    assert kind(items=[]).next is None

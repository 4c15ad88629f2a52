"""rest: bodies that service and client read the same way."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from holdfast_formats.rest import bodies
from holdfast_formats.staging import messages

BODIES: list[BaseModel] = [
    bodies.Run(name="run", attempt=2, keep_last=None, checkpoints=1, newest=500, bytes=10),
    bodies.CheckpointInfo(
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
    bodies.Tensor(
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
    bodies.Round(
        id=1, run="run", step=5, attempt=1, world=2, state="open", sealed=1, opened="t", ended=None, code=None, detail=None
    ),
    bodies.Node(name="n", pid=1, version="v", root="/r", socket=None, started="t", arena_bytes=0, ranks=0),
    bodies.Health(status="ok", version="v", root="/r"),
    bodies.RankHello(protocol=1, run="run", rank=0, world=2, launch="l", keep_last=3),
    bodies.RankWelcome(attempt=1, node="n", root="/r", root_id="r", version="v", silence_max_s=60.0, chunk_bytes_max=1),
    messages.Room(slots=2, data_bytes=1, table_bytes=1),
    messages.SlotRequest(step=5),
    bodies.Upload(number=1, step=5, attempt=1, state="aborted", data_bytes=1, table_bytes=0, problem={"code": "x"}),
    bodies.SealRequest(data_bytes=1, table_bytes=1, table_digest="0" * 16),
    messages.AbandonRequest(problem={"code": "x"}),
    bodies.Outcomes(items=[], next=3),
    bodies.Question(step=None, groups=("model",), wait_s=1.0),
    messages.Answer(step=None),
    bodies.RestoreEnd(step=500, problem={"code": "corrupt-extent"}, wait_s=20.0),
    messages.RestoreVerdict(again=True),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_bodies_survive_json(body: BaseModel) -> None:
    """What the service writes is what the client reads, alone and in a page."""
    assert type(body).model_validate_json(body.model_dump_json()) == body
    kind = bodies.Page[type(body)]  # type: ignore[misc]
    page = kind(items=[body], next="cursor")
    assert kind.model_validate_json(page.model_dump_json()) == page
    assert kind(items=[]).next is None


def test_a_checkpoint_is_as_bad_as_the_worst_that_is_known_of_it() -> None:
    """Damage before ill health before soundness; and what is known since its commit is no part of what was committed."""
    base = bodies.CheckpointInfo(
        run="a",
        step=1,
        attempt=1,
        created="now",
        world=1,
        groups=[],
        tensors=0,
        files=0,
        bytes=0,
        metrics={},
        verified=False,
    )
    assert base.state == "committed"
    sound = base.model_copy(update={"verified": True})
    ill = sound.model_copy(update={"healthy": False, "nonfinite": 3})
    damaged = ill.model_copy(update={"damage": {"code": "corrupt-extent"}})
    assert (sound.state, ill.state, damaged.state) == ("verified", "unhealthy", "damaged")
    assert bodies.as_committed(damaged) == base

"""messages: what a rank and its daemon say is stated once, and both transports carry all of it."""

from __future__ import annotations

from inspect import get_annotations
from typing import get_args

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from holdfast_formats.lineage import Intent
from holdfast_formats.rest import bodies
from holdfast_formats.root_files import RootMark
from holdfast_formats.staging import messages, wire
from holdfast_formats.staging.messages import restate
from holdfast_service.api.routes import uploads
from tests.formats.staging.test_wire import TO_DAEMON, TO_RANK

Model = type[BaseModel]
PATH, HEADER = "stands in the path of the request", "the slot's header says it, in memory that both sides see"

# By the socket's message and what stands for it over HTTP: the fields that one of them alone has, and why.
PAIRS: dict[tuple[Model, Model], dict[str, str]] = {
    (wire.Hello, bodies.RankHello): {
        "root": "a rank on the daemon's machine sees the directory, and compares its numbers as well as its id",
        "root_id": "a rank on another machine knows the root's id alone",
    },
    (wire.Welcome, bodies.RankWelcome): {
        "mark": "as `root` of the hello",
        "root_id": "as in the hello",
        "url": "who speaks HTTP has used it",
        "silence_max_s": "a closed socket shows that a rank is gone, over HTTP silence must",
        "chunk_bytes_max": "bulk data goes through shared memory, and in chunks over HTTP",
    },
    (wire.Reserve, messages.Room): {
        "bounds": "over HTTP a rank keeps its slots within its own limits by itself",
        "average_bytes": "an average is in shared memory",
        "averages": "as `average_bytes`",
    },
    (wire.Lease, messages.SlotRequest): {
        "wait_s": "a request over HTTP does not wait for a slot: it is asked again",
        "bounds": "over HTTP the slot is in memory of the daemon's own",
    },
    (wire.Seal, bodies.SealRequest): {
        "slot": PATH,
        "step": PATH,
        "turn": "the upload was opened with it",
        "data_bytes": HEADER,
        "table_bytes": HEADER,
        "stall_s": "its own message on the socket, `Measured`",
    },
    (wire.Abandon, messages.AbandonRequest): {"slot": PATH, "step": PATH},
    (wire.Choose, bodies.Question): {"turn": PATH},
    (wire.Chosen, messages.Answer): {},
    (wire.Ended, bodies.RestoreEnd): {"turn": PATH},
    (wire.Judged, messages.RestoreVerdict): {},
    (wire.Waits, messages.Waiting): {},
    (wire.Stopping, messages.PassedStep): {},
    (wire.StopAt, messages.LastStep): {},
    (wire.Outcome, bodies.Upload): {
        "left_out": "an average is in shared memory",
        "spares": "no other rank finds in its memory what a rank over HTTP leaves out",
        "number": "a rank may open several uploads of one step, one after the other",
        "data_bytes": "progress of an upload, where the socket has none",
        "table_bytes": "progress of an upload, where the socket has none",
    },
}
SOCKET_ALONE: dict[Model, str] = {
    wire.Segment: "shared memory is passed on; over HTTP a rank lays out as much by itself",
    wire.Attach: "shared memory outlives a daemon; over HTTP a rank says hello again and uploads again",
    wire.Granted: "which slot it is concerns shared memory; over HTTP an upload has a number of the rank's",
    wire.Sealed: "has no content",
    wire.Done: "has no content",
    wire.Failed: "over HTTP the status and the whole body",
    wire.Farewell: "over HTTP DELETE",
    wire.Withdraw: "over HTTP a lease that is not answered is still wanted: the rank has its own slot",
    wire.Stop: "over HTTP a rank hears it with the outcomes that it asks for",
    wire.Ping: "over HTTP GET /healthz",
    **dict.fromkeys((wire.DoJob, wire.JobDone, wire.JobProgress), "a command of the daemon's own user, which is not a rank"),
    **dict.fromkeys((wire.CopyOf, wire.CopyFound), "over HTTP a route that people ask too"),
    wire.Measured: "over HTTP it goes with the seal",
    wire.WatchLinks: "a rank without the daemon's directory has nowhere to link to",
    **dict.fromkeys((wire.ReserveAverage, wire.AttachAverage, wire.RingAverage), "an average is in shared memory"),
    **dict.fromkeys((wire.Held, wire.HeldElsewhere, wire.HeldSlots, wire.Fetch, wire.Fetched), "slots in shared memory"),
    **dict.fromkeys((wire.Foresee, wire.Foreseen), "over HTTP a rank knows its own slots"),
}
HTTP_ALONE: dict[Model, str] = {bodies.Outcomes: "a list of uploads, for ranks that ask; the socket tells each unasked"}
STATED_TWICE = {
    "protocol": "the socket has a default",
    "wait_s": "HTTP waits for a shorter time",
    "table_digest": "the whole content that both seals have",
    **dict.fromkeys(("step", "attempt", "state", "problem"), "an upload has more states than an outcome"),
}
FRAMING = {"type", "id", "reply_to"}


def fields(kind: Model) -> set[str]:
    return kind.model_fields.keys() - FRAMING


def stated_by(kind: Model, name: str) -> Model:
    """The class that states a field of this one."""
    return next(base for base in kind.__mro__ if name in get_annotations(base))


@pytest.mark.parametrize(("near", "far"), PAIRS, ids=lambda kind: kind.__name__)
def test_no_field_exists_on_one_transport_only_without_a_reason(near: Model, far: Model) -> None:
    """A field that one transport lacks is named above; one that both have is stated once, but for a few, named above."""
    assert fields(near) ^ fields(far) == PAIRS[near, far].keys()
    for name in fields(near) & fields(far) - STATED_TWICE.keys():
        assert stated_by(near, name) is stated_by(far, name), name


def test_every_message_of_a_rank_is_compared() -> None:
    """Each message of the socket, and each body of a route for ranks, has its counterpart or a reason to have none."""
    near = {one for union in (wire.ToDaemon, wire.ToRank) for one in get_args(get_args(union)[0])}
    assert near == {pair[0] for pair in PAIRS} | SOCKET_ALONE.keys()
    routes = [route for route in uploads.router.routes if isinstance(route, APIRoute)]
    bodies_taken = {route.body_field.field_info.annotation for route in routes if route.body_field is not None}
    answers = {route.response_model for route in routes if route.response_model is not None}
    assert bodies_taken | answers == {pair[1] for pair in PAIRS} | HTTP_ALONE.keys()


def test_a_restated_message_says_the_same() -> None:
    """The fields that both have go over, as objects, and `more` counts before what was said."""
    mark = RootMark(id="r", device=1, inode=2)
    hello = wire.Hello(id=7, run="run", rank=1, world=2, launch="l", keep_last=3, session="s", take_over=True, root=mark)
    far = restate(hello, bodies.RankHello, root_id=mark.id)
    assert restate(far, wire.Hello, id=7, root=mark) == hello
    lease = wire.Lease(id=1, step=5, wait_s=3.0, policy="newest-wins", restored=4, turn=2, groups=("model",), again=1)
    wanted = restate(lease, messages.SlotRequest, policy="wait")
    assert (wanted.step, wanted.policy, wanted.intent) == (5, "wait", Intent(4, 2, "refuse", ("model",), 1))


def test_what_is_more_than_the_other_transport_takes_is_refused() -> None:
    """A wait that the socket allows is no way around the limit of HTTP, and what is required cannot be left out."""
    with pytest.raises(ValidationError, match="wait_s"):
        restate(wire.Choose(id=1, turn=0, wait_s=3600.0), bodies.Question)
    with pytest.raises(ValidationError, match="root_id"):
        restate(wire.Welcome(reply_to=1, attempt=1, node="", root="", version="", mark=RootMark(id="")), bodies.RankWelcome)


@pytest.mark.parametrize("message", [*TO_DAEMON, *TO_RANK], ids=lambda message: type(message).__name__)
def test_the_socket_refuses_unknown_fields_and_http_ignores_them(message: wire.Message) -> None:
    """As it was before they shared their contents: one version speaks on the socket, any client may speak HTTP."""
    with pytest.raises(ValidationError, match="Extra inputs"):
        type(message).model_validate({**message.model_dump(), "unknown": 1})
    for _, far in (pair for pair in PAIRS if pair[0] is type(message)):
        assert far.model_config.get("extra") is None


def test_a_problem_is_kept_in_short() -> None:
    """Whoever may write to a run could fill catalog and pages with what a body may hold; ordinary problems stay whole."""
    usual = {"code": "state-mismatch", "detail": "tensor 'a' differs", "hint": "h", "members": [1, 2], "nothing": None}
    assert messages.AbandonRequest(problem=usual).problem == usual
    long = {"detail": "x" * 10**6, "list": ["x" * 100] * 100, "y" * 100: 1, **{f"m{number}": number for number in range(99)}}
    for cut in (messages.AbandonRequest(problem=long).problem, messages.RestoreResult(step=1, problem=long).problem):
        assert cut is not None and len(cut) == messages.PROBLEM_MEMBERS_MAX
        assert len(cut["detail"]) == messages.PROBLEM_TEXT_MAX and not {"list", "y" * 100} & cut.keys()

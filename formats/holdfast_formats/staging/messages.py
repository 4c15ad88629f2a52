"""Messages between a rank and its daemon, independent of the transport: the unix socket (`wire`) or HTTP
(`rest/bodies`).

Each content is defined once, here. A message of the socket is a content, its `type` and a number; a body of the REST
API is a content and the fields of HTTP. `restate` converts between them. A field added here is accepted over HTTP too,
from every client that may write to the run: fields for local ranks only belong into `wire`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, Field

from holdfast_formats.body import Body
from holdfast_formats.lineage import Existing, Intent

Policy = Literal["newest-wins", "oldest-durable", "wait"]  # which saves are dropped if storage is slower than the saves

WORLD_MAX = 2**18  # ranks of a run: what is kept of each must not fill the daemon's memory
INFO_BYTES_MAX = 65_536  # bytes of JSON of a trainer's info about its launch
NOWHERE = -1  # the step of a rank that has passed none
STOP_RANKS_MAX = 64  # named as those that have not answered
COUNT_MAX = 2**53  # of steps, turns and the like: what JSON carries exactly everywhere, and every file and database takes

COPIES_MAX = 64  # of a checkpoint, as a rank names them
PROBLEM_MEMBERS_MAX, PROBLEM_NAME_MAX, PROBLEM_TEXT_MAX = 32, 64, 4096  # of a problem; characters of each name and value

_Kind = TypeVar("_Kind", bound=BaseModel)


def brief(problem: Mapping[str, Any]) -> dict[str, Any]:
    """A problem as stored in the catalog and in events: long texts are cut, other long members left out."""
    kept = {name: value for name, value in problem.items() if len(name) <= PROBLEM_NAME_MAX and not _is_long(value)}
    return {
        name: value[:PROBLEM_TEXT_MAX] if isinstance(value, str) else value
        for name, value in list(kept.items())[:PROBLEM_MEMBERS_MAX]
    }


def _is_long(value: Any) -> bool:
    return not isinstance(value, str) and len(json.dumps(value, default=str)) > PROBLEM_TEXT_MAX


Reported = Annotated[dict[str, Any], AfterValidator(brief)]


class HelloFields(Body):
    """The identity of a rank. Ranks with the same `launch` belong to one attempt."""

    protocol: int
    run: str
    rank: int = Field(ge=0, lt=WORLD_MAX)
    world: int = Field(ge=1, le=WORLD_MAX)
    launch: str = Field(min_length=1, max_length=256)
    keep_last: int | None = Field(default=None, ge=1, le=COUNT_MAX)
    process: str = Field(default="", max_length=64, description="ID of this process; the same ID is the same job")
    session: str = Field(
        default="", max_length=64, description="ID of this checkpointer, the same on all its connections and rank IDs"
    )
    info: dict[str, Any] | None = Field(
        default=None,
        description="facts to record about this launch: git commit, command, config, … (64 KiB of JSON; rank 0)",
    )
    take_over: bool = Field(
        default=False, description="start even if another job of this run is active, and shut out that job"
    )


class WelcomeFields(Body):
    """The daemon's identity, and the rank's attempt."""

    attempt: int
    node: str
    root: str
    version: str
    notices: tuple[str, ...] = Field(default=(), description="requested settings that are not applied, such as keep_last")


class Room(Body):
    """The memory to reserve for a rank: number and size of slots in the daemon's arena."""

    slots: int = Field(ge=1, le=64)
    data_bytes: int = Field(ge=0)
    table_bytes: int = Field(ge=0)


class SlotRequest(Body):
    """A slot for a step. If none is free, `policy` decides.

    `newest-wins`: an older save that is not being written yet is dropped, or else this one. `oldest-durable`: this one
    is. `wait`: nothing is dropped. The other fields are the same on all ranks.
    """

    step: int = Field(ge=0)
    policy: Policy = Field(default="wait", description="which save is dropped if no slot is free")
    restored: int | None = Field(
        default=None, ge=0, le=COUNT_MAX, description="the step that this launch restored and continues from"
    )
    turn: int = Field(
        default=0,
        ge=0,
        le=COUNT_MAX,
        description="number of restores that this launch continued from, plus saves it replaced",
    )
    again: int = Field(default=0, ge=0, le=COUNT_MAX, description="how many of `turn` are saves since the last restore")
    existing: Existing = Field(default="refuse", description="what to do if the step is already a checkpoint")
    groups: tuple[str, ...] = Field(default=(), description="the groups of the save")

    @property
    def intent(self) -> Intent:
        return Intent(self.restored, self.turn, self.existing, self.groups, self.again)


class AbandonRequest(Body):
    """Why a rank does not complete its part of a save; no rank's part is saved then."""

    problem: Reported


class Waiting(Body):
    """This rank begins no other save before the one of this step has ended; without a step, none any more: it closes. A
    save whose missing ranks all wait like that cannot complete, and ends.
    """

    step: int | None = Field(default=None, ge=0, le=COUNT_MAX)


class CopyQuestion(Body):
    """Whether a step of the rank's run was copied to a tier or replica, and read back there."""

    step: int = Field(ge=0, le=COUNT_MAX)
    tier: str = Field(max_length=64)


class CopyAnswer(Body):
    """Whether it is there, and if it is not, why: it is asked again then."""

    copied: bool
    why: str = ""


class PassedStep(Body):
    """The progress of a rank whose launch is to stop after a signal. `passed` is its last step (-1: none), and it
    passes no other before it knows where to stop; if it does, that is `step`.
    """

    passed: int = Field(ge=NOWHERE, le=COUNT_MAX)
    step: int | None = Field(default=None, ge=0, le=COUNT_MAX)


class LastStep(Body):
    """The step after which all ranks stop, once all have reported; `missing` ranks have not. `apart`: they are on other
    nodes, which cannot be reached.
    """

    step: int | None = None
    missing: tuple[int, ...] = Field(default=(), max_length=STOP_RANKS_MAX)
    apart: bool = False


class CopyPlace(Body):
    """Where another copy of a checkpoint can be read: a directory or `s3://BUCKET/PREFIX` with the form of a root."""

    name: str = Field(max_length=128, description="as reports name it, such as `tier cloud`")
    at: str


class StepQuestion(Body):
    """The step to restore in this attempt: the newest with all of `groups`, unless a step is given."""

    step: int | None = Field(default=None, ge=0)
    groups: tuple[str, ...] = ()
    healthy: bool = Field(
        default=False, description="restore the newest checkpoint that is verified and not known to be unhealthy"
    )
    in_root: bool = Field(
        default=False, description="copy the checkpoint back to the root first: this rank cannot read the other copies"
    )


class Answer(Body):
    step: int | None
    notes: tuple[str, ...] = Field(default=(), description="newer checkpoints that were skipped, and why")
    copies: tuple[CopyPlace, ...] = Field(
        default=(), description="copies for what the root lacks of the checkpoint, which may be all of it; the nearest first"
    )
    created: str = Field(default="", description="when the checkpoint was saved, if the root lacks it: no other one is read")


class RestoreResult(Body):
    """How this rank's restore of the turn's step ended: successfully, or with this problem."""

    step: int = Field(ge=0)
    problem: Reported | None = None
    alone: bool = Field(default=False, description="the response concerns only this rank, which asked for a step by number")
    passed_over: dict[str, Reported] = Field(
        default={},
        max_length=COPIES_MAX,
        description="problems of nearer copies that this rank met; an empty name is the root's",
    )


class RestoreVerdict(Body):
    """The verdict on this rank's restore. With neither `again` nor a problem the rank continues."""

    again: bool = Field(default=False, description="read the step again: it was repaired")
    problem: dict[str, Any] | None = Field(
        default=None, description="the problem for which no rank continues from this step"
    )
    late: bool = Field(default=False, description="other ranks had already continued from it")
    newest: int | None = Field(default=None, description="the newest step not known to be damaged, if this rank asks alone")


def restate(base_model: BaseModel, kind: type[_Kind], **more: Any) -> _Kind:
    """The same content as a message of another kind: the common fields, and `more`."""
    both = type(base_model).model_fields.keys() & kind.model_fields.keys() - more.keys()
    return kind(**{name: getattr(base_model, name) for name in both}, **more)

"""Bodies of the REST API about a run as a whole: its owner, launches, changes, and the trash."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from holdfast_formats.body import Body
from holdfast_formats.rest.bodies import Run
from holdfast_formats.rest.measurements import RunLife
from holdfast_formats.tags import TAGS_MAX

OWNER_LENGTH_MAX = 128
NOTES_LENGTH_MAX = 16_384


class RenamedRun(Run):
    """A run as it was before it got another name."""

    damaged: dict[int, str] = Field(
        default={}, description="its damaged checkpoints by step, with the problem; they were renamed unchanged"
    )


class RunLaunch(Body):
    """What was said when an attempt of a run began: by its trainer (`info=`), and found out beside it."""

    attempt: int
    at: str = Field(description="when its first rank reported it")
    world: int = Field(description="how many ranks it has")
    info: dict[str, Any] = Field(
        description="git, command, launcher (the command line of torchrun or its like), directory, user, host, python, "
        "torch, and what `Checkpointer(info=…)` was given, such as config"
    )


class RunAbout(Body):
    """What is remembered of a run besides its checkpoints."""

    run: str
    life: RunLife
    life_since: str | None
    standing: str = Field(default="", description="`life` in words, such as `finished with NaN since step 120`")
    owner: str | None = Field(description="as set by a user, otherwise from the newest launch")
    notes: str = Field(description="as set by a user, otherwise from the newest launch")
    tags: list[str] = Field(default=[], description="as set by users, otherwise from the newest launch; sorted")
    archived: str | None = Field(default=None, description="when it was archived; null if it is not")
    acknowledged: bool = Field(default=False, description="whether its death was acknowledged")
    acknowledged_by: str | None = Field(default=None, description="name of the token that did so")
    acknowledged_at: str | None = Field(default=None, description="when that happened")
    launches: list[RunLaunch] = Field(description="the newest launches, newest first")
    missing: list[int] = Field(
        default_factory=list,
        description="steps whose directories something other than Holdfast removed, newest first",
    )


class RunChange(Body):
    """What to change of a run; what is left out stays. An empty owner or empty notes give the trainer's back. Tags are added
    and removed one by one, so that two people who do it at once lose nothing.
    """

    model_config = ConfigDict(extra="forbid")

    owner: str | None = Field(default=None, max_length=OWNER_LENGTH_MAX)
    notes: str | None = Field(default=None, max_length=NOTES_LENGTH_MAX)
    tag: list[str] | None = Field(default=None, max_length=TAGS_MAX, description="tags to add; others stay")
    untag: list[str] | None = Field(default=None, max_length=TAGS_MAX, description="tags to remove, if the run has them")
    archived: bool | None = Field(default=None, description="archive or unarchive it; a new launch also unarchives it")
    acknowledged: bool | None = Field(default=None, description="true: acknowledge its death, like its alert `run-died`")


class TaggedRuns(Body):
    """A tag, and how many of the runs that may be seen have it."""

    tag: str
    runs: int


class RunStorage(Body):
    """Bytes of a run's checkpoints, by the time since their commits. Copies in replicas do not count."""

    run: str
    checkpoints: int
    bytes: int
    day_bytes: int = Field(description="of checkpoints of the last 24 hours")
    week_bytes: int = Field(description="of older ones, of the last 7 days")
    month_bytes: int = Field(description="of older ones, of the last 30 days")
    older_bytes: int


class TrashedRun(Body):
    """A run that was deleted and can still be brought back."""

    entry: str = Field(description="its name in the trash: one run may have been deleted more than once")
    run: str
    deleted: str
    expires: str | None = Field(description="when it is removed for good; null if never")
    checkpoints: int
    newest: int | None
    bytes: int
    attempt: int


class Trash(Body):
    """The deleted runs that can be brought back, the newest first, and the space that they take."""

    items: list[TrashedRun]
    bytes: int
    days: float | None = Field(description="how long deleted runs are kept; null: forever")

"""Retention policies and verdicts of run.json, the REST API and the command line.

The rules of a policy are alternatives: a checkpoint stays if any one of them keeps it.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from holdfast_formats import naming
from holdfast_formats.body import Body
from holdfast_formats.disk.compacting import OptimRule
from holdfast_formats.errors import InvalidRequest

COUNT_MAX = 10**9
SECONDS_MAX = 10.0**11
BYTES_MAX = 2**63 - 1
BEST_RULES_MAX = 16
STEPS_MAX = 10_000  # explicit steps, pins, and steps under labels, each
LABEL_CHARACTERS = "1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit"
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Force = Literal["newest-verified", "newest-healthy"]  # the two checkpoints that are removed only if they are named

Count = Annotated[int, Field(strict=True, ge=1, le=COUNT_MAX)]
Seconds = Annotated[float, Field(gt=0, le=SECONDS_MAX)]
Step = Annotated[int, Field(strict=True, ge=0, le=naming.STEP_MAX)]


class Best(Body):
    """Keep the `count` checkpoints with the lowest (`min`) or highest (`max`) metric; of equal ones the oldest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(min_length=1, max_length=128, description="name of a metric in the `metrics` of the save")
    mode: Literal["min", "max"] = "min"
    count: Count
    keep_unmeasured: bool = Field(default=False, description="also keep checkpoints saved without this metric")


class RetentionPolicy(Body):
    """What is kept of a run. Everything is kept if no rule limits; `steps`, `keep_full`, `optim` and `quota_bytes` are no
    such rules.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    last: Count | None = Field(default=None, description="keep this many newest checkpoints")
    every_steps: Count | None = Field(default=None, description="keep steps that are multiples of this")
    steps_apart: Count | None = Field(
        default=None, description="keep the oldest, then each at least this many steps after the last kept one"
    )
    every_seconds: Seconds | None = Field(
        default=None, description="keep the oldest, then each at least this many seconds after the last kept one"
    )
    within_seconds: Seconds | None = Field(default=None, description="keep those committed within this many seconds")
    best: tuple[Best, ...] = Field(default=(), max_length=BEST_RULES_MAX, description="keep the best ones by a metric")
    keep_full: Count | None = Field(
        default=None,
        description="thin checkpoints older than this many whole ones to their weights: no optimizer, masters or per-rank "
        "state",
    )
    optim: OptimRule | None = Field(
        default=None,
        description="store checkpoints older than `optim_full` exact ones in fewer bytes: optimizer states as bf16 or int8, "
        "or exact, and masters as the low bits that their BF16 weights lack",
    )
    optim_full: Count | None = Field(
        default=None, description="how many of the newest stay exactly as saved, if `optim` is given"
    )
    steps: tuple[Step, ...] = Field(default=(), max_length=STEPS_MAX, description="always keep these steps")
    quota_bytes: Annotated[int, Field(strict=True, ge=1, le=BYTES_MAX)] | None = Field(
        default=None, description="refuse saves that would take the run above this many bytes"
    )

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(steps)))

    @model_validator(mode="after")
    def _together(self) -> RetentionPolicy:
        if (self.optim is None) != (self.optim_full is None):
            raise ValueError("optim and optim_full belong together: how states are stored, and how many stay exact")
        if self.keep_full is not None and self.optim_full is not None and self.keep_full <= self.optim_full:
            raise ValueError(
                "optim_full must be less than keep_full: older checkpoints have no optimizer state left to compact"
            )
        return self

    @property
    def limits(self) -> bool:
        """Whether any rule may remove a checkpoint."""
        return bool(self.best) or any(
            rule is not None
            for rule in (self.last, self.every_steps, self.steps_apart, self.every_seconds, self.within_seconds)
        )


class Verdict(Body):
    """The verdict on one checkpoint, with reasons: what keeps it, or why each rule does not."""

    step: int
    keep: bool
    reasons: list[str]
    verified: bool
    pinned: bool
    labels: list[str]
    created: str
    bytes: int
    thin: bool = Field(default=False, description="it is kept, and will be thinned to its weights next")
    thinned: bool = Field(default=False, description="it was thinned: only its weights remain")
    thin_reason: str | None = Field(default=None, description="why it is thinned, or why it stays whole")
    compact: bool = Field(default=False, description="it is kept, and will be compacted next, as `optim` says")
    compacted: bool = Field(default=False, description="it was compacted")
    bytes_after: int | None = Field(default=None, description="estimated size once thinned or compacted, if that is next")


class Preview(Body):
    """A policy and its verdict on every checkpoint of a run at one moment, newest step first."""

    policy: RetentionPolicy
    verdicts: list[Verdict]
    bytes_kept: int = Field(description="bytes of the kept checkpoints, as they are now")
    bytes_removed: int
    bytes_thinned: int = Field(default=0, description="bytes that the next thinning frees")
    bytes_compacted: int = Field(default=0, description="estimated bytes that the next compaction frees")
    could_save: dict[str, int] = Field(
        default_factory=dict,
        description="about how much less the older ones that stay would take, without marks, in each form: `weights` only, "
        "or everything with optimizer states `exact`, as `bf16` or as `int8`",
    )
    bytes_saved: int = Field(default=0, description="bytes freed by earlier thinning and compaction")


def check_label(label: str) -> str:
    """Return the label, or raise `InvalidRequest`."""
    if not _LABEL.fullmatch(label):
        raise InvalidRequest(f"label {label!r} is not allowed", hint=f"use {LABEL_CHARACTERS}")
    return label

"""Bodies of the REST API for everything but saves: events, jobs, replicas, tokens."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from holdfast_formats.body import Body

Level = Literal["info", "warning", "error"]
JobKind = Literal["verify", "scrub", "export", "import", "merge", "compare", "rebuild"]
JobState = Literal["queued", "running", "done", "failed", "cancelled"]
Scope = Literal["read", "write", "admin"]
RATE_MAX = 10**12  # of a token
GRACE_MAX_S = 30 * 86_400
ReplicaState = Literal["copying", "present", "damaged", "gone"]

# Every kind of event, and its meaning.
EVENTS: dict[str, str] = {
    "daemon-started": "a daemon started to serve the root",
    "node-lost": "a node was lost: its lease ended without renewal or sign-off",
    "node-forgotten": "a node that is gone was removed from the list of nodes",
    "secret-rotated": "the nodes of the catalog got a new shared secret",
    "catalog-rebuilt": "the catalog was damaged or made by an unreleased version: it was moved away and rebuilt",
    "root-copied": "a daemon found that the root is a copy of another root, and gave it a new ID",
    "attempt-declared": "a new launch of a training run connected",
    "run-finished": "all ranks of a run closed their Checkpointer",
    "run-died": "ranks of a run were killed or ended by an exception, without closing their Checkpointer",
    "run-failed": "a run failed to start: its ranks ended before anything was saved to it",
    "run-swept": "a run without any save, whose ranks are long gone, was removed from the list",
    "run-found": "a tier has checkpoints of a run that this root has never had; the root begins with them",
    "run-continued": "another machine has trained a run on: a tier has checkpoints of a newer launch than this root's",
    "run-changed": "owner, notes, tags or archiving of a run changed, or its death was acknowledged",
    "run-deleted": "a run was moved to the trash, from which it can be brought back",
    "run-renamed": "a run was renamed; `detail` has the old name",
    "run-undeleted": "a run was brought back from the trash",
    "run-purged": "a run was removed from the trash for good; `detail` says why",
    "checkpoint-committed": "a checkpoint is complete, durable and visible",
    "average-left-out": "a checkpoint lacks the daemon's average, although its ranks use one",
    "share-handed-over": "a node could not write its share of a save, so another did; `detail` says which and why",
    "commit-command-started": "the command of `--on-commit` was started for a checkpoint",
    "commit-command-failed": "the command of `--on-commit` failed, or was not run for a checkpoint; `detail` says why",
    "save-aborted": "a save ended without a checkpoint; `detail` has the problem",
    "staged-save-lost": "a save that all ranks had staged was lost: the daemon was killed, and nothing held its memory",
    "save-late": "the next save had begun before this one was durable; recorded once, until a save is on time again",
    "save-dropped": "a save was dropped, because no slot was free; `detail` says what the saves in the slots wait for",
    "checkpoint-verified": "a checkpoint was read back, and every byte matched its digest",
    "checkpoint-damaged": "bytes of a checkpoint do not match their digests; `detail` says which",
    "checkpoint-missing": "something other than Holdfast removed a checkpoint's directory: it is no longer listed",
    "checkpoint-put-back": "a replaced checkpoint was put back: its replacement was damaged or is gone",
    "checkpoint-changed": "files of a checkpoint were written or replaced after verification: it is verified again",
    "checkpoint-repaired": "damaged bytes were replaced with verified ones; `detail` names the source",
    "checkpoint-unhealthy": "a checkpoint has new NaN or infinite values; `detail` names the tensors",
    "checkpoint-frozen": "a checkpoint is bit-identical to the previous one",
    "checkpoint-removed": "a checkpoint was removed; `detail` says why",
    "removal-waits": "a removal was postponed: the remaining checkpoints are not known to be sound; `detail` says why",
    "checkpoint-compacted": "optimizer states and masters of a checkpoint were compacted",
    "checkpoint-thinned": "optimizer, masters and per-rank state were removed from a checkpoint; its weights stay",
    "second-copy-made": "a checkpoint got a copy of its own of a file that it shared with the step before",
    "second-copy-failed": "such a copy could not be made (quota, no space, or a storage failure); it is retried",
    "thinning-failed": "a checkpoint could not be thinned or compacted (no space, or a storage failure); it is retried",
    "checkpoint-replicated": "a checkpoint was copied to another tier and verified there",
    "replica-failed": "a tier cannot be reached, or a copy there failed or is damaged; it is retried",
    "copies-gone": "something other than Holdfast removed copies from a replica or a tier; they are made again",
    "restore-chosen": "a launch was assigned the step to restore",
    "policy-changed": "the retention policy of a run was set",
    "mark-changed": "a pin or a label was set or removed",
    "alert-acknowledged": "an alert was acknowledged, for a time or until it ends, or the acknowledgement was withdrawn",
    "scrub-finished": "a scrub verified the checkpoints that were due",
    "job-ended": "a job is done, has failed, or was cancelled",
    "notification-sent": "a notification target accepted alerts or recoveries",
    "notification-failed": "a notification target rejected a message; recorded again only after it has accepted one",
    "token-changed": "a token was created, rotated or revoked",
    "request-refused": "a request was refused: no token, an invalid token, or too little scope",
}


class Event(Body):
    """Something that happened. Ids ascend; the newest events are kept, older ones are deleted."""

    id: int
    at: str = Field(description="RFC 3339, UTC")
    kind: str = Field(description="one of the kinds that docs/api.md lists")
    level: Level
    node: str
    run: str | None = None
    step: int | None = None
    text: str = Field(description="one sentence for people")
    detail: dict[str, Any] = Field(default_factory=dict)


class Gap(Body):
    """Sent in an event stream if requested events are no longer stored: the stream goes on at the oldest one."""

    asked: int = Field(description="the ID after which the stream should start or continue")
    oldest: int = Field(description="the ID from which the stream continues: the oldest stored event visible to the token")


class Job(Body):
    id: int
    kind: str
    state: JobState
    run: str | None
    step: int | None
    arguments: dict[str, Any]
    done_bytes: int
    total_bytes: int = Field(description="0 while unknown")
    node: str = Field(description="the node that runs it, or to which it is assigned")
    tries: int = Field(default=0, description="number of starts; a service that restarts while the job runs starts it again")
    created: str
    started: str | None
    ended: str | None
    result: dict[str, Any] | None = None
    problem: dict[str, Any] | None = None


class Replica(Body):
    """A copy of a checkpoint in another tier."""

    tier: str
    state: ReplicaState
    bytes: int
    since: str
    checked: str | None = Field(default=None, description="time of the last verification")
    problem: dict[str, Any] | None = None
    measured: dict[str, float] | None = Field(
        default=None,
        description="`seconds` that copying it and reading it back took, and the requests to its bucket, as in `SaveTimes`",
    )


class TokenRequest(Body):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    scope: Scope = "read"
    runs: str = Field(default="*", max_length=128, description="a run's name, a prefix ending in *, or * for all")
    expires_s: int | None = Field(default=None, ge=1, description="lifetime in seconds; None: never expires")
    requests_per_s: int | None = Field(default=None, ge=1, le=RATE_MAX, description="requests per second; None: no limit")
    bytes_per_s: int | None = Field(default=None, ge=1, le=RATE_MAX, description="response bytes per second; None: no limit")


class RotationRequest(Body):
    """A new secret for a token: same name, scope, runs and limits."""

    model_config = ConfigDict(extra="forbid")

    grace_s: int = Field(default=86_400, ge=0, le=GRACE_MAX_S, description="how long the old secret is still accepted")
    expires_s: int | None = Field(default=None, ge=1, description="lifetime of the new one; None: the same as the old one's")


class Token(Body):
    """A token in a list; its text is shown only once, when it is made."""

    id: int
    name: str
    scope: Scope
    runs: str
    created: str
    expires: str | None
    revoked: str | None
    used: str | None
    used_from: str | None = Field(default=None, description="address of the last use")
    requests_per_s: int | None = None
    bytes_per_s: int | None = None


class NewToken(Token):
    token: str = Field(description="send it as `Authorization: Bearer …`; it cannot be shown again")


class Link(Body):
    """A sign-in link for a browser, valid once and for a minute."""

    path: str = Field(description="path to open on this service; `/` if no token is needed")

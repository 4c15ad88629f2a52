"""The error tree, shared by the trainer's library, the daemon and the REST edge.

    CheckpointError                  code, HTTP status, retryable, hint
    ├── Refused                      the request is wrong: change it, do not retry
    │   ├── InvalidRequest           invalid-request 400
    │   ├── StateMismatch            state-mismatch 422
    │   │   └── CheckpointThinned    checkpoint-thinned 422
    │   ├── ReplicasDiffer           replicas-differ 422
    │   ├── LimitExceeded            limit-exceeded 413
    │   └── PreconditionRequired     precondition-required 428
    ├── Denied                       authenticate, or get a token with more rights
    │   ├── Unauthenticated          unauthenticated 401
    │   └── Forbidden                forbidden 403
    ├── NotFound                     404
    │   ├── NoSuchRun                no-such-run
    │   ├── NoSuchCheckpoint         no-such-checkpoint
    │   └── NoSuchResource           no-such-resource
    ├── Conflict                     the state has changed: look, then decide
    │   ├── StaleAttempt             stale-attempt 409
    │   ├── StateOverwritten         state-overwritten 409
    │   ├── AlreadyCommitted         already-committed 409
    │   ├── PreconditionFailed       precondition-failed 412
    │   ├── Pinned                   pinned 409
    │   ├── InUse                    in-use 409
    │   ├── NewestVerified           newest-verified 409
    │   ├── NewestHealthy            newest-healthy 409
    │   ├── RootBusy                 root-busy 409
    │   ├── WrongRoot                wrong-root 409
    │   └── RunBusy                  run-busy 409
    ├── Damaged                      500: bytes are not what they were; do not retry, restore another step
    │   ├── CorruptExtent            corrupt-extent
    │   ├── CorruptManifest          corrupt-manifest
    │   ├── NotCommitted             not-committed
    │   ├── CheckpointsMissing       checkpoints-missing
    │   ├── TornSnapshot             torn-snapshot
    │   └── CorruptStatistics        corrupt-statistics
    └── Unavailable                  503: try again, or mend the machine
        ├── DaemonGone               daemon-gone
        ├── StorageFailed            storage-failed
        │   └── CatalogUnavailable   catalog-unavailable
        ├── NoSpace                  no-space 507
        ├── QuotaExceeded            quota-exceeded 507
        ├── DeadlineExceeded         deadline-exceeded 504
        ├── RoundAborted             round-aborted
        ├── GenerationDropped        generation-dropped
        ├── ArenaFull                arena-full 429
        └── TooManyRequests          too-many-requests 429

A branch says what to do, a leaf says why. `problem()` is the RFC 9457 body; `from_problem()` rebuilds the same class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple


class CheckpointError(Exception):
    """Any refusal or failure of Holdfast.

    Args:
        detail: What happened, and to what.
        hint: What to do about it.
        **members: Facts for programs, which `problem()` shows too, such as a file's name.

    Example:
        >>> try:
        ...     checkpointer.restore(500)
        ... except CheckpointError as error:
        ...     print(error.code, error.hint, error.retryable)
    """

    code: ClassVar[str] = "internal-error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str, /, *, hint: str = "", **members: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.hint = hint
        self.members = members

    def __str__(self) -> str:
        return f"{self.detail} [{self.code}]" + (f"\nhint: {self.hint}" if self.hint else "")

    def __reduce__(self) -> tuple[Any, ...]:
        return (from_problem, (self.problem(),))

    def problem(self) -> dict[str, Any]:
        """The RFC 9457 body of this error: JSON values only."""
        return {
            "type": f"/problems/{self.code}",
            "title": type(self).__name__,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "retryable": self.retryable,
            "hint": self.hint,
            **self.members,
        }


class Refused(CheckpointError):
    """The request is wrong: change it, because repeating it does not help."""

    status = 400


class InvalidRequest(Refused):
    code = "invalid-request"


class StateMismatch(Refused):
    """Names, shapes, dtypes or coverage of the request and of the existing data do not fit."""

    code, status = "state-mismatch", 422


class CheckpointThinned(StateMismatch):
    """Requested groups were removed from the checkpoint; `groups` names them, and `nearest` the nearest step that
    has them.
    """

    code = "checkpoint-thinned"


class ReplicasDiffer(Refused):
    """Ranks say that they hold the same tensor, but hold different bytes; `tensors` and `ranks` name them."""

    code, status = "replicas-differ", 422


class LimitExceeded(Refused):
    code, status = "limit-exceeded", 413


class PreconditionRequired(Refused):
    """This change needs If-Match with the ETag of what it changes."""

    code, status = "precondition-required", 428


class Denied(CheckpointError):
    """This caller may not do it: another token helps, repeating the request does not."""

    status = 403


class Unauthenticated(Denied):
    """A token is needed, and there is none, or it is not valid."""

    code, status = "unauthenticated", 401


class Forbidden(Denied):
    """The caller is authenticated, and may not do this."""

    code = "forbidden"


class NotFound(CheckpointError):
    status = 404


class NoSuchRun(NotFound):
    code = "no-such-run"


class NoSuchCheckpoint(NotFound):
    code = "no-such-checkpoint"


class NoSuchResource(NotFound):
    code = "no-such-resource"


class Conflict(CheckpointError):
    status = 409


class StaleAttempt(Conflict):
    """A newer launch of the run has been declared; this one may not write any more (I6)."""

    code = "stale-attempt"


class StateOverwritten(Conflict):
    """A failed restore left live tensors of different steps; they are neither trained nor saved."""

    code = "state-overwritten"


class AlreadyCommitted(Conflict):
    code = "already-committed"


class PreconditionFailed(Conflict):
    """The object to be changed has changed since it was read."""

    code, status = "precondition-failed", 412


class Pinned(Conflict):
    """The checkpoint is pinned or labelled, so it is not removed."""

    code = "pinned"


class InUse(Conflict):
    """The checkpoint is being read, or contains files that are not Holdfast's; the node that is to be forgotten is live;
    another export writes to the same name.
    """

    code = "in-use"


class NewestVerified(Conflict):
    """The checkpoint is the newest verified one of its run (I10)."""

    code = "newest-verified"


class NewestHealthy(Conflict):
    """The checkpoint is the newest one of its run that is verified and not known to be unhealthy."""

    code = "newest-healthy"


class RootBusy(Conflict):
    """Another daemon holds the lock on this root."""

    code = "root-busy"


class WrongRoot(Conflict):
    """The daemon or catalog that was reached belongs to another root than the one that is meant."""

    code = "wrong-root"


class RunBusy(Conflict):
    """Another job trains this run now; a second one must take it over explicitly."""

    code = "run-busy"


class Damaged(CheckpointError):
    """Bytes are missing or differ from what was written; none of them are handed over."""


class CorruptExtent(Damaged):
    code = "corrupt-extent"


class CorruptManifest(Damaged):
    code = "corrupt-manifest"


class NotCommitted(Damaged):
    code = "not-committed"


class CheckpointsMissing(Damaged):
    """A run's checkpoints are gone from its root, and were not removed through Holdfast."""

    code = "checkpoints-missing"


class TornSnapshot(Damaged):
    code = "torn-snapshot"


class CorruptStatistics(Damaged):
    """Statistics of a checkpoint's tensors cannot be read; the checkpoint itself may be sound."""

    code = "corrupt-statistics"


class Unavailable(CheckpointError):
    status = 503
    retryable = True


class DaemonGone(Unavailable):
    code = "daemon-gone"


class StorageFailed(Unavailable):
    code = "storage-failed"


class CatalogUnavailable(StorageFailed):
    """The catalog's database does not answer. Saves go on without it; requests that need it have to wait."""

    code = "catalog-unavailable"


class NoSpace(Unavailable):
    code, status = "no-space", 507


class QuotaExceeded(Unavailable):
    """The save does not fit into the quota of the run's policy."""

    code, status = "quota-exceeded", 507


class DeadlineExceeded(Unavailable):
    code, status = "deadline-exceeded", 504


class RoundAborted(Unavailable):
    """The save of one step was given up; the checkpoints before it are untouched."""

    code = "round-aborted"


class Awaited(NamedTuple):
    """What saves wait for that hold all slots, and what to do about it."""

    why: str
    hint: str


STORAGE = Awaited(
    "storage is slower than the saves", "save less often, give the checkpointer more slots, or use faster storage"
)


class GenerationDropped(Unavailable):
    """No slot was free, and the policy dropped this step for another; `policy` says which policy it was."""

    code = "generation-dropped"

    @classmethod
    def of(cls, step: int, kept: int | None, policy: str, awaited: Awaited = STORAGE) -> GenerationDropped:
        """The save of `step` was dropped for that of `kept` (None: earlier running ones). `awaited` is what keeps the slots
        busy.
        """
        return cls(
            f"the save of step {step} was dropped for {'those before it' if kept is None else f'step {kept}'} "
            f"(policy {policy}): {awaited.why}",
            hint=awaited.hint,
            policy=policy,
        )


class ArenaFull(Unavailable):
    code, status = "arena-full", 429


class TooManyRequests(Unavailable):
    """A token's limit is reached; `retry_after_s` says for how long."""

    code, status = "too-many-requests", 429


LEAVES: tuple[type[CheckpointError], ...] = (
    InvalidRequest,
    StateMismatch,
    CheckpointThinned,
    ReplicasDiffer,
    LimitExceeded,
    PreconditionRequired,
    Unauthenticated,
    Forbidden,
    NoSuchRun,
    NoSuchCheckpoint,
    NoSuchResource,
    StaleAttempt,
    StateOverwritten,
    AlreadyCommitted,
    PreconditionFailed,
    Pinned,
    InUse,
    NewestVerified,
    NewestHealthy,
    RootBusy,
    WrongRoot,
    RunBusy,
    CorruptExtent,
    CorruptManifest,
    NotCommitted,
    CheckpointsMissing,
    TornSnapshot,
    CorruptStatistics,
    DaemonGone,
    StorageFailed,
    CatalogUnavailable,
    NoSpace,
    QuotaExceeded,
    DeadlineExceeded,
    RoundAborted,
    GenerationDropped,
    ArenaFull,
    TooManyRequests,
)
_BY_CODE = {leaf.code: leaf for leaf in LEAVES}
_STANDARD_MEMBERS = frozenset({"type", "title", "status", "detail", "code", "retryable", "hint"})


def from_problem(body: Mapping[str, Any]) -> CheckpointError:
    """Rebuild the error that a peer reported; an unknown code becomes a plain `CheckpointError`."""
    kind = _BY_CODE.get(str(body.get("code")), CheckpointError)
    members = {k: v for k, v in body.items() if k not in _STANDARD_MEMBERS}
    return kind(str(body.get("detail", "unknown error")), hint=str(body.get("hint", "")), **members)


# The documented exit statuses of the command line, one per branch.
EXIT_STATUS: dict[type[CheckpointError], int] = {
    Refused: 2,
    NotFound: 3,
    Conflict: 4,
    Damaged: 5,
    Unavailable: 6,
    Denied: 7,
}


def exit_status(error: CheckpointError) -> int:
    """The process exit status for this error's branch; 1 for an error of no branch."""
    return next((status for branch, status in EXIT_STATUS.items() if isinstance(error, branch)), 1)

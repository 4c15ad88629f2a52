"""Bodies of the REST API for the replicas and tiers of a root: how far each is behind, and requests to buckets."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from holdfast_formats.body import Body
from holdfast_formats.rest.columns import human_bytes
from holdfast_formats.rest.measurements import TierCopies
from holdfast_formats.timestamps import span


class RequestCounts(Body):
    """Requests to object storage of one kind, since a daemon's start."""

    sent: int
    retries: int = Field(description="those of them that repeated one that had failed")
    sent_bytes: int = Field(description="of the bodies of the requests")
    received_bytes: int = Field(description="of the bodies of the answers")


class FailingRequests(Body):
    """A kind of request that object storage refuses, or does not answer."""

    kind: str
    answer: str = Field(description="the newest answer, such as `503 SlowDown`")
    since: str = Field(description="RFC 3339, UTC")


class BucketTraffic(Body):
    """What a daemon asked of a bucket since its start."""

    requests: dict[str, RequestCounts] = Field(
        description="by kind: get, head, put, delete, list, copy, begin, part, complete, abort, uploads"
    )
    failing: list[FailingRequests] = Field(description="the kinds that failed when they were last asked")


class RunningCopy(Body):
    """A checkpoint that is being copied to a replica. Each byte counts twice: it is copied, and read back from there."""

    run: str
    step: int
    started: str
    done_bytes: int
    total_bytes: int
    bytes_per_second: float = Field(description="during the last ten seconds")


class ReplicaLag(Body):
    """A replica or tier that a node copies to, and how far it is behind."""

    replica: str
    node: str
    missing: int | None = Field(default=None, description="checkpoints that have no copy there; null while unknown")
    missing_bytes: int | None = Field(default=None, description="of the verified ones of them")
    lag_s: float | None = Field(default=None, description="age in seconds of the oldest verified one; 0 if there is none")
    problem: str | None = Field(default=None, description="why it cannot be reached; null while it can")
    problem_since: str | None = None
    copying: RunningCopy | None = Field(default=None, description="the checkpoint that is being copied now")
    bucket: BucketTraffic | None = Field(default=None, description="requests to its bucket; null for a directory")


def of_run(run: str, copies: Iterable[TierCopies], lags: Iterable[ReplicaLag]) -> list[ReplicaLag]:
    """The lags of a run's copies, which its summary has, with what nodes say of the replicas; by name."""
    known = {lag.replica: lag for lag in lags}
    found = []
    for one in copies:
        lag = known.get(one.tier, ReplicaLag(replica=one.tier, node=""))
        copying = lag.copying if lag.copying is not None and lag.copying.run == run else None
        own = {"missing": one.missing, "missing_bytes": one.missing_bytes, "lag_s": one.lag_s, "copying": copying}
        found.append(lag.model_copy(update=own))
    return found


def told_lag(missing: int | None, size: int | None, lag_s: float | None) -> str:
    """How far a replica is behind, in words; empty while it has all that is verified, or that is unknown."""
    if not missing:
        return ""
    of = "1 checkpoint has" if missing == 1 else f"{missing} checkpoints have"
    sound = f" ({human_bytes(size)}, the oldest for {span(lag_s)})" if size and lag_s is not None else ""
    return f"{of} yet to be copied there{sound}"


def told_refusals(bucket: BucketTraffic | None) -> str:
    """What a bucket refuses, since when, and its last answer; empty if it refuses nothing."""
    failing = [] if bucket is None else bucket.failing
    return "; ".join(f"the bucket fails {one.kind} requests since {one.since}: {one.answer}" for one in failing)


def told_copy(copying: RunningCopy) -> str:
    """A copy that runs, in words."""
    share = f", {min(copying.done_bytes / copying.total_bytes, 1.0):.0%}" if copying.total_bytes else ""
    return f"copies {copying.run}@{copying.step}{share}, {human_bytes(copying.bytes_per_second)}/s"


def told(lag: ReplicaLag) -> str:
    """The state of a replica in one line."""
    problem = None if lag.problem is None else f"cannot be reached since {lag.problem_since}: {lag.problem}"
    said = [
        told_lag(lag.missing, lag.missing_bytes, lag.lag_s),
        "" if lag.copying is None else told_copy(lag.copying),
        problem or told_refusals(lag.bucket),
    ]
    return "; ".join(filter(None, said)) or ("not looked at yet" if lag.missing is None else "has every checkpoint")

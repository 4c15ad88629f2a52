"""What is said of a replica, in words."""

from __future__ import annotations

from holdfast_formats.rest.measurements import TierCopies
from holdfast_formats.rest.replica_lags import (
    BucketTraffic,
    FailingRequests,
    ReplicaLag,
    RunningCopy,
    of_run,
    told,
    told_lag,
)

SINCE = "2030-01-01T00:00:00Z"
COPYING = RunningCopy(run="r", step=7, started=SINCE, done_bytes=25, total_bytes=100, bytes_per_second=2e6)
REFUSES = BucketTraffic(requests={}, failing=[FailingRequests(kind="put", answer="503 SlowDown", since=SINCE)])


def test_a_lag_is_told_by_number_bytes_and_time() -> None:
    """Nothing is told of none, and no bytes of checkpoints that are not verified."""
    assert told_lag(3, 24_000_000, 480.0) == "3 checkpoints have yet to be copied there (24.0 MB, the oldest for 8 min)"
    assert told_lag(1, 0, 0.0) == "1 checkpoint has yet to be copied there"
    assert told_lag(0, 0, 0.0) == told_lag(None, None, None) == ""


def test_a_replica_in_one_line() -> None:
    """Its lag, the running copy, and why it cannot be reached or what its bucket refuses."""
    assert told(ReplicaLag(replica="far", node="n")) == "not looked at yet"
    assert told(ReplicaLag(replica="far", node="n", missing=0, missing_bytes=0, lag_s=0.0)) == "has every checkpoint"
    busy = ReplicaLag(replica="far", node="n", missing=1, copying=COPYING, bucket=REFUSES)
    assert told(busy) == (
        "1 checkpoint has yet to be copied there; copies r@7, 25%, 2.0 MB/s; "
        f"the bucket fails put requests since {SINCE}: 503 SlowDown"
    )
    lost = busy.model_copy(update={"problem": "its disk is gone", "problem_since": SINCE, "copying": None})
    assert told(lost).endswith(f"; cannot be reached since {SINCE}: its disk is gone")


def test_the_lags_of_one_run() -> None:
    """Numbers of the run, with what its node says of the replica; another run's copy is left out."""
    copies = [TierCopies(tier="far", newest=5, damaged=0, missing=2, missing_bytes=10, lag_s=3.0)]
    copies.append(TierCopies(tier="near", newest=5, damaged=0))
    lag = ReplicaLag(replica="far", node="n", missing=9, missing_bytes=90, lag_s=30.0, copying=COPYING, bucket=REFUSES)
    own, unknown = of_run("r", copies, [lag])
    assert (own.missing, own.missing_bytes, own.lag_s, own.copying, own.bucket) == (2, 10, 3.0, COPYING, REFUSES)
    assert (unknown.replica, unknown.missing) == ("near", None)
    assert of_run("other", copies, [lag])[0].copying is None

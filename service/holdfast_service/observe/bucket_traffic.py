"""Requests to a bucket as the API, logs and the catalog state them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import NamedTuple

from holdfast_files.objects.address import BucketAddress
from holdfast_files.objects.traffic import RequestCount, Traffic
from holdfast_formats import naming
from holdfast_formats.errors import STORAGE, Awaited
from holdfast_formats.rest.replica_lags import BucketTraffic, FailingRequests, RequestCounts, told_refusals
from holdfast_formats.timestamps import write

SILENT_S = 5.0  # without an answer, while it is asked
_NOT_OF_SAVES = ("uploads", "parts")  # kinds of requests


class OfCheckpoint(NamedTuple):
    """What requests are counted by: the checkpoint that an object belongs to."""

    run: str
    step: int


def checkpoint_of(place: BucketAddress) -> Callable[[str], OfCheckpoint | None]:
    """Finds the checkpoint of a whole key, None for objects of no checkpoint."""
    top = f"{place.prefix}/" if place.prefix else ""

    def of(key: str) -> OfCheckpoint | None:
        parts = key.removeprefix(top).split("/")
        if not key.startswith(top) or len(parts) < 3 or not naming.is_run_name(parts[0]):
            return None
        if parts[1] == naming.COMMITS:
            step = naming.parse_step_directory(parts[2])
            return None if step is None else OfCheckpoint(parts[0], step)
        if parts[1] == naming.LINES:
            mark = naming.parse_line_mark(parts[0], parts[2])
            return None if mark is None else OfCheckpoint(parts[0], mark.place.step)
        data = naming.parse_data_directory(parts[0], parts[2]) if parts[1] == naming.DATA else None
        return None if data is None else OfCheckpoint(data.run, data.step)

    return of


def of_save(counts: Mapping[str, RequestCount]) -> dict[str, float]:
    """The members of `SaveTimes` for requests until a commit; none if nothing was asked, as of a directory."""
    if not counts:
        return {}
    total = RequestCount(*map(sum, zip(*counts.values(), strict=True)))
    by_kind = {f"requests_{kind}": float(count.sent) for kind, count in counts.items() if kind not in _NOT_OF_SAVES}
    sizes = {"sent_bytes": float(total.sent_bytes), "received_bytes": float(total.received_bytes)}
    return {"requests": float(total.sent), "retries": float(total.retries), **sizes, **by_kind}


def of_check(counts: Mapping[str, RequestCount]) -> dict[str, float]:
    """The same for requests from the commit until it was verified."""
    whole = of_save(counts)
    return {f"check_{name}": whole[name] for name in ("requests", "retries", "received_bytes") if whole}


class RequestsSince:
    """The requests for a checkpoint from now on, which others may count as well; none of a directory."""

    def __init__(self, traffic: Traffic | None, run: str, step: int) -> None:
        self._traffic, self._of = traffic, OfCheckpoint(run, step)
        self._before = {} if traffic is None else traffic.of(self._of)

    def of_check(self) -> dict[str, float]:
        """The members of `SaveTimes` for a check; less where others have taken the counts meanwhile."""
        now = {} if self._traffic is None else self._traffic.of(self._of)
        counts = {kind: count.less(self._before.get(kind, RequestCount())) for kind, count in now.items()}
        return of_check({kind: count for kind, count in counts.items() if count.sent})


def text(counts: Mapping[str, RequestCount]) -> str:
    """The counts for a log line."""
    kinds = ", ".join(f"{count.sent} {kind}" for kind, count in sorted(counts.items()))
    total = RequestCount(*map(sum, zip(*counts.values(), strict=True)))
    return f"{total.sent} requests ({kinds}), {total.retries} repeated, {total.sent_bytes} bytes sent"


def awaited(traffic: Traffic | None) -> Awaited:
    """What saves wait for that are being written: a bucket that refuses requests is named, with its newest answer."""
    bucket = described(traffic)
    if bucket is None or not bucket.failing:
        return STORAGE
    return Awaited(told_refusals(bucket), "saves go on when it answers: `holdfast doctor --root s3://…` says what to change")


def silence(traffic: Traffic | None, since_s: float) -> str:
    """Why a bucket that is asked since then, in seconds since 1970, has not answered; empty if it does answer."""
    bucket = described(traffic)
    if traffic is None or bucket is None or traffic.answered_s >= max(since_s, time.time() - SILENT_S):
        return ""
    answered = (
        f"its last answer came at {_stamp(traffic.answered_s)}" if traffic.answered_s else "it has given no answer yet"
    )
    silent = f"the bucket is silent since {_stamp(max(since_s, traffic.answered_s))}, {answered}"
    return told_refusals(bucket) or silent


def described(traffic: Traffic | None) -> BucketTraffic | None:
    if traffic is None:
        return None
    return BucketTraffic(
        requests={kind: RequestCounts(**count._asdict()) for kind, count in traffic.by_kind().items()},
        failing=[FailingRequests(kind=one.kind, answer=one.answer, since=_stamp(one.since_s)) for one in traffic.failing()],
    )


def _stamp(seconds: float) -> str:
    return write(datetime.fromtimestamp(seconds, timezone.utc))

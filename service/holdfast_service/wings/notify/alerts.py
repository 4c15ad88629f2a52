"""Alerts of all runs, of nodes, of replicas and of other sources, and the overview of the service."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TypeVar

from holdfast_formats.rest import bodies
from holdfast_formats.rest.alert_order import danger
from holdfast_formats.rest.columns import human_bytes
from holdfast_formats.rest.measurements import Acknowledgement, Alert, Attention, Overview, RunSummary
from holdfast_formats.rest.replica_lags import BucketTraffic, ReplicaLag, told_lag
from holdfast_formats.timestamps import seconds_of, span
from holdfast_service.control.insight.acknowledgements import AlertKey
from holdfast_service.control.insight.summary_queries import Summaries
from holdfast_service.wings.notify.schedule import NO_RUN, NoticeKey, current

PAGE_RUNS = 200
LAGS_S = 3600.0  # as HoldfastReplicaLags in deploy/prometheus/alerts.yml
REFUSES_S = 300.0  # as HoldfastBucketRefuses

Alerting = Callable[[], Iterable[tuple[str, Attention]]]
Item = TypeVar("Item", bound=Attention)


class AlertSources:
    """Combines the summaries of runs, the service for nodes and replicas, and other sources."""

    def __init__(self, summaries: Summaries, of_service: Callable[[], Iterable[Alert]], *others: Alerting) -> None:
        self._summaries, self._of_service, self._others = summaries, of_service, others

    def now(self) -> dict[NoticeKey, Attention]:
        """All alerts; `CatalogUnavailable`, because an unknown alert is not over."""
        listed = without_what_follows([*self._of_runs(), *self._of_service()])
        alerts: list[tuple[str, Attention]] = [(one.run or NO_RUN, one) for one in listed]
        return current([*alerts, *(one for source in self._others for one in source())])

    def _of_runs(self) -> Iterator[Alert]:
        cursor = None
        while True:
            page = self._summaries.page(cursor, PAGE_RUNS)
            yield from of_runs(page.items)
            cursor = page.next
            if cursor is None:
                return


def of_runs(summaries: Sequence[RunSummary]) -> Iterator[Alert]:
    for summary in summaries:
        for item in summary.attention:
            yield Alert(run=summary.run, **vars(item))


def of_nodes(nodes: Sequence[bodies.Node]) -> Iterator[Alert]:
    """Lost nodes, buckets that refuse requests, and replicas that cannot be copied to or lag, as nodes report them."""
    for node in nodes:
        yield from _of_bucket(node)
        yield from _of_lags(node)
        if node.state == "lost":
            yield Alert(
                level="warning",
                code="node-lost",  # in the words of the rule for Prometheus
                text=f"the node {node.name} is lost: its daemon or its machine stopped without signing off",
                hint="Other nodes took over its duties, and its runs can start elsewhere. Start its daemon again, or if it "
                f"is gone for good: `holdfast nodes --forget {node.name}`.",
                subject=node.name,
                remedy="forget-node",
            )


def _of_bucket(node: bodies.Node) -> Iterator[Alert]:
    """What the root's bucket refuses."""
    refused = _refused(node.bucket)
    if refused:
        yield Alert(
            level="error",
            code="bucket-refuses",  # in the words of the rule for Prometheus
            text=f"the bucket {refused}",
            hint="saves wait for it: `holdfast doctor --root s3://…` says what to change",
            subject=node.name,
        )


def _of_lags(node: bodies.Node) -> Iterator[Alert]:
    lags = {one.replica: one for one in node.lags}
    for name, unreached in sorted(node.replicas.items()):
        lag = lags.get(name, ReplicaLag(replica=name, node=node.name))
        behind = told_lag(lag.missing, lag.missing_bytes, lag.lag_s)
        problem = unreached or (f"its bucket {refused}" if (refused := _refused(lag.bucket)) else None)
        if problem is not None:
            yield Alert(
                level="error",
                code="replica-lost",
                text=f"the replica {name} cannot be reached: {problem}" + (f"; {behind}" if behind else ""),
                hint="the root is safe, but nothing new is copied: repair that storage, then copy again",
                subject=name,
                since=lag.problem_since,
                remedy="retry-replicas",
            )
        elif lag.missing_bytes and lag.lag_s is not None and lag.lag_s > LAGS_S:
            yield Alert(
                level="warning",
                code="replica-lags",  # in the words of the rule for Prometheus
                text=f"{human_bytes(lag.missing_bytes)} have yet to be copied to {name}, the oldest for {span(lag.lag_s)}",
                hint="check that this storage is reachable and fast enough",
                subject=name,
                remedy="retry-replicas",
            )


def _refused(bucket: BucketTraffic | None) -> str:
    """What a bucket has refused for long, and its newest answer; empty if there is nothing."""
    for one in bucket.failing if bucket is not None else ():
        lasts = time.time() - seconds_of(one.since)
        if lasts > REFUSES_S:
            return f"has not carried out a {one.kind} for {span(lasts)}: {one.answer}"
    return ""


def keyed(alert: Alert) -> AlertKey:
    return AlertKey(alert.run or "", alert.code, alert.subject or "")


def marked(alerts: Iterator[Alert], known: Mapping[AlertKey, Acknowledgement]) -> list[Alert]:
    """The alerts with their acknowledgements."""
    return [alert.model_copy(update={"acknowledged": known.get(keyed(alert))}) for alert in alerts]


def place(alert: Alert) -> str:
    """Sort keys: alerts without an acknowledgement first, of these errors, and of these the most dangerous."""
    level, code = danger(alert)
    first = f"{int(alert.acknowledged is not None)}{level}{code:03d}"
    return "/".join((first, alert.run or "", alert.code, alert.subject or ""))


def without_what_follows(alerts: Sequence[Item]) -> list[Item]:
    """Without alerts about copies of single runs in a replica that is lost or lags, which has an alert of its own."""
    told = {one.subject for one in alerts if one.code in ("replica-lost", "replica-lags")}
    return [one for one in alerts if one.code not in ("replica-behind", "replica-failing") or one.subject not in told]


def overview(board: Sequence[RunSummary], others: Sequence[Alert]) -> Overview:
    """All runs in a few figures; `others` are alerts that are about no run."""
    alerts = without_what_follows([*(item for summary in board for item in summary.attention), *others])
    counted = [item.level for item in alerts if item.acknowledged is None]
    training = [one for one in board if one.life == "training"]
    dead = max((one for one in board if one.life == "died"), key=lambda one: one.life_since or "", default=None)
    exposed = max(training, key=lambda one: one.exposed_s or 0.0, default=None)
    return Overview(
        runs=len(board),
        states=dict(Counter(one.life for one in board)),
        errors=counted.count("error"),
        warnings=counted.count("warning"),
        acknowledged=len(alerts) - len(counted),
        newest_died=None if dead is None else dead.run,
        newest_died_since=None if dead is None else dead.life_since,
        exposed_s=None if exposed is None else exposed.exposed_s,
        exposed_run=None if exposed is None else exposed.run,
        cost=fmean(costs) if (costs := [cost for one in training if (cost := _cost(one)) is not None]) else None,
        checkpoints=sum(one.checkpoints for one in board),
        bytes=sum(one.bytes for one in board),
        free_bytes=board[0].free_bytes if board else None,
    )


def _cost(summary: RunSummary) -> float | None:
    """The fraction of time for which saves stall a run."""
    known = [value for value in summary.trend.goodput if value is not None]
    return 1.0 - fmean(known) if known else None

"""Reports how far each replica of a node is behind, what is copied to it now, and what its bucket refuses."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast_files.objects.traffic import Traffic
from holdfast_formats.rest.replica_lags import ReplicaLag
from holdfast_service.control.insight.copy_lags import CopyLags
from holdfast_service.daemon.copying.replicas import Replicator
from holdfast_service.observe import bucket_traffic


class LagReports:
    """Of the replicas that this node copies to. Waits for no storage, and a moment for the catalog."""

    def __init__(
        self, node: str, replicators: Mapping[str, Replicator], traffic: Mapping[str, Traffic], lags: CopyLags
    ) -> None:
        """`traffic` has the requests to each replica that is in a bucket."""
        self._node, self._replicators, self._traffic, self._lags = node, replicators, traffic, lags

    def now(self) -> list[ReplicaLag]:
        """By name."""
        seen, now = self._lags.seen(), self._lags.clock()
        reports = []
        for name, one in sorted(self._replicators.items()):
            if not one.is_mine():
                continue
            lag = seen.get(name)
            reports.append(
                ReplicaLag(
                    replica=name,
                    node=self._node,
                    missing=None if lag is None else lag.missing,
                    missing_bytes=None if lag is None else lag.bytes,
                    lag_s=None if lag is None else round(lag.seconds(now), 1),
                    problem=one.said,
                    problem_since=one.problem_since,
                    copying=one.progress.now(),
                    bucket=bucket_traffic.described(self._traffic.get(name)),
                )
            )
        return reports

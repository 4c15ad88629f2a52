"""What a node reports of its replicas."""

from __future__ import annotations

from pathlib import Path

from holdfast_files.objects.traffic import RequestCount, Traffic
from holdfast_service.control.insight.copy_lags import CopyLags
from holdfast_service.daemon.copying.lag_reports import LagReports
from holdfast_service.storage import PosixTier
from tests.daemon.copies_world import RUN, copies_world
from tests.daemons import wait_until


def test_a_node_reports_the_replicas_that_it_copies_to(tmp_path: Path) -> None:
    """With their lag, the requests to their buckets, and what they refuse; not those that another node copies to."""
    with copies_world(tmp_path, steps=(5, 6)) as world:
        world.add("other", PosixTier(tmp_path / "other"), is_mine=lambda: False)
        traffic = Traffic()
        traffic.add("put", RequestCount(1, 0, 10, 0))
        traffic.settle("put", "403 AccessDenied")
        reports = LagReports("n1", world.replicators, {"far": traffic}, CopyLags(world.catalog.database, world.replicators))
        wait_until(lambda: reports.now()[0].missing is not None)
        (far,) = reports.now()
        assert (far.replica, far.node, far.missing, far.problem, far.copying) == ("far", "n1", 2, None, None)
        assert far.missing_bytes == sum(one.bytes for one in world.catalog.checkpoints(RUN, None, 10).items)
        assert far.bucket is not None and [one.answer for one in far.bucket.failing] == ["403 AccessDenied"]
        assert far.bucket.requests["put"].sent_bytes == 10

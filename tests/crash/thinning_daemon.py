"""A daemon that something happens to before a chosen act of thinning and compacting: `… LOG [flags]`, as `importing_daemon`.

Acts are counted from the moment at which it looks at a run of which something is due. It tries again soon what had to wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from holdfast_service.__main__ import main
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.daemon.copying import thinner
from holdfast_service.daemon.copying.thinner import Thinner
from holdfast_service.storage.posix import PosixTier
from tests.crash.acts import Acts

THREADS = ("holdfast-thinner", "holdfast-stream_0", "holdfast-book")
AGAIN_S = 0.3


def begun(acts: Acts, look: Callable[[Thinner, str], list[int]]) -> Callable[[Thinner, str], list[int]]:
    """Looking at a run begins to count."""

    def looking(worker: Thinner, run: str) -> list[int]:
        if worker._records.due(run):
            acts.begin()
        return look(worker, run)

    return looking


if __name__ == "__main__":
    acts = Acts(sys.argv[1], THREADS)
    acts.install((PosixTier, "link"), (PosixTier, "exchange"), (Catalog, "record_checkpoint"), (Events, "record"))
    Thinner.run_once = begun(acts, Thinner.run_once)  # type: ignore[method-assign]
    thinner.AGAIN_S = thinner.FAILED_AGAIN_S = AGAIN_S
    sys.exit(main(sys.argv[2:]))

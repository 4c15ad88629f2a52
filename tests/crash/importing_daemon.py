"""A daemon whose imports and exports make small files, and that kills itself before a chosen act of a job: `… LOG [flags]`.

Acts are what a job does to the disk and to the catalog. Their names go to LOG, a line each: a test sees what was repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from holdfast_service.__main__ import main
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.jobs.catalog import Jobs
from tests.crash.acts import Acts, small_files

THREADS = ("holdfast-job", "holdfast-stream_0")


def begun(acts: Acts, claim: Callable[..., Any]) -> Callable[..., Any]:
    """Claiming a job begins to count."""

    def claiming(*arguments: Any) -> Any:
        job = claim(*arguments)
        if job is not None:
            acts.begin()
        return job

    return claiming


if __name__ == "__main__":
    acts = Acts(sys.argv[1], THREADS)
    acts.install((Catalog, "record_checkpoint"), (Jobs, "finish"))
    Jobs.claim = begun(acts, Jobs.claim)  # type: ignore[method-assign]
    small_files()
    sys.exit(main(sys.argv[2:]))

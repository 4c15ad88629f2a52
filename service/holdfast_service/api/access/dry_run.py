"""Changes that are only tried: the route says so to the audit log, because a route that does not know the parameter
`dry_run` does what it is asked to do.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request


def _dry_run(
    request: Request, dry_run: Annotated[bool, Query(description="change nothing; only report what would happen")] = False
) -> bool:
    request.state.dry_run = dry_run
    return dry_run


DryRun = Annotated[bool, Depends(_dry_run)]

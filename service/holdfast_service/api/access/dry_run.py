"""Changes that are only rehearsed: the audit log has to hear of that from the route, since a route that does not know the
parameter `dry_run` changes what it is asked to change.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request


def _rehearsal(
    request: Request, dry_run: Annotated[bool, Query(description="change nothing; only report what would happen")] = False
) -> bool:
    request.state.rehearsed = dry_run
    return dry_run


DryRun = Annotated[bool, Depends(_rehearsal)]
